"""Where parameters are, on a group of one rank; ``tests/distributed`` has two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn

import torchhook as th
from tests.distributed.torch26 import repair_fsdp2
from torchhook._core.index import Index
from torchhook._core.sharding import Homes
from torchhook._torch import sharded


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_a_plain_model_has_its_parameters_itself() -> None:
    net = model()
    homes = Homes(Index(net))
    assert not homes
    home = homes.of(net[0], "weight")
    assert home is not None
    assert (home.way, home.groups) == ("own", ())
    assert home.parameter is home.leaf is net[0].weight
    assert homes.of(net[1], "weight") is None


def test_ddp_replicates_what_it_is_not_told_to_ignore(group: None) -> None:
    net = model()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.bias"])
    wrapped = nn.parallel.DistributedDataParallel(net)
    homes = Homes(Index(wrapped))
    ways = {name: homes.of(net.get_submodule(name[0]), name[2:]) for name, _ in net.named_parameters()}
    assert {name: home.way for name, home in ways.items() if home is not None} == {
        "0.weight": "replicated",
        "0.bias": "replicated",
        "2.weight": "replicated",
        "2.bias": "own",
    }


def test_fsdp2_keeps_a_part_also_while_all_is_put_together(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    repair_fsdp2()
    net: Any = model()
    fully_shard(net)
    part = net[0].weight
    seen = []
    net[0].register_forward_pre_hook(lambda *_: seen.append((net[0].weight, Homes(Index(net)).of(net[0], "weight"))))
    net(torch.ones(1, 3))
    ((together, home),) = seen
    assert together is not part
    assert home is not None
    assert home.parameter is part
    assert (home.way, home.shape) == ("sharded", (4, 3))


def test_where_torch_no_longer_tells_a_part_is_taken_as_the_model_has_it(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    net: Any = model()
    fully_shard(net)
    with monkeypatch.context() as patch:
        patch.delattr(FSDPModule, "_get_fsdp_state")
        assert sharded.shards(net) == []
        home = Homes(Index(net)).of(net[0], "weight")
        assert home is not None
        assert home.parameter is net[0].weight


def test_without_a_store_nobody_is_asked(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed.distributed_c10d, "_get_default_store")
    assert sharded.rank_store() is None


def test_a_unit_that_does_not_tell_its_state_is_trusted() -> None:
    assert sharded.expects_gradients(object())


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
def test_parameters_that_fsdp_has_made_one_are_named_with_the_way_out(group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model(), use_orig_params=False, device_id=torch.device("cpu"))
    with pytest.raises(th.errors.SelectorError, match="use_orig_params=True"):
        th.capture(net, "0.weight:grad")


def test_gather_is_checked() -> None:
    with pytest.raises(ValueError, match="gather='all': use 'local'"):
        th.capture(model(), "0", gather="all")  # type: ignore[arg-type]


def test_in_one_process_full_is_what_there_is() -> None:
    net = model()
    with th.capture(net, "0.weight:grad", "0", gather="full") as rec:
        net(torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(rec["0.weight:grad"], net[0].weight.grad)
    assert rec["0"].shape == (1, 4)


def test_where_torch_no_longer_tells_how_a_pass_is_ended_that_is_said(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp import fully_shard

    repair_fsdp2()
    net: Any = model()
    fully_shard(net)
    state = type(net._get_fsdp_state())
    with th.capture(net, "0", stop=True) as rec, torch.no_grad():
        net(torch.ones(1, 3))
    assert rec["0"].shape == (1, 4)
    net = model()
    fully_shard(net)  # its hooks hold the method still
    monkeypatch.delattr(state, "_post_forward")
    with pytest.raises(th.errors.TorchVersionError, match="_post_forward"), torch.no_grad():
        th.run(net, torch.ones(1, 3), capture="0", stop=True)
