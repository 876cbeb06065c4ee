"""``layers`` and ``ops``: what a model is made of, in names, numbers and shapes, without touching it."""

from __future__ import annotations

import contextlib
import re
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchhook as th
from tests.models import Merges, Restless
from tests.oracle import assert_same, snapshot
from torchhook._layers.api import Layer, ops
from torchhook.errors import SelectorError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.body = nn.Sequential(nn.ReLU(inplace=True), nn.ModuleList([nn.Identity()]))
        self.head = nn.Linear(2, 2, bias=False)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.head.weight
        self.again = self.body[0]
        self.unused = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.again(self.body[0](self.conv(x))).mean((2, 3)))
        return {"logits": self.tied(self.head(x))}


PLAIN = """\
layer         type           parameters
---------------------------------------
(model)       Net                    24
conv          Conv2d                 20
body          Sequential              0
  body.0      ReLU                    0
  body.1      ModuleList              0
    body.1.0  Identity                0
head          Linear                  4
tied          Linear                  4
again         ReLU = body.0           0
unused        Dropout                 0"""

RUN = """\
layer     type           output           parameters
----------------------------------------------------
(model)   Net            {logits=(3, 2)}          24
conv      Conv2d         (3, 2, 2, 2)             20
body      Sequential     -                         0
  body.0  ReLU           (3, 2, 2, 2)              0
  body.1  ModuleList     -                         0
head      Linear         (3, 2)                    4
tied      Linear         (3, 2)                    4
again     ReLU = body.0  (3, 2, 2, 2)              0
unused    Dropout        -                         0"""


def test_the_tree_lists_every_module_with_its_type_and_parameters() -> None:
    title, _, table = str(th.layers(Net())).partition("\n")
    assert re.fullmatch(r"Net: 9 layers, 24(\.00)? parameters", title)
    assert table == PLAIN


def test_with_inputs_the_shapes_of_the_outputs_are_shown() -> None:
    assert str(th.layers(Net(), torch.ones(3, 1, 4, 4), depth=2)).partition("\n")[2] == RUN


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (0, [""]),
        (1, ["", "conv", "body", "head", "tied", "again", "unused"]),
        (2, ["", "conv", "body", "body.0", "body.1", "head", "tied", "again", "unused"]),
        (None, ["", "conv", "body", "body.0", "body.1", "body.1.0", "head", "tied", "again", "unused"]),
        (9, ["", "conv", "body", "body.0", "body.1", "body.1.0", "head", "tied", "again", "unused"]),
    ],
)
def test_depth_counts_the_levels_below_the_model(depth: int | None, names: list[str]) -> None:
    found = th.layers(Net(), depth=depth)
    assert found.names() == names
    assert [layer.depth for layer in found] == [name.count(".") + 1 if name else 0 for name in names]


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth=-1: give the number of levels below the model, or None for all"):
        th.layers(Net(), depth=-1)


def test_layers_are_read_by_name_by_number_and_in_order() -> None:
    found = th.layers(Net())
    assert found["conv"] == Layer("conv", "Conv2d", 20, trainable=20, kernel=(3, 3))
    assert found[1] is found["conv"]
    assert found[-1].name == "unused"
    assert found["again"].shared_with == "body.0"
    assert "body.0" in found
    assert "body.7" not in found
    assert len(found) == len(list(found)) == 10


def test_a_number_in_the_place_of_the_inputs_is_told_from_a_depth() -> None:
    with pytest.raises(TypeError, match=r"^layers\(model, 2\): .* write depth=2; "):
        th.layers(Net(), 2)


def test_the_model_itself_is_read_as_it_is_printed() -> None:
    found = th.layers(Net())
    assert found["(model)"] is found[""]
    assert "(model)" in found
    assert 3 not in found
    model = nn.Module()
    model.add_module("(model)", nn.ReLU())
    assert th.layers(model)["(model)"].type == "Module"


def test_a_wrong_name_offers_the_closest() -> None:
    with pytest.raises(SelectorError, match=r"^no layer 'con' here\. Closest: 'conv'"):
        th.layers(Net())["con"]


def test_tied_weights_are_counted_once_in_every_total() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    found = th.layers(model)
    assert found[""].parameters == 9 + 3 + 3
    assert found["0"].parameters == found["1"].parameters == 12


@pytest.mark.parametrize(
    "inputs",
    [torch.ones(2, 3), (torch.ones(2, 3),), {"input": torch.ones(2, 3)}, th.Inputs((torch.ones(2, 3),), {})],
    ids=["tensor", "tuple", "dict", "both"],
)
def test_inputs_are_a_tensor_a_tuple_of_arguments_a_dict_of_keywords_or_both(inputs: Any) -> None:
    assert th.layers(nn.Linear(3, 4), inputs=inputs)[""].shape == (2, 4)
    assert th.layers(nn.Linear(3, 4), inputs)[""].shape == (2, 4)
    assert [op.address for op in ops(nn.Linear(3, 4), inputs)] == ["/linear"]


class Halves(nn.Module):
    """One ReLU and one Linear at three widths, two and two: the ReLU's outputs differ, those of the Linear do not."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.head = nn.ReLU(), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        for width in (8, 8, 4, 2):
            x = self.act(x[:, :width])
        return self.head(x) + self.head(x)


def test_of_several_calls_the_first_gives_the_shape_and_those_that_differ_are_counted() -> None:
    found = th.layers(Halves(), torch.ones(1, 9), columns=("output", "memory"))
    assert (found["act"].shape, found["act"].output) == ((1, 8), "(1, 8) and 2 more")
    assert found["act"].memory == 8 * 4
    assert (found["head"].shape, found["head"].output) == ((1, 3), "(1, 3)")
    assert re.search(r"act +\(1, 8\) and 2 more", str(found))


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was_even_when_it_raises(fails: bool) -> None:
    model = Net().train()
    model.body.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError, match="channels"):
            th.layers(model, inputs=torch.ones(3, 7, 4, 4))
    else:
        th.layers(model, inputs=torch.ones(3, 1, 4, 4))
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_batch_statistics_do_not_move() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).train()
    th.layers(model, inputs=torch.rand(5, 3))
    assert model[0].num_batches_tracked.item() == 0
    assert model[0].running_mean.tolist() == [0, 0, 0]


def test_a_lazy_module_counts_nothing_before_it_ran() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    assert th.layers(model)["0"].parameters == 0
    assert th.layers(model, inputs=torch.ones(1, 2))["0"].parameters == 9


def test_wrapped_models_show_their_original_names() -> None:
    assert th.layers(nn.DataParallel(Net())).names() == th.layers(Net()).names()


def test_html_shows_the_same_names_escaped() -> None:
    model = nn.Module()
    model.add_module("<b>", nn.ReLU())
    page = th.layers(model)._repr_html_()
    assert "&lt;b&gt;" in page
    assert "(model)" in page


def test_every_module_of_a_real_model_is_there_with_its_shape() -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.resnet18()
    found = th.layers(model, inputs=torch.ones(1, 3, 64, 64))
    assert found.names() == [name for name, _ in model.named_modules()]
    assert found[""].parameters == 11_689_512
    assert found["layer4.1.relu"].shape == (1, 512, 2, 2)
    assert all(layer.shape is not None for layer in found)
    assert str(found).splitlines()[0] == "ResNet: 67 layers, 11,689,512 parameters"


def test_ops_lists_the_functional_operations_with_their_addresses() -> None:
    found = ops(Net().eval(), torch.ones(3, 1, 4, 4))
    calls = {op.address: op.calls for op in found}
    assert calls["conv/conv2d"] == 1
    assert calls["/relu"] == 1
    assert calls["body.0/relu"] == 2
    assert calls["/mean"] == 1
    assert str(found).splitlines()[0] == f"{len(found)} operations"
    assert "(model)/relu" in str(found)
    assert "conv/conv2d" in found._repr_html_()


def test_operations_are_those_of_the_mode_that_the_model_is_in() -> None:
    class Modal(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.tanh() if self.training else x.sigmoid()
            return x.exp() if torch.is_grad_enabled() else x.log()

    model = Modal()
    assert [op.name for op in ops(model, torch.ones(1))] == ["tanh", "exp"]
    model.eval()
    with torch.no_grad():
        assert [op.name for op in ops(model, torch.ones(1))] == ["sigmoid", "log"]


# -- layers and ops leave everything as it was -----------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("function", [th.layers, th.ops])
def test_everything_is_left_as_it_was_whatever_the_model_does(function: Any, training: bool, fails: bool) -> None:
    model, x = Restless(fails).train(training), torch.randn(3, 4, 8)
    kept, before, grad = x.clone(), snapshot(model, versions=False), model.head.weight.grad
    with pytest.raises(KeyError, match="mine") if fails else contextlib.nullcontext():
        function(model, th.Inputs((x,), {"scale": 2.0}))
    assert_same(before, snapshot(model, versions=False), "the model and the process")
    assert model.head.weight.grad is grad
    assert torch.equal(x, kept)


def test_listing_operations_moves_no_batch_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).train()
    th.ops(model, torch.rand(5, 3))
    assert model[0].num_batches_tracked.item() == 0
    assert model[0].running_mean.tolist() == [0, 0, 0]


class Writes(nn.Module):
    """Changes everything that a forward pass can change: its input, its buffer, the random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(1))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.steps += 1
        return self.relu(x) * torch.rand(()) * scale


def test_the_run_for_the_shapes_changes_neither_inputs_nor_buffers_nor_random_numbers() -> None:
    model, x, state = Writes(), -torch.ones(2, 3), torch.get_rng_state()
    steps = model.steps
    assert th.layers(model, inputs=x)["relu"].shape == (2, 3)
    assert torch.equal(x, -torch.ones(2, 3))
    assert model.steps is steps
    assert steps.item() == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "inputs", [{"x": torch.ones(2), "scale": 2.0}, UserDict(x=torch.ones(2)), (torch.ones(2), 3.0)]
)
def test_inputs_may_be_any_mapping_or_a_tuple(inputs: Any) -> None:
    assert th.layers(Writes(), inputs=inputs)["relu"].shape == (2,)


@pytest.mark.parametrize("fails", [False, True])
def test_a_models_own_train_method_is_not_called_and_every_mode_comes_back(fails: bool) -> None:
    model = nn.Sequential(Merges(2, 3), nn.Dropout(0.5), nn.ReLU())
    model[2].training = False
    weight = model[0].weight.detach().clone()
    if fails:
        with pytest.raises(RuntimeError):
            th.layers(model, inputs=torch.ones(1, 7))
    else:
        th.layers(model, inputs=torch.ones(1, 2))
    assert torch.equal(model[0].weight, weight)
    assert [m.training for m in model.modules()] == [True, True, True, False]


def test_the_run_is_in_eval_mode_and_takes_lazy_buffers() -> None:
    modes = []
    model = nn.Sequential(nn.LazyBatchNorm1d(), nn.ReLU())
    model[1].register_forward_pre_hook(lambda module, args: modes.append((module.training, torch.is_grad_enabled())))
    assert th.layers(model, inputs=torch.ones(1, 2))["0"].shape == (1, 2)
    assert modes == [(False, False)]
