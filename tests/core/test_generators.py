"""Which modules of a model are followed while it generates: however deep they lie, and whoever holds them."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import small_gpt2
from torchhook._core.generators import generators
from torchhook._core.index import Index

IDS = torch.tensor([[5, 9, 33, 21], [8, 2, 13, 44]])


class Tuner(nn.Module):
    """As the inner one of PEFT: it holds the model, and hands on what it does not have itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class Tuned(nn.Module):
    """As the outer one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = Tuner(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.base_model.generate(*args, **kwargs)  # type: ignore[no-any-return]


class Trained(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"encoder": nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)]), "text": model})

    def predict_step(self, ids: Tensor) -> Tensor:
        return self.parts["text"].generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)  # type: ignore[operator,no-any-return]


def whole(model: Any, ids: Tensor, module: nn.Module) -> Tensor:
    """What a module makes in one pass without a cache, by a bare hook."""
    kept = list[Tensor]()
    handle = module.register_forward_hook(lambda _, args, output: kept.append(output.clone()))
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    return kept[0]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_steps_are_told_however_deep_the_model_lies_that_generates(depth: int) -> None:
    text: Any = small_gpt2()[0]
    model: Any = text
    for _ in range(depth):
        model = Tuned(model)
    model = Trained(model)
    site = next(name for name, module in model.named_modules() if module is text.transformer.h[1].mlp)
    with torch.no_grad(), th.capture(model, site) as rec:
        ids = model.predict_step(IDS)
    assert [(record.step, record.position) for record in rec.records(site)] == [(0, 0), (1, 4), (2, 5), (3, 6)]
    expected = whole(text, ids[:, :-1], text.transformer.h[1].mlp)
    torch.testing.assert_close(rec.cat(site, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_a_model_in_a_wrapper_whose_loop_is_its_own_has_steps() -> None:
    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            text = small_gpt2()[0]
            self.held = nn.ModuleList([text.transformer])
            self.head = text.lm_head

        def speak(self, ids: Tensor, tokens: int) -> Tensor:
            given, cache = ids, None
            for _ in range(tokens):
                out = self.held[0](given, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                given = self.head(out.last_hidden_state)[:, -1:].argmax(-1)
                ids = torch.cat([ids, given], 1)
            return ids

    model = Looping()
    with torch.no_grad(), th.capture(model, "held.0.h.0.mlp") as rec:
        ids = model.speak(IDS, 3)
    assert [record.step for record in rec.records("held.0.h.0.mlp")] == [0, 1, 2]
    text: Any = model.held[0]
    expected = whole(text, ids[:, :-1], text.h[0].mlp)
    torch.testing.assert_close(rec.cat("held.0.h.0.mlp", dim=1), expected, rtol=1e-4, atol=1e-5)


def test_the_parts_of_a_language_model_are_not_followed_beside_it() -> None:
    text: Any = small_gpt2()[0]
    assert generators(Index(text)) == [text]
    assert generators(Index(text.transformer)) == [text.transformer]
    held = nn.Sequential(nn.Sequential(text), nn.Linear(2, 2))
    assert generators(Index(held)) == [text]
    assert generators(Index(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))) == []


def test_of_two_that_take_a_cache_and_do_not_generate_neither_is_followed() -> None:
    pair = nn.ModuleList([small_gpt2()[0].transformer, small_gpt2()[0].transformer])
    assert generators(Index(pair)) == []


def test_two_that_generate_are_both_followed_and_one_that_is_held_twice_once() -> None:
    one, other = small_gpt2()[0], small_gpt2()[0]
    pair = nn.ModuleList([one, other, nn.Sequential(one)])
    assert {id(module) for module in generators(Index(pair))} == {id(one), id(other)}
    assert len(generators(Index(pair))) == 2
    with torch.no_grad(), th.capture(pair, "0.transformer.h.0", "1.transformer.h.0") as rec:
        for model in (one, other):
            model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert [record.step for record in rec.records()] == [0, 1, 0, 1]


def test_a_module_that_holds_itself_is_walked_once() -> None:
    model = Tuned(small_gpt2()[0])
    model.base_model._modules["itself"] = model
    assert [type(module).__name__ for module in generators(Index(model))] == ["Tuned", "GPT2LMHeadModel"]


def test_the_language_model_of_a_multimodal_one_has_its_steps() -> None:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 4
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=32, pad_token_id=0),
        image_token_index=60,
        image_seq_length=4,
    )
    llava = transformers.LlavaForConditionalGeneration(config).eval()
    root = nn.Sequential(nn.Sequential(nn.Sequential(llava)))
    block = llava.model.language_model.layers[1].mlp
    site = next(name for name, module in root.named_modules() if module is block)
    ids, image = torch.tensor([[1, 60, 60, 60, 60, 5, 6]]), torch.randn(1, 3, 16, 16)
    given: dict[str, Any] = {"input_ids": ids, "pixel_values": image, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad(), th.capture(root, site) as rec:
        ids = llava.generate(**given, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert [(record.step, record.position) for record in rec.records(site)] == [(0, 0), (1, 7), (2, 8)]
    kept = list[Tensor]()
    handle = block.register_forward_hook(lambda _, args, output: kept.append(output.clone()))
    with torch.no_grad():
        llava(input_ids=ids[:, :-1], pixel_values=image, use_cache=False)
    handle.remove()
    torch.testing.assert_close(rec.cat(site, dim=1), kept[0], rtol=1e-4, atol=1e-5)
