"""The classic names that are modules show what they add, and stay whole modules."""

from __future__ import annotations

import abc
import copy
import pickle
import pydoc
import re
from collections.abc import Sized
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.classic.toys import Net

FACADES = [th.FeatureLayer, th.FeatureLayers, th.FeatureExtractor, th.VerboseExecution]


def helped(thing: Any) -> list[str]:
    return pydoc.render_doc(thing, renderer=pydoc.plaintext).splitlines()


@pytest.mark.parametrize("facade", FACADES)
def test_help_tells_of_the_class_and_not_of_every_module(facade: type[nn.Module]) -> None:
    lines = helped(facade)
    assert len(lines) < 75
    text = "\n".join(lines)
    assert "forward(self, *args" in text
    assert re.search(r"__init__\([\s|]*self,[\s|]*model", text)  # Python 3.13 breaks long lines
    assert "register_forward_hook" not in text


def test_help_of_the_library_is_not_drowned() -> None:
    assert "register_full_backward_pre_hook" not in "\n".join(helped(th))


@pytest.mark.parametrize("facade", FACADES)
def test_a_class_lists_what_it_adds(facade: type[nn.Module]) -> None:
    added = ["forward"] if facade is th.VerboseExecution else ["compile", "forward", "to_onnx"]
    assert [name for name in dir(facade) if not name.startswith("_")] == added
    assert {"__init__", "__doc__", "__module__"} <= set(dir(facade))
    assert facade.state_dict is nn.Module.state_dict  # not listed, and there


def test_an_instance_lists_all_that_a_module_has(net: Net) -> None:
    hooked = th.FeatureLayers(net, ["fc1"])
    plain = nn.Identity()
    assert set(dir(plain)) <= set(dir(hooked))
    assert {"model", "feature_layer_paths", "forward"} <= set(dir(hooked))


def test_a_users_class_may_be_abstract_and_lists_what_it_adds(net: Net, x: Tensor) -> None:
    class Measured(abc.ABC):
        @abc.abstractmethod
        def measure(self) -> int: ...

    class Half(th.FeatureLayers, Measured, Sized):
        def __len__(self) -> int:
            return len(self.feature_layer_paths)

    class Whole(Half):
        def measure(self) -> int:
            return 3

    with pytest.raises(TypeError, match="abstract"):
        Half(net, ["fc1"])
    whole = Whole(net, ["fc1"])
    assert (whole.measure(), len(whole), len(whole(x)[0])) == (3, 1, 1)
    assert {"__len__", "forward", "measure"} <= set(dir(Whole))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("facade", FACADES)
def test_a_facade_is_copied_and_pickled_as_a_module_is(net: Net, x: Tensor, facade: Any, duplicate: Any) -> None:
    paths = {th.FeatureLayer: ("fc1",), th.VerboseExecution: ()}.get(facade, (["fc1"],))
    twin = duplicate(facade(net, *paths))
    assert type(twin) is facade
    assert twin.state_dict().keys() == {f"model.{name}" for name in net.state_dict()}
    assert torch.equal(twin.model(x), net(x))


@pytest.mark.parametrize("facade", FACADES)
def test_what_is_no_model_is_refused_as_the_ancestors_did_and_more(facade: Any) -> None:
    for kind in (TypeError, AssertionError, th.errors.ArgumentError):
        with pytest.raises(kind, match=r"^model must be a torch\.nn\.Module, found str\.$"):
            facade("resnet18", *([] if facade is th.VerboseExecution else ["fc1"]))
