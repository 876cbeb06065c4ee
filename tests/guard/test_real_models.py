"""Real models raise no alarm, compute the same, and a weight spoilt deep inside is named."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.guard.faults import NAN
from tests.language_models import ENDS, made
from tests.models import tensors_in
from tests.zoo import WITHOUT_GRADIENT, ZOO
from torchhook._guard.api import guard


def _resnet() -> tuple[nn.Module, dict[str, Any]]:
    import torchvision

    return torchvision.models.resnet18(weights=None, num_classes=5), {"x": torch.randn(2, 3, 64, 64)}


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    import timm

    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **options), {"x": torch.randn(2, 3, 32, 32)}


def _padded() -> dict[str, Any]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    return {"input_ids": torch.randint(3, 64, (2, 8)), "attention_mask": mask}


def _gpt2(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    model = made("gpt2", attn_implementation=attention, n_layer=2, **ENDS)
    given = _padded()
    return model.train(), {**given, "labels": given["input_ids"]}


def _bert(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    model = made("bert", attn_implementation=attention, num_hidden_layers=2)
    given = _padded()
    return model.train(), {**given, "labels": given["input_ids"]}


def _t5() -> tuple[nn.Module, dict[str, Any]]:
    model = made("t5", num_layers=2, decoder_start_token_id=0)
    given = _padded()
    return model.train(), {**given, "labels": given["input_ids"]}


REAL: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "resnet18": _resnet,
    "vit": _vit,
    "gpt2, eager": lambda: _gpt2("eager"),
    "gpt2, fused": lambda: _gpt2("sdpa"),
    "bert, eager": lambda: _bert("eager"),
    "bert, fused": lambda: _bert("sdpa"),
    "t5": _t5,
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", REAL)
def test_real_models_raise_no_alarm_and_compute_the_same(name: str, training: bool) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library says of itself while it is imported
        model, inputs = REAL[name]()
    model.train(training)
    twin = copy.deepcopy(model)

    def step(one: nn.Module) -> Tensor:
        torch.manual_seed(1)
        output = one(**inputs)
        loss = output.sum() if isinstance(output, Tensor) else output.loss
        loss.backward()
        return loss

    expected = step(twin)
    with guard(model) as g:
        found = step(model)
    assert g.findings == []
    assert torch.equal(expected, found)
    grads = [(p.grad, q.grad) for p, q in zip(twin.parameters(), model.parameters(), strict=True)]
    assert all(p is q is None or torch.equal(p, q) for p, q in grads)


@pytest.mark.parametrize("name", REAL)
def test_a_weight_spoilt_deep_in_a_real_model_is_named(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = REAL[name]()
    names = {id(p): n for n, p in model.named_parameters()}  # a tied weight goes by its first name
    target, weight = [(n, p) for n, p in model.named_parameters() if p.dim() > 1 and "emb" not in n][7]
    with torch.no_grad():
        weight.view(-1)[3] = NAN
    with guard(model, action="record") as g:
        model(**inputs)
    assert [(f.kind, str(f.site)) for f in g.findings] == [("parameter", names[id(weight)])]
    assert target == names[id(weight)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_no_model_of_the_zoo_raises_an_alarm(name: str) -> None:
    case = ZOO[name]()
    with guard(case.model) as g:
        output = case.model(*case.args, **case.kwargs)
        if name not in WITHOUT_GRADIENT:
            sum(t.float().sum() for t in tensors_in(output) if t.requires_grad).backward()
    assert g.findings == []
