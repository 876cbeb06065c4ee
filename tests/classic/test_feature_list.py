"""What ``FeatureLayers`` returns: a list that knows its paths, whoever moves, converts, copies or changes it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.data import default_collate, default_convert

import torchhook as th
from torchhook.errors import SelectorError


def made(batch: int = 2) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).requires_grad_(False), torch.randn(batch, 4)
    features, _ = th.FeatureLayers(model, ["0", "2"])(x)
    return features, [model[0](x), model(x)]


def assert_values(features: Any, expected: list[Tensor]) -> None:
    assert len(features) == len(expected)
    for found, value in zip(features, expected, strict=True):
        torch.testing.assert_close(found, value)


REBUILT: dict[str, Callable[[Any], Any]] = {
    "list": lambda f: type(f)(list(f)),
    "generator": lambda f: type(f)(v for v in f),
    "map": lambda f: type(f)(map(torch.clone, f)),
    "tuple": lambda f: type(f)(tuple(f)),
    "pinned": lambda f: type(f)([v.cpu() for v in f]),
}


def with_fsdp(features: Any) -> Any:
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(torch.clone, features)


def with_accelerate(features: Any) -> Any:
    accelerate = pytest.importorskip("accelerate.utils")
    return accelerate.send_to_device(accelerate.convert_to_fp32(features), "cpu")


def with_lightning(features: Any) -> Any:
    apply_func = pytest.importorskip("lightning_utilities.core.apply_func")
    return apply_func.apply_to_collection(features, Tensor, torch.clone)


REBUILT |= {"FSDP1": with_fsdp, "accelerate": with_accelerate, "Lightning": with_lightning}


@pytest.mark.parametrize("how", REBUILT)
@pytest.mark.parametrize("batch", [1, 2, 3])  # of two, rows were taken for paths and values
def test_a_list_that_is_made_anew_has_the_values(how: str, batch: int) -> None:
    features, expected = made(batch)
    again = REBUILT[how](features)
    assert type(again) is type(features)
    assert_values(again, expected)
    if again._paths is None:
        for ask in (lambda: again["0"], again.keys, again.items, lambda: "0" in again):
            with pytest.raises(SelectorError, match=r"^the paths of these 2 features are lost: .* by position"):
                ask()
        assert_values(again.values(), expected)
        assert again != {"0": 1}
    else:
        assert again.keys() == ["0", "2"]


KEEP_PATHS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "its own copy": lambda f: f.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda f: pickle.loads(pickle.dumps(f)),
    "pytree": lambda f: _pytree.tree_map(torch.clone, f),
    "convert": default_convert,
    "collate": lambda f: default_collate([f]),
}


@pytest.mark.parametrize("how", KEEP_PATHS)
def test_what_copies_a_list_keeps_the_paths(how: str) -> None:
    features, expected = made()
    again = KEEP_PATHS[how](features)
    expected = [value[None] for value in expected] if how == "collate" else expected
    assert again.keys() == ["0", "2"]
    assert_values(again, expected)
    assert_values([again["0"], again["2"]], expected)
    again[0] = torch.zeros(1)
    assert features["0"].shape == (2, 4)


CHANGES: dict[str, tuple[Callable[[Any], Any], list[str], list[float]]] = {
    "append": (lambda f: f.append(9.0), ["0", "1", "2"], [0.0, 1.0, 2.0, 9.0]),
    "extend": (lambda f: f.extend([8.0, 9.0]), ["0", "1", "2"], [0.0, 1.0, 2.0, 8.0, 9.0]),
    "set": (lambda f: f.__setitem__(1, 9.0), ["0", "1", "2"], [0.0, 9.0, 2.0]),
    "set the last": (lambda f: f.__setitem__(-1, 9.0), ["0", "1", "2"], [0.0, 1.0, 9.0]),
    "set by path": (lambda f: f.__setitem__("1", 9.0), ["0", "1", "2"], [0.0, 9.0, 2.0]),
    "set a slice": (lambda f: f.__setitem__(slice(0, 2), [8.0, 9.0]), ["0", "1", "2"], [8.0, 9.0, 2.0]),
    "shorten a slice": (lambda f: f.__setitem__(slice(0, 2), [9.0]), ["2"], [9.0, 2.0]),
    "set every other": (lambda f: f.__setitem__(slice(None, None, 2), [8.0, 9.0]), ["0", "1", "2"], [8.0, 1.0, 9.0]),
    "delete": (lambda f: f.__delitem__(0), ["1", "2"], [1.0, 2.0]),
    "delete by path": (lambda f: f.__delitem__("1"), ["0", "2"], [0.0, 2.0]),
    "insert": (lambda f: f.insert(1, 9.0), ["0", "1", "2"], [0.0, 9.0, 1.0, 2.0]),
    "pop": (lambda f: f.pop(), ["0", "1"], [0.0, 1.0]),
    "pop the first": (lambda f: f.pop(0), ["1", "2"], [1.0, 2.0]),
    "append and pop": (lambda f: (f.append(9.0), f.pop()), ["0", "1", "2"], [0.0, 1.0, 2.0]),
    "append and delete": (lambda f: (f.append(9.0), f.__delitem__(0)), ["1", "2"], [1.0, 2.0, 9.0]),
    "remove": (lambda f: f.remove(1.0), ["0", "2"], [0.0, 2.0]),
    "reverse": (lambda f: f.reverse(), ["2", "1", "0"], [2.0, 1.0, 0.0]),
    "clear": (lambda f: f.clear(), [], []),
    "twice": (lambda f: f.__imul__(2), ["0", "1", "2"], [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_paths_stay_with_their_values(change: str) -> None:
    features, _ = made()
    numbers = type(features)([0.0, 1.0, 2.0], ["0", "1", "2"])
    how, paths, values = CHANGES[change]
    how(numbers)
    assert numbers.keys() == paths
    assert list(numbers) == values
    for path in paths:
        assert numbers[path] == numbers[numbers._paths.index(path)] == dict(numbers.items())[path]
    changed = [path for path in paths if numbers[path] != float(path)]
    assert not changed or change.startswith(("set", "shorten"))


def test_a_sorted_list_says_that_it_lost_its_paths() -> None:
    features, _ = made()
    numbers = type(features)([2.0, 1.0], ["a", "b"])
    numbers.sort()
    assert list(numbers) == [1.0, 2.0]
    with pytest.raises(SelectorError, match="are lost"):
        numbers["a"]


def test_a_list_without_paths_is_changed_like_any_other() -> None:
    features, _ = made()
    numbers = type(features)([2.0, 1.0, 3.0])
    numbers.insert(0, 5.0)
    del numbers[1]
    numbers.reverse()
    numbers[:1] = [7.0, 8.0]
    assert list(numbers) == [7.0, 8.0, 1.0, 5.0]
    assert numbers.pop() == 5.0
    assert numbers._paths is None


def test_a_path_that_is_asked_for_twice_is_there_twice_and_has_one_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    features, _ = th.FeatureLayers(model, ["0", "0"])(torch.ones(1, 4))
    assert len(features) == 2
    assert features.keys() == ["0"]
    assert torch.equal(features["0"], features[1])


def test_accelerate_prepares_a_model_with_features() -> None:
    accelerate = pytest.importorskip("accelerate")
    prepares = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    for batch in (2, 3):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        features, output = prepares.prepare(th.FeatureLayers(model, ["0", "1"], attach=True))(torch.randn(batch, 4))
        assert [tuple(value.shape) for value in features] == [(batch, 4)] * 2
        torch.testing.assert_close(features[1], output)
