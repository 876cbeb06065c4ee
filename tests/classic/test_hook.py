"""``Hook`` keeps what goes into a module and what comes out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torchhook as th
from tests.classic.toys import Net


def test_a_hook_keeps_what_goes_in_and_what_comes_out(net: Net, x: Tensor) -> None:
    hook = th.Hook()
    handle = net.fc1.register_forward_hook(hook)
    for scale in (1, 2):
        net(x * scale)
    handle.remove()
    net(x)
    assert hook.module_name == [nn.Linear, nn.Linear]
    assert len(hook.features_in_hook) == len(hook.features_out_hook) == 2
    for scale, inputs, output in zip((1, 2), hook.features_in_hook, hook.features_out_hook, strict=True):
        assert type(inputs) is tuple
        assert torch.equal(inputs[0], x * scale)
        assert torch.equal(output, net.fc1(x * scale))  # not what the in-place layer made of it
        assert output.requires_grad


def test_a_hook_changes_nothing_that_the_model_computes(net: Net, x: Tensor) -> None:
    before = net(x)
    hook = th.Hook()
    assert hook(net.fc1, (x,), net.fc1(x)) is None
    for module in net.modules():
        module.register_forward_hook(hook)
    assert torch.equal(net(x), before)
    assert set(hook.module_name[1:]) == {type(m) for m in net.modules()}
