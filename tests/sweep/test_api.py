"""Activation patching: the matrix is that of a loop written by hand, batched or not, and nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import oracle
from tests.language_models import ENDS, made
from tests.models import Restless
from torchhook import edits
from torchhook._capture import capture, edit
from torchhook._recording.sweeps import Sweep
from torchhook._sweep.api import sweep as _sweep
from torchhook._values.tree import Inputs
from torchhook.errors import EditError, MissingRecordError, NeverRanError, SelectorError


def sweep(*args: Any, **options: Any) -> Sweep:
    return _sweep(*args, progress=False, **options)


def by_hand(
    model: nn.Module,
    names: Sequence[str],
    clean: Any,
    corrupted: Any,
    metric: Callable[[Any], Tensor],
    dim: int = 1,
    call: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
) -> Tensor:
    """Bare hooks: cache the clean run, then one forward pass for each site and position."""
    cache: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    matrix = []
    with torch.no_grad():
        keep = [
            modules[n].register_forward_hook(lambda m, a, out, n=n: cache.__setitem__(n, _tensor(out).clone()))
            for n in names
        ]
        call(model, clean)
        for handle in keep:
            handle.remove()
        for name in names:
            matrix.append([])
            for position in range(cache[name].shape[dim]):

                def put(module: nn.Module, args: Any, out: Any, name: str = name, position: int = position) -> Any:
                    new = _tensor(out).clone()
                    new.select(dim, position).copy_(cache[name].select(dim, position))
                    return (new, *out[1:]) if isinstance(out, tuple) else new

                handle = modules[name].register_forward_hook(put)
                matrix[-1].append(float(metric(call(model, corrupted))))
                handle.remove()
    return torch.tensor(matrix)


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


class Mixer(nn.Module):
    """Tokens that look at each other, so that a patch at one position reaches the others."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        if mask is not None:
            x = x * mask[..., None]
        for block in self.blocks:
            x = x + torch.tanh(block(x + x.cumsum(1) / 3))
        return self.head(self.drop(x))


def mixer() -> nn.Module:
    torch.manual_seed(0)
    return Mixer().eval()


def prompts(batch: int = 1, length: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    clean = torch.randint(16, (batch, length), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 3) % 16
    corrupted[:, 3] = (clean[:, 3] + 5) % 16
    return clean, corrupted


def margin(logits: Any) -> Tensor:
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


NAMES = ["embed", "blocks.0", "blocks.1", "head"]


# -- the matrix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("examples", [1, 3])
def test_the_matrix_is_that_of_a_loop_by_hand_however_it_is_batched(batch: int | None, examples: int) -> None:
    model, (clean, corrupted) = mixer(), prompts(examples)
    expected = by_hand(model, NAMES, clean, corrupted, margin)
    found = sweep(model, clean, corrupted, margin, sites=NAMES, batch=batch)
    assert found.notes == []
    assert found.sites == NAMES
    assert found.positions == list(range(5))
    assert expected.std() > 1e-3
    assert (found.values - expected).abs().max() <= 1e-5
    if batch == 1:
        assert torch.equal(found.values, expected)
    with torch.no_grad():
        assert found.clean == float(margin(model(clean)))
        assert found.corrupted == float(margin(model(corrupted)))


@pytest.mark.parametrize("batched", [True, False])
def test_an_ioi_sweep_over_every_block_and_position_of_gpt2_is_that_of_a_loop_by_hand(batched: bool) -> None:
    model = made("gpt2", n_layer=4, **ENDS)
    tokens = torch.randint(64, (1, 15))
    corrupted = tokens.clone()
    corrupted[0, [1, 9]] = tokens[0, [3, 1]]
    names = [f"transformer.h.{i}" for i in range(4)]

    def call(model: nn.Module, ids: Tensor) -> Any:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids))

    inputs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in (tokens, corrupted)]
    expected = by_hand(model, names, tokens, corrupted, margin, call=call)
    found = sweep(model, *inputs, margin, sites="transformer.h.*", batch=None if batched else 1)
    assert found.notes == []
    assert expected.std() > 1e-4
    assert (found.values - expected).abs().max() <= 1e-5
    assert found.values.shape == (4, 15)


def test_many_patches_share_a_forward_pass() -> None:
    model, (clean, corrupted) = mixer(), prompts()
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[0]))
    sweep(model, clean, corrupted, margin, sites=NAMES, batch=8)
    handle.remove()
    assert sizes == [1, 1, 8, 1, 1, 8, 4, 1]


def test_positions_may_be_chosen_and_counted_from_the_end() -> None:
    model, (clean, corrupted) = mixer(), prompts()
    expected = by_hand(model, NAMES, clean, corrupted, margin)
    found = sweep(model, clean, corrupted, margin, sites=NAMES, positions=[3, -1])
    assert found.positions == [3, -1]
    assert (found.values - expected[:, [3, -1]]).abs().max() <= 1e-5
    with pytest.raises(ValueError, match=r"positions \[5\] are out of range: the dim of tokens has 5"):
        sweep(model, clean, corrupted, margin, sites=NAMES, positions=[0, 5])


def test_a_site_patched_as_a_whole_brings_the_clean_metric_back() -> None:
    model, (clean, corrupted) = mixer(), prompts(2)
    found = sweep(model, clean, corrupted, margin, sites=["embed", "head"], dim=None)
    assert found.positions is None
    assert found.values[:, 0].tolist() == pytest.approx([found.clean, found.clean], abs=1e-6)
    assert found.normalized[:, 0].tolist() == pytest.approx([1, 1], abs=1e-4)
    with pytest.raises(ValueError, match="leave them out"):
        sweep(model, clean, corrupted, margin, sites="embed", positions=[1], dim=None)


def test_channels_of_a_convolution_are_swept_even_where_layers_have_different_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 1))
    model.eval()
    clean, corrupted = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    found = sweep(model, clean, corrupted, torch.sum, sites=["0", "2"])
    expected = [by_hand(model, [name], clean, corrupted, torch.sum)[0] for name in ("0", "2")]
    assert (found.values[0, :2] - expected[0]).abs().max() <= 1e-5
    assert (found.values[1] - expected[1]).abs().max() <= 1e-5
    assert found.values[0, 2:].isnan().all()
    assert "-" in str(found)


def test_inputs_may_be_tuples_and_dicts_with_a_mask() -> None:
    model, (clean, corrupted) = mixer(), prompts(2)
    mask = torch.ones(2, 5)
    mask[1, :2] = 0
    expected = by_hand(model, NAMES, clean, corrupted, margin, call=lambda model, x: model(x, mask=mask))
    for inputs in ([(clean, mask), (corrupted, mask)], [{"tokens": t, "mask": mask} for t in (clean, corrupted)]):
        found = sweep(model, *inputs, margin, sites=NAMES)
        assert found.notes == []
        assert (found.values - expected).abs().max() <= 1e-5


def test_a_site_that_runs_more_than_once_has_a_row_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.relu(self.layer(x)))

    torch.manual_seed(0)
    model = Twice()
    clean, corrupted = torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    found = sweep(model, clean, corrupted, torch.sum, sites="layer")
    assert found.sites == ["layer#0", "layer#1"]
    with torch.no_grad():
        first = [model.layer(x) for x in (clean, corrupted)]
        second = [model.layer(torch.relu(x)) for x in first]
        for position in range(4):
            mixed = first[1].clone()
            mixed[:, position] = first[0][:, position]
            assert float(found["layer#0", position]) == pytest.approx(
                model.layer(torch.relu(mixed)).sum().item(), abs=1e-5
            )
            mixed = second[1].clone()
            mixed[:, position] = second[0][:, position]
            assert float(found["layer#1", position]) == pytest.approx(mixed.sum().item(), abs=1e-5)
    assert sweep(model, clean, corrupted, torch.sum, sites="layer#1").values.tolist() == found.values[1:].tolist()


def test_inputs_and_operations_are_sites_too() -> None:
    model, (clean, corrupted) = mixer(), prompts()
    as_output = sweep(model, clean, corrupted, margin, sites="drop")
    as_input = sweep(model, clean, corrupted, margin, sites="head:input")
    assert torch.allclose(as_output.values, as_input.values, atol=1e-6)
    as_op = sweep(model, clean, corrupted, margin, sites="/tanh#1")
    assert as_op.sites == ["/tanh#1"]
    assert as_op.values.std() > 0


def test_a_nested_value_is_patched_at_the_leaf_that_is_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0].cumsum(1))

    torch.manual_seed(0)
    model = Model()
    clean, corrupted = torch.randn(1, 6, 3), torch.randn(1, 6, 3)
    with pytest.raises(EditError, match=r"lstm: a position belongs to one tensor, and this value has 3: '0', '1\.0'"):
        sweep(model, clean, corrupted, torch.sum, sites="lstm")
    with pytest.raises(EditError, match=r"no tensor at leaf='2'\. There are: '0', '1\.0', '1\.1'\."):
        sweep(model, clean, corrupted, torch.sum, sites="lstm", leaf="2")
    one = r"head: no tensor at leaf='0'\. The value is one tensor of shape \(1, 6, 1\): leave leaf= out\."
    with pytest.raises(EditError, match=one):
        sweep(model, clean, corrupted, torch.sum, sites="head", leaf="0")
    found = sweep(model, clean, corrupted, torch.sum, sites="lstm", leaf="0")
    assert (found.values - by_hand(model, ["lstm"], clean, corrupted, torch.sum)).abs().max() <= 1e-5
    assert found.notes == []


@pytest.mark.parametrize("batch", [None, 1])
def test_a_patch_is_not_written_into_a_tensor_that_others_use(batch: int | None) -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.same = nn.Linear(3, 3), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.same(y) * 2 - y

    torch.manual_seed(0)
    model, clean, corrupted = Aside(), torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    found = sweep(model, clean, corrupted, torch.sum, sites="same", batch=batch)
    assert (found.values - by_hand(model, ["same"], clean, corrupted, torch.sum)).abs().max() <= 1e-5


# -- when a batch is not what it seems ------------------------------------------------------------


def test_a_model_that_mixes_its_examples_is_swept_one_by_one_and_says_so() -> None:
    class Mixing(Mixer):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            logits = super().forward(tokens, mask)
            return logits - logits.mean(0, keepdim=True) + logits.std()

    torch.manual_seed(0)
    model, (clean, corrupted) = Mixing().eval(), prompts(2)
    found = sweep(model, clean, corrupted, lambda out: out[0, -1, 3], sites=NAMES)
    assert found.notes
    assert found.notes[0].startswith("run one by one: in a batch the metric came to")
    assert torch.equal(found.values, by_hand(model, NAMES, clean, corrupted, lambda out: out[0, -1, 3]))


def test_an_output_without_a_batch_is_swept_one_by_one_and_says_so() -> None:
    class Loss(Mixer):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            return F.cross_entropy(super().forward(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    model, (clean, corrupted) = Loss().eval(), prompts()
    found = sweep(model, clean, corrupted, float, sites="embed")
    assert "in a batch the metric came to nan" in found.notes[0]
    assert "run one by one" in str(found)
    assert torch.equal(found.values, by_hand(model, ["embed"], clean, corrupted, lambda loss: loss))


def test_sites_without_a_batch_are_swept_one_by_one_and_the_others_together() -> None:
    class Positions(Mixer):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(5, 8)

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            shift = 1 if tokens[0, 1] == clean[0, 1] else 0
            places = self.places((torch.arange(5) + shift)[None] % 5)
            both = self.blocks[0](torch.cat([self.embed(tokens), places.expand(len(tokens), -1, -1)]))
            return self.head(both[: len(tokens)] * both[len(tokens) :].cumsum(1))

    def early(logits: Tensor) -> Tensor:
        return (logits[:, 1, 3] - logits[:, 1, 5]).mean()

    clean, corrupted = prompts(2)
    torch.manual_seed(0)
    model, names = Positions().eval(), ["places", "embed", "blocks.0", "head"]
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    found = sweep(model, clean, corrupted, early, sites=names)
    handle.remove()
    assert (found.values - by_hand(model, names, clean, corrupted, early)).abs().max() <= 1e-5
    assert found.notes == ["2 sites run one by one: places is (1, 5, 8) for 2 examples, (1, 5, 8) for 16 times as many"]
    assert sizes.count(20) == 1


def test_a_loss_beside_the_logits_does_not_stand_in_the_way() -> None:
    class Both(Mixer):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Any:
            logits = super().forward(tokens)
            return {"loss": logits.mean(), "logits": logits, "seen": torch.tensor(5)}

    torch.manual_seed(0)
    model, (clean, corrupted) = Both().eval(), prompts()
    expected = by_hand(model, NAMES, clean, corrupted, lambda out: margin(out["logits"]))
    found = sweep(model, clean, corrupted, lambda out: margin(out["logits"]), sites=NAMES)
    assert found.notes == []
    assert (found.values - expected).abs().max() <= 1e-5
    found = sweep(model, clean, corrupted, lambda out: out["loss"], sites=NAMES)
    assert found.notes
    assert torch.equal(found.values, by_hand(model, NAMES, clean, corrupted, lambda out: out["loss"]))


def test_a_model_that_cannot_take_a_larger_batch_is_swept_one_by_one_and_says_so() -> None:
    class Fixed(Mixer):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(tokens.view(1, 5))

    model, (clean, corrupted) = Fixed().eval(), prompts()
    found = sweep(model, clean, corrupted, margin, sites=NAMES)
    assert "RuntimeError" in found.notes[0]
    assert torch.equal(found.values, by_hand(model, NAMES, clean, corrupted, margin))


def test_a_batch_that_does_not_fit_into_memory_is_halved() -> None:
    model, (clean, corrupted) = mixer(), prompts()
    sizes: list[int] = []

    def scarce(module: nn.Module, args: Any) -> None:
        sizes.append(len(args[0]))
        if len(args[0]) > 4:
            raise torch.OutOfMemoryError("no memory left")

    handle = model.register_forward_pre_hook(scarce)
    found = sweep(model, clean, corrupted, margin, sites=NAMES, batch=16)
    handle.remove()
    assert sizes[2:5] == [16, 8, 4]
    assert found.notes == []
    assert (found.values - by_hand(model, NAMES, clean, corrupted, margin)).abs().max() <= 1e-5


def test_in_training_mode_every_pass_draws_the_same_numbers_and_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    model[3].eval()
    clean, corrupted = torch.randn(4, 5, 3), torch.randn(4, 5, 3)
    kept, state = oracle.freeze(dict(model.state_dict())), torch.get_rng_state()
    found = sweep(model, clean, corrupted, torch.sum, sites="0")
    assert not oracle.differences(kept, oracle.freeze(dict(model.state_dict())))
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in model] == [True, True, True, False]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert found.notes

    def again(model: nn.Module, x: Tensor) -> Tensor:
        torch.set_rng_state(state)
        return model(x)

    assert torch.equal(found.values, by_hand(copy.deepcopy(model), ["0"], clean, corrupted, torch.sum, call=again))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_everything_is_left_as_it_was_whatever_the_model_does(training: bool, fails: bool) -> None:
    model, x = Restless(fails).train(training), torch.randn(3, 4, 8)
    kept, before = x.clone(), oracle.snapshot(model, versions=False)
    inputs = [Inputs((x,), {"scale": scale}) for scale in (2.0, 0.1)]
    with pytest.raises(KeyError, match="mine") if fails else contextlib.nullcontext():
        found = sweep(model, *inputs, torch.sum, sites=["(model)", "norm"])
        assert found.values.tolist() == [found["(model)"].tolist(), found["norm"].tolist()]
        assert found["(model)", 1] == found["", 1]
        assert str(found).splitlines()[3].startswith("(model) ")
    oracle.assert_same(before, oracle.snapshot(model, versions=False), "the model and the process")
    assert torch.equal(x, kept)


def test_metrics_that_are_equal_are_told_of() -> None:
    model, (clean, _) = mixer(), prompts()
    with pytest.warns(UserWarning, match="nothing lies between them") as caught:
        found = sweep(model, clean, clean, margin, sites="head")
    assert caught[0].filename == __file__
    assert found.normalized.isnan().all()
    assert f"the metric is {found.clean:.6g} for the clean and for the corrupted input" in str(found).splitlines()[-1]
    with pytest.warns(UserWarning, match="is nan for the clean input"):
        found = sweep(model, *prompts(), lambda out: math.nan, sites="head", positions=[0])
    assert "the metric itself" in str(found)


def test_an_error_of_the_metric_passes_and_leaves_no_hook() -> None:
    model, (clean, corrupted) = mixer(), prompts()
    calls: list[int] = []

    def metric(output: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 4:
            raise ZeroDivisionError("mine")
        return output.sum()

    with pytest.raises(ZeroDivisionError, match="mine"):
        sweep(model, clean, corrupted, metric, sites=NAMES)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    with pytest.raises(TypeError, match=r"the metric must return one number, found a tensor \(1, 5, 16\)"):
        sweep(model, clean, corrupted, lambda output: output, sites=NAMES)


def test_no_graph_is_built_and_inputs_are_not_overwritten() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    clean, corrupted = -torch.ones(1, 4, 3), torch.ones(1, 4, 3)

    def metric(output: Tensor) -> Tensor:
        assert not output.requires_grad
        return output.sum()

    sweep(model, clean, corrupted, metric, sites="0")
    assert (clean == -1).all()
    assert (corrupted == 1).all()


# -- what is refused ------------------------------------------------------------------------------


def test_what_cannot_be_patched_is_refused() -> None:
    model, (clean, corrupted) = mixer(), prompts()
    with pytest.raises(SelectorError, match="Closest: 'head'"):
        sweep(model, clean, corrupted, margin, sites="heat")
    for site in ("head:grad", "head.weight"):
        with pytest.raises(SelectorError, match="cannot be patched in the forward pass"):
            sweep(model, clean, corrupted, margin, sites=site)
    with pytest.raises(EditError, match=r"head: dim=3 was asked for, and the value is \(1, 5, 16\)"):
        sweep(model, clean, corrupted, margin, sites="head", dim=3)
    with pytest.raises(ValueError, match="batch=0"):
        sweep(model, clean, corrupted, margin, sites="head", batch=0)


def test_inputs_of_different_lengths_are_refused_with_both_shapes() -> None:
    model, (clean, corrupted) = mixer(), prompts()
    with pytest.raises(
        EditError, match=r"embed.*: \(1, 4, 8\) for the clean input and \(1, 5, 8\) for the corrupted one"
    ):
        sweep(model, clean[:, :4], corrupted, margin, sites="embed")


def test_a_site_that_one_input_does_not_reach_is_an_error() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.always(x)
            return self.sometimes(x) if x.shape[0] and self.open else x

    model = Branch()
    model.open = False
    x = torch.ones(1, 3, 2)
    with pytest.raises(NeverRanError, match="never ran"):
        sweep(model, x, x, torch.sum, sites="sometimes")

    seen: list[int] = []
    model.open = True
    model.register_forward_pre_hook(lambda module, args: (seen.append(1), setattr(module, "open", len(seen) == 1))[0])
    with pytest.raises(NeverRanError, match="ran for the clean input and never for the corrupted one"):
        sweep(model, x, x, torch.sum, sites="sometimes")


# -- the result -----------------------------------------------------------------------------------


def test_the_result_is_read_by_site_and_position_normalized_and_in_columns() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, math.nan]])
    result = Sweep(values, ["a", "b"], [4, 7], clean=3.0, corrupted=1.0)
    assert result.normalized[0].tolist() == [0.0, 0.5]
    assert result["a"].tolist() == [1.0, 2.0]
    assert float(result["a", 7]) == 2.0
    assert result.best == ("b", 4)
    assert result.data()["position"] == [4, 7, 4, 7]
    assert result.data()["normalized"][:3] == [0.0, 0.5, 1.0]
    with pytest.raises(MissingRecordError, match="no site 'c' in this sweep"):
        result["c"]
    with pytest.raises(MissingRecordError, match="no position 5 in this sweep"):
        result["a", 5]


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_small_effects_on_a_large_metric_are_not_rounded_away(default: torch.dtype) -> None:
    model = nn.Linear(2, 1).double()
    clean, corrupted = torch.ones(1, 4, 2).double(), torch.zeros(1, 4, 2).double()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        result = sweep(model, clean, corrupted, lambda output: output.sum() * 1e-3 + 1e5, sites="")
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(result.normalized, torch.full((1, 4), 0.25).double(), rtol=1e-5, atol=0)


def test_what_rounds_to_nothing_is_printed_without_a_sign() -> None:
    found = Sweep(torch.tensor([[-1e-6, -0.25, 1e-6, -0.0]]), ["h.0"], [0, 1, 2, 3], 1.0, 0.0)
    assert str(found.table()).splitlines()[-1].split() == ["h.0", "0.000", "-0.250", "0.000", "0.000"]


def test_the_result_prints_itself_as_a_table() -> None:
    result = Sweep(torch.tensor([[1.0, 2.0], [3.0, math.nan]]), ["h.0", "h.1"], [0, 1], 3.0, 1.0, ["a note"])
    assert str(result) == (
        "Sweep of 2 sites: clean 3, corrupted 1; 0 is corrupted, 1 is clean\n"
        "site      0      1\n"
        "------------------\n"
        "h.0   0.000  0.500\n"
        "h.1   1.000      -\n"
        "a note"
    )
    assert "0.500" in result._repr_html_()
    assert "2.000" in str(result.table(normalized=False))


def test_a_wide_result_shows_the_positions_that_matter() -> None:
    values = torch.zeros(2, 40)
    values[1, 33] = 5.0
    text = str(Sweep(values, ["a", "b"], range(40), 5.0, 0.0))
    assert "16 of 40 positions shown" in text
    assert " 33 " in text.splitlines()[1] or text.splitlines()[1].endswith("33")


def test_a_progress_bar_counts_the_patches(capsys: pytest.CaptureFixture[str]) -> None:
    model, (clean, corrupted) = mixer(), prompts()
    _sweep(model, clean, corrupted, margin, sites="embed", progress=True)
    assert "patch" in capsys.readouterr().err
    _sweep(model, clean, corrupted, margin, sites="embed", progress=False)
    assert capsys.readouterr().err == ""


# -- patching and ablating by themselves ----------------------------------------------------------


def residual_model(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name == "mixer":
        return mixer(), prompts(2)[0]
    images = torch.randn(2, 3, 32, 32)
    if name == "resnet18":
        from torchvision.models import resnet18

        return resnet18(weights=None, num_classes=10).eval(), images
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval(), images


@pytest.mark.parametrize("name", ["mixer", "resnet18", "vit"])
def test_caching_a_layer_and_patching_it_back_changes_nothing_bit_for_bit(name: str) -> None:
    model, x = residual_model(name)
    unused = ["**.attn_drop"] if name == "vit" else None
    with torch.no_grad():
        expected = model(x)
        with capture(model, exclude=unused) as rec:
            model(x)
        for site in rec:
            with edit(model, {site: edits.patch(rec)}):
                assert torch.equal(model(x), expected), site
        with edit(model, dict.fromkeys(rec, edits.patch(rec))):
            assert torch.equal(model(x), expected)
        with edit(model, dict.fromkeys(rec, edits.patch(rec, positions=[0, 1]))):
            assert torch.equal(model(x), expected)
        with pytest.warns(UserWarning, match="for the clean and for the corrupted input"):
            result = sweep(model, x, x, lambda out: out.sum(), sites=rec.keys()[-3:], positions=[0, 1], batch=1)
        assert (result.values == float(expected.sum())).all()


def test_zeroing_a_residual_branch_of_an_operation_equals_the_model_without_it() -> None:
    model, tokens = residual_model("mixer")
    without = copy.deepcopy(model)
    del without.blocks[0]  # type: ignore[union-attr]
    with torch.no_grad(), edit(model, {"/tanh#0": edits.zero()}):
        assert torch.equal(model(tokens), without(tokens))


def test_zeroing_the_mlp_of_a_vit_block_equals_the_model_without_it() -> None:
    model, images = residual_model("vit")
    without: Any = copy.deepcopy(model)
    block = without.blocks[1]
    block.forward = lambda x, **_: x + block.attn(block.norm1(x))
    with torch.no_grad(), edit(model, {"blocks.1.mlp": edits.zero()}):
        assert torch.equal(model(images), without(images))


def test_zeroing_the_branch_of_a_resnet_block_equals_the_model_without_it() -> None:
    model, images = residual_model("resnet18")
    without: Any = copy.deepcopy(model)
    without.layer1[1] = nn.ReLU()
    with torch.no_grad(), edit(model, {"layer1.1.bn2": edits.zero()}):
        assert torch.equal(model(images), without(images))
