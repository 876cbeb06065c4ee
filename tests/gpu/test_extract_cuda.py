"""Extraction from a GPU: true values through pinned slabs and a side stream, at the speed of the model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.models import Nasty
from torchhook import transforms
from torchhook._core.calling import undisturbed
from torchhook._core.index import Index
from torchhook._extract import task
from torchhook._extract.api import extract
from torchhook._extract.batches import Batch
from torchhook._extract.fingerprint import Ahead, contents, of_model, of_tensors
from torchhook._features.api import open_features

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass


NAMES = [f"layers.{i}" for i in range(6)]


def oracle(model: nn.Module, x: Tensor, size: int) -> dict[str, Tensor]:
    seen: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, a, out, n=name: seen[n].append(out.clone().cpu()))
        for name in NAMES
    ]
    with torch.no_grad():
        for batch in x.split(size):
            model(batch.cuda())
    for handle in handles:
        handle.remove()
    return {name: torch.cat(values) for name, values in seen.items()}


def test_what_is_stored_is_what_the_layers_produced() -> None:
    torch.manual_seed(0)
    model, x = Nasty(256, 6).cuda().eval(), torch.randn(4096, 256)
    truth = oracle(model, x, 64)
    with tempfile.TemporaryDirectory() as folder:
        features = extract(model, x, NAMES, folder, batch_size=64, rows_per_shard=256, progress=False)
        for name in NAMES:
            assert torch.equal(features[name][:], truth[name]), name
        assert features.verify().ok


def test_casts_and_reductions_run_on_the_device() -> None:
    torch.manual_seed(0)
    model, x = Nasty(256, 6).cuda().eval(), torch.randn(1024, 256)
    truth = oracle(model, x, 64)
    with tempfile.TemporaryDirectory() as folder:
        half = extract(
            model,
            x,
            NAMES,
            Path(folder) / "half",
            batch_size=64,
            rows_per_shard=256,
            dtype=torch.float16,
            progress=False,
        )
        for name in NAMES:
            assert torch.equal(half[name][:], truth[name].half()), name
        top = extract(
            model, x, "layers.2", Path(folder) / "top", batch_size=64, transform=transforms.topk(5), progress=False
        )
        assert torch.equal(top["layers.2[values]"][:], truth["layers.2"].cuda().topk(5).values.cpu())


def test_rows_of_different_lengths_come_from_the_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 32), nn.ReLU(inplace=True)).cuda().eval()
    rows = [torch.randint(0, 100, (int(n),)) for n in torch.randint(1, 40, (300,))]

    def pad(samples: list[Tensor]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return {"input": ids, "n": torch.tensor([len(s) for s in samples])}

    loader = torch.utils.data.DataLoader(rows, batch_size=32, collate_fn=pad)
    with tempfile.TemporaryDirectory() as folder:
        features = extract(model, loader, "0", folder, lengths="n", rows_per_shard=64, progress=False)
        for i, row in enumerate(rows):
            assert torch.equal(features["0"][i], model[0](row.cuda()).detach().cpu()), i


def test_a_model_on_the_cpu_visits_the_device_and_comes_back() -> None:
    torch.manual_seed(0)
    model, x = Nasty(256, 6).eval(), torch.randn(256, 256)
    known = of_model(model)
    with tempfile.TemporaryDirectory() as folder:
        extract(model, x, NAMES, folder, run_on="cuda", batch_size=64, progress=False)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        features = open_features(folder)
        assert torch.allclose(features["layers.0"][:], model.layers[0](x), atol=1e-2)
        assert of_model(model) == known == of_model(Nasty.cuda(model)) == features.manifest.model


def test_buffers_of_a_model_that_moved_are_the_same_objects_afterwards() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), torch.randn(64, 8)
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    with tempfile.TemporaryDirectory() as folder:
        features = extract(model, x, "1", folder, run_on="cuda", batch_size=16, progress=False)
        assert torch.allclose(features["1"][:], model.eval()(x), atol=1e-2)
    assert all(buffer is before[name][0] for name, buffer in model.named_buffers())
    assert all(torch.equal(buffer, before[name][1]) for name, buffer in model.named_buffers())


def test_a_fingerprint_is_the_same_on_both_devices() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for items in (0, 5, 131_072 * 8, 131_072 * 70 + 3, 131_072 * 130):
            tensor = torch.randint(-100, 100, (items,)).to(dtype)
            assert contents(tensor) == contents(tensor.cuda()), (dtype, items)


def test_no_batch_waits_for_the_device() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(inplace=True)).cuda().eval(), torch.randn(2048, 256)
    batch, seen = task._Run._batch, []

    def watched(run: task._Run, one: Batch) -> None:
        seen.append(one.start)
        torch.cuda.set_sync_debug_mode("error" if len(seen) > 2 else "default")
        try:
            batch(run, one)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    task._Run._batch = watched  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            features = extract(model, x, "0", folder, batch_size=64, rows_per_shard=256, progress=False)
            with torch.no_grad():
                assert torch.allclose(features["0"][:], model[0](x.cuda()).cpu(), atol=1e-2)
    finally:
        task._Run._batch = batch  # type: ignore[method-assign]
    assert len(seen) == 32


def _many() -> nn.Module:
    """Tensors that are summed together, alone and in blocks, of several dtypes."""
    model = nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(40)), nn.Linear(700, 900), nn.Linear(3, 5, bias=False))
    for name, dtype in {"a": torch.complex64, "b": torch.bfloat16, "c": torch.bool, "d": torch.float16}.items():
        model.register_buffer(name, torch.randn(7).to(dtype))
    model.register_buffer("nan", torch.tensor([1.0, float("nan")]))
    return model


def test_the_tensors_of_a_model_have_the_digests_of_the_host() -> None:
    torch.manual_seed(0)
    model = _many()
    expected = of_tensors(model)
    assert of_tensors(model.cuda()) == expected


def test_what_is_read_ahead_are_the_digests_of_the_host_and_not_of_what_is_written_to() -> None:
    torch.manual_seed(0)
    model = _many()
    expected = of_tensors(model)
    ahead = Ahead(Index(model.cuda()))
    model.get_buffer("d").fill_(1)
    ahead.read()
    left = {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in ahead.contents}
    assert left == {"d"}
    found = of_tensors(model, ahead)
    assert found == of_tensors(model)
    assert {name for name, digest in found[1].items() if digest != expected[1][name]} == {"d"}


class _Long(nn.Module):
    """Takes long after its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        torch.cuda._sleep(2_000_000_000)  # about a second
        return x * 2


def test_the_next_batches_are_begun_while_the_first_one_runs() -> None:
    torch.manual_seed(0)
    model, x = _Long().cuda().eval(), torch.randn(512, 64)
    ended: list[torch.cuda.Event] = []
    running: list[bool] = []

    def returned(*args: object) -> None:  # of the first batch alone: the others stop at the layer
        ended.append(torch.cuda.Event())
        ended[-1].record()

    model.register_forward_hook(returned)
    model.layer.register_forward_pre_hook(lambda *args: running.append(bool(ended) and not ended[0].query()))
    for _ in range(2):  # the first time, kernels are loaded and pinned memory is made, which may wait for the device
        ended.clear()
        running.clear()
        with tempfile.TemporaryDirectory() as folder:
            features = extract(model, x, "layer", folder, batch_size=64, rows_per_shard=128, progress=False)
            assert (len(ended), len(running)) == (1, 8)
            assert features.manifest.model == of_model(model)
            stored = features["layer"][:]
    with torch.no_grad():
        expected = torch.nn.functional.linear(x.cuda(), model.layer.weight, model.layer.bias)
    assert torch.allclose(stored, expected.cpu(), atol=1e-2)
    assert running[:4] == [False, True, True, True], running


def test_buffers_on_a_device_come_back_and_those_that_have_not_changed_are_not_written_to() -> None:
    model = _many().cuda()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    versions = {name: buffer._version for name, buffer in model.named_buffers()}
    for changed in ((), ("3.running_mean", "d")):
        with undisturbed(model):
            for name in changed:
                model.get_buffer(name).fill_(1)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, equal_nan=True)
            assert buffer._version == versions[name] + 2 * (name in changed), name
