"""DTensors on a mesh of one rank; ``tests/distributed`` has those of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import torchhook as th
from torchhook import edits
from torchhook._recording.address import Site
from torchhook._values.elements import flatten, measurable
from torchhook._values.subclasses import full, is_distributed, is_freed, is_partial, local, placed_like, sharded_over

# Torch 2.6 says so of every mesh of CPUs, also where nothing is random.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")


@pytest.fixture
def mesh() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def split(tensor: Tensor, mesh: Any) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, mesh, [Shard(0)])


def test_a_plain_tensor_is_its_own_part_and_whole() -> None:
    x = nn.Parameter(torch.ones(2))
    assert local(x) is x
    assert full(x) is x
    assert placed_like(x, torch.zeros(2)) is x
    assert sharded_over(x) == ()
    assert not is_distributed(x)
    assert not is_partial(x)


def test_an_attribute_called_placements_makes_no_dtensor() -> None:
    class Mine(Tensor):
        placements = ()

    assert not is_distributed(torch.ones(3).as_subclass(Mine))


def test_freed_memory_is_known_without_a_read() -> None:
    x = torch.ones(3)
    view = x[1:]
    x.untyped_storage().resize_(0)
    assert [
        is_freed(t) for t in (x, view, torch.empty(0), torch.empty(3, device="meta"), torch.eye(2).to_sparse())
    ] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_dtensor_has_a_part_and_a_whole(mesh: Any) -> None:
    x = torch.arange(6.0).view(3, 2)
    d = split(x, mesh)
    assert is_distributed(d)
    assert len(sharded_over(d)) == 1
    assert torch.equal(local(d), x)
    assert torch.equal(full(d), x)
    assert measurable(d)
    assert torch.equal(flatten(d), x.view(-1))


def test_what_takes_the_place_of_a_dtensor_is_laid_out_as_it(mesh: Any) -> None:
    d = split(torch.ones(3, 2), mesh)
    new: Any = placed_like(torch.zeros(3, 2), d)
    assert new.placements == d.placements
    assert is_distributed(placed_like(torch.zeros(2), d))


@pytest.mark.shows("Kinds of tensors: edits of DTensors")
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (edits.add(torch.tensor([1.0, 2.0])), [[2.0, 3.0]] * 3),
        (edits.replace(torch.tensor([1.0, 2.0])), [[1.0, 2.0]] * 3),
        (edits.zero(), [[0.0, 0.0]] * 3),
        (edits.scale(2), [[2.0, 2.0]] * 3),
        (edits.clamp(high=0.5), [[0.5, 0.5]] * 3),
        (edits.mean(), [[1.0, 1.0]] * 3),
        (edits.mean(1), [[1.0, 1.0]] * 3),
    ],
    ids=repr,
)
def test_the_catalogue_of_edits_takes_dtensors(edit: Any, expected: list[list[float]], mesh: Any) -> None:
    d = split(torch.ones(3, 2), mesh)
    new = edit(d, Site("fc"))
    assert new.placements == d.placements
    assert new.full_tensor().tolist() == expected


def test_noise_on_a_dtensor_is_that_on_the_whole(mesh: Any) -> None:
    x = torch.ones(3, 2)
    edit: Any = edits.noise(0.1)
    assert torch.equal(full(edit(split(x, mesh), Site("fc"))), edit(x, Site("fc")))


def test_a_part_of_a_dtensor_is_refused_in_one_sentence(mesh: Any) -> None:
    model, x = nn.Identity(), split(torch.ones(2, 2), mesh)
    with pytest.raises(th.errors.EditError, match=r"a DTensor of shape .* each rank holds a part"):
        th.run(model, x, edit={"(model)": edits.only(edits.zero(), rows=0)})
    with pytest.raises(th.errors.TransformError, match=r"a DTensor of shape"):
        th.run(model, x, capture="(model)", transform=th.transforms.only(rows=0))


def test_an_edit_that_makes_a_dtensor_plain_is_refused(mesh: Any) -> None:
    model = nn.Identity()
    with pytest.raises(th.errors.EditError, match=r"kind of tensor: expected DTensor, found Tensor"):
        th.run(model, split(torch.ones(2, 2), mesh), edit={"(model)": lambda value: value.full_tensor()})


@pytest.mark.shows("Kinds of tensors: DTensors in files")
def test_a_captured_dtensor_is_saved_and_patched(mesh: Any, tmp_path: Path) -> None:
    d = split(torch.arange(4.0).view(2, 2), mesh)
    model = nn.Identity()
    _, rec = th.run(model, d, capture="(model)")
    assert is_distributed(rec["(model)"])
    rec.save(tmp_path / "rec.safetensors")
    loaded = th.load(tmp_path / "rec.safetensors")
    assert torch.equal(loaded["(model)"], full(d))
    output, _ = th.run(model, d * 0, edit={"(model)": edits.patch(loaded)})
    assert output.placements == d.placements
    assert torch.equal(full(output), full(d))
