"""Where in the sequence the first token of a value is, while a model generates: counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import small_gpt2, small_llama

PROMPT, NEW = 6, 4


def generated(make: Any, *sites: str, **options: Any) -> Any:
    model, call = make()
    with torch.no_grad(), th.capture(model, *sites) as rec:
        model.generate(
            call["input_ids"], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
        )
    return model, call["input_ids"], rec


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_logits_are_those_of_the_last_token(make: Any) -> None:
    model, ids, rec = generated(make, "@logits", "lm_head", "@resid_post.1")
    for site in ("@logits", "lm_head"):
        records = rec.records(site)
        assert [record.value.shape[1] for record in records] == [1] * NEW
        assert [record.position for record in records] == [5, 6, 7, 8]
        assert [record.step for record in records] == [0, 1, 2, 3]
    assert [record.position for record in rec.records("@resid_post.1")] == [0, 6, 7, 8]
    # That they are: the one forward pass without a cache has them there.
    with torch.no_grad():
        every = model(ids, use_cache=False).logits
    torch.testing.assert_close(rec.records("@logits")[0].value[:, 0], every[:, 5])


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_keys_and_values_begin_in_the_cache(make: Any) -> None:
    _, _, rec = generated(make, "@k.0", "@v.1", "@q.0")
    for site in ("@k.0", "@v.1"):
        assert [record.value.shape[2] for record in rec.records(site)] == [6, 7, 8, 9]
        assert [record.position for record in rec.records(site)] == [0] * NEW
    assert [record.position for record in rec.records("@q.0")] == [0, 6, 7, 8]
    _, _, static = generated(make, "@k.0", cache_implementation="static")
    assert {record.position for record in static.records("@k.0")} == {0}


def attended_to(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The queries and keys of the first attention in one pass without a cache, as the function itself is called."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is nn.functional.scaled_dot_product_attention:
                seen.append((args[0].clone(), args[1].clone()))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watching():
        model(ids, use_cache=False)
    return seen[0]


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_queries_joined_on_the_dim_that_errors_name_are_those_of_one_pass(make: Any) -> None:
    model, call = make()
    with torch.no_grad(), th.capture(model, "@q.0", "@k.0") as rec:
        written = model.generate(
            call["input_ids"], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
    query, key = attended_to(model, written[:, :-1])
    for read in (lambda: rec["@q.0"], lambda: rec.cat("@q.0"), lambda: rec.cat("@q.0", dim=1)):
        with pytest.raises((LookupError, ValueError), match=r"rec\.cat\('@q\.0', dim=2\)"):
            read()
    torch.testing.assert_close(rec.cat("@q.0", dim=2), query, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"rec\['@k\.0#-1'\]"):
        rec.cat("@k.0", dim=1)
    torch.testing.assert_close(rec["@k.0#-1"], key, rtol=1e-4, atol=1e-5)


def test_positions_are_saved(tmp_path: Path) -> None:
    _, _, rec = generated(small_llama, "lm_head", "@logits")
    rec.save(tmp_path / "rec.safetensors")
    loaded = th.load(tmp_path / "rec.safetensors")
    for site in ("lm_head", "@logits"):
        assert [record.position for record in loaded.records(site)] == [5, 6, 7, 8]


class Halved(nn.Module):
    """Writes with a cache of its own making, and has a layer that sees every other token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.halves, self.pool = nn.Embedding(50, 8), nn.Identity(), nn.Identity()

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        x = self.embed(input_ids)
        self.pool(x.mean(1))
        return self.halves(x[:, ::2])

    def generate(self, ids: Tensor) -> None:
        for _ in range(2):
            self(input_ids=ids)


def test_what_has_fewer_tokens_for_another_reason_is_nowhere_in_particular() -> None:
    model = Halved()
    with th.capture(model, "embed", "halves", "pool") as rec:
        model.generate(torch.ones(2, 6, dtype=torch.long))
    assert [record.position for record in rec.records("embed")] == [0, 0]
    assert [record.position for record in rec.records("halves")] == [None, None]
    assert [record.position for record in rec.records("pool")] == [0, 0]
