"""Recordings as files: what real models return, files of earlier versions, and documents that make no sense."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.oracle import differences, freeze
from tests.recording.round_trips import Box, Pair, quietly
from tests.zoo import ZOO, Case, tokens
from torchhook._recording import saving, tensor_file
from torchhook._values import tree
from torchhook._values.loaded import Loaded, Opaque
from torchhook._version import __version__
from torchhook.errors import RecordingFileError
from torchhook.types import Recording, Site

# -- what real models return -----------------------------------------------------------------------------

WIDTH = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
SIDES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
SHORT = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64}
LANGUAGE: dict[str, dict[str, Any]] = {
    "Cohere": WIDTH,
    "Falcon": {name: size for name, size in WIDTH.items() if name != "head_dim"},
    "Gemma": WIDTH,
    "Gemma3": {**WIDTH, "sliding_window": 4},
    "Glm": WIDTH,
    "Granite": WIDTH,
    "Lfm2": {**WIDTH, "layer_types": ["conv", "full_attention"]},
    "Llama": WIDTH,
    "Mamba2": {**WIDTH, "state_size": 4, "num_heads": 8, "n_groups": 1, "chunk_size": 4},
    "Mistral": {**WIDTH, "sliding_window": 4},
    "Olmo2": WIDTH,
    "Phi": WIDTH,
    "Qwen2": WIDTH,
    "Qwen3Moe": {**WIDTH, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "RecurrentGemma": {**WIDTH, "lru_width": 32, "attention_window_size": 4, "block_types": ["recurrent", "attention"]},
    "StableLm": WIDTH,
    "GPT2": OLD,
    "GPTBigCode": OLD,
    "GPTJ": {**OLD, "rotary_dim": 4},
}
BOTH_SIDES: dict[str, dict[str, Any]] = {
    "Bart": SIDES,
    "BigBirdPegasus": {**SIDES, "attention_type": "original_full"},
    "Blenderbot": SIDES,
    "M2M100": SIDES,
    "MBart": SIDES,
    "MT5": {**SHORT, "decoder_start_token_id": 0},
    "Pegasus": SIDES,
    "T5": {**SHORT, "decoder_start_token_id": 0},
    "UMT5": {**SHORT, "decoder_start_token_id": 0},
}


def language(name: str) -> Case:
    import transformers

    both = name in BOTH_SIDES
    names = {"Gemma3": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
    kind = names.get(name, f"{name}For{'ConditionalGeneration' if both else 'CausalLM'}")
    config = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**(BOTH_SIDES if both else LANGUAGE)[name]))
    more = {"decoder_input_ids": tokens(5)} if both else {}
    inputs = {"input_ids": tokens(8), **more, "use_cache": True, "output_hidden_states": True}
    return Case(model.eval(), (), inputs)


REAL: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: language(name)) for name in (*LANGUAGE, *BOTH_SIDES)},  # type: ignore[misc]
    **{name: ZOO[name] for name in ("transformers_whisper", "transformers_xlnet", "transformers_perceiver")},
    **{name: ZOO[name] for name in ("transformers_clip", "transformers_llama_generate", "nn_lstm_tagger")},
}


@pytest.mark.filterwarnings("ignore::torchhook.errors.NeverRanWarning")
@pytest.mark.parametrize("name", REAL)
def test_whatever_a_real_model_returns_is_read_printed_and_compared_after_a_file(tmp_path: Path, name: str) -> None:
    case = quietly(REAL[name])
    with torch.no_grad(), th.capture(case.model, "", ":input", "**") as rec:
        output = quietly(lambda: case.model(*case.args, **case.kwargs))
    loaded = th.load(rec.save(tmp_path / "a"))
    assert_as_it_was(freeze(output), loaded[""])
    for key, value in rec.items():
        assert_as_it_was(freeze(value), loaded[key])
    assert str(loaded).splitlines()[0] == str(rec).splitlines()[0]
    assert loaded._repr_html_()
    assert [(row.status, row.note) for row in th.diff(rec, loaded)] == [("same", "")] * sum(1 for _ in rec.items())
    loaded.save(tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def assert_as_it_was(frozen: Any, found: Any) -> None:
    """The same to the bit, but for classes, of which a file holds the name."""
    wrong = differences(frozen, freeze(found))
    assert [line for line in wrong if not line.endswith("found a Opaque")] == []
    assert all("layer_class_to_replicate" in line for line in wrong)


def test_a_key_value_cache_is_printed_walked_and_saved_again(tmp_path: Path) -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    cache = cache_utils.DynamicCache()
    for layer in range(2):
        cache.update(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4), layer)
    rec = Recording("Net")
    rec.opened(Site("")).append((0, 0, (torch.ones(2), cache)))
    loaded = th.load(rec.save(tmp_path / "a"))
    assert "((2,), cache of 2 layers)" in str(loaded)
    layer = loaded[""][1].layers[1]
    assert torch.equal(layer.keys, cache.layers[1].keys)
    assert torch.equal(layer["values"], cache.layers[1].values)
    assert "keys=tensor(" in repr(layer)
    doubled = tree.map_tensors(lambda t: t * 2, loaded[""][1])
    assert torch.equal(doubled.layers[1].values, cache.layers[1].values * 2)
    assert th.diff(rec, loaded).ok


# -- files of earlier versions ----------------------------------------------------------------------------


GRID = torch.eye(4) * torch.arange(1.0, 5.0)


def test_a_file_of_version_1_is_read_as_it_always_was() -> None:
    # Written by torchhook 0.1 before version 2 of the format: one record for every tag it had.
    rec = quietly(lambda: th.load(Path(__file__).with_name("version1.safetensors")))
    assert rec["leaf"] == [None, True, 3, "text", 0.5]
    assert rec["float"][:2] == (math.inf, -math.inf)
    assert math.isnan(rec["float"][2])
    assert rec["complex"] == complex(1.5, -math.inf)
    assert rec["bytes"] == b"\x00\xff"
    assert (rec["size"], rec["dtype"], rec["device"]) == (torch.Size([2, 3]), torch.float16, torch.device("cuda", 1))
    assert rec["array"].dtype == np.int16
    assert rec["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert type(rec["number"]) is np.float32
    assert rec["number"] == 0.5
    assert type(rec["inputs"]) is th.Inputs
    assert rec["inputs"].kwargs == {"mask": None}
    assert rec["opaque"] == Opaque("builtins.range", "range(0, 3)")
    assert rec["dict"] == {"a": 1, 2: "b", None: (), ("x", 1): []}
    assert rec["tensor"].tolist() == rec["alias"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rec["bfloat16"].tolist() == [1.5, -2]
    assert rec["bits"].dtype == torch.float8_e4m3fnuz
    assert rec["bits"].float().tolist() == [1.5, -2]
    assert rec["meta"].device.type == "meta"
    assert rec["complex_tensor"].tolist() == [1 - 2j, 3 + 4j]
    assert [part.shape for part in rec["nested"].unbind()] == [part.shape for part in rec["jagged"].unbind()]
    for layout in ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"):
        assert rec[layout].layout == getattr(torch, layout)
        assert torch.equal(rec[layout].to_dense(), GRID)
    assert (rec["quantized"].q_scale(), rec["quantized"].q_zero_point()) == (0.5, 3)
    assert torch.equal(rec["quantized"].dequantize(), GRID)
    assert rec["quantized_channels"].q_per_channel_scales().tolist() == [0.5, 1, 1.5, 2]
    assert torch.equal(rec["mkldnn"], GRID)
    assert rec.missing == {"aux": "a branch?"}


def test_the_objects_of_a_file_of_version_1_are_read_by_their_fields() -> None:
    rec = quietly(lambda: th.load(Path(__file__).with_name("version1.safetensors")))
    for site, name, fields in [
        ("named tuple", "Pair", ["left", "right"]),
        ("dataclass", "Box", ["first", "second"]),
        ("ordered", "OrderedDict", ["a", "b"]),
        ("deque", "deque", ["0", "1"]),
    ]:
        assert isinstance(rec[site], Loaded)
        assert type(rec[site]).__name__ == name
        assert list(rec[site]) == fields
    assert rec["dataclass"].first == {"deep": 1}
    assert rec["deque"][1] == 2
    assert list(rec["mapping"]) == [1, "1"]
    assert type(rec["mapping"]).__name__ == "OrderedDict"
    layer = rec["layer", 1]
    assert layer.keys.tolist() == [[0, 0]]
    assert layer.values.tolist() == [[1, 1]]
    assert "CacheLayer{keys=(1, 2), values=(1, 2), length=2}" in str(rec)


def test_a_file_says_the_lowest_version_that_reads_it(tmp_path: Path) -> None:
    def version(value: Any) -> str:
        return tensor_file.read(saving.save(tmp_path / "a", [value], {}))[1]["version"]

    assert version([torch.ones(1), {"a": Box(1.5)}, nn.Linear]) == "1"
    assert version([torch.ones(1), {"a": Box({1})}]) == "2"
    assert version(Pair(1, 2)) == "2"


def test_a_file_from_before_dicts_of_another_type_were_told_apart_still_loads(tmp_path: Path) -> None:
    document = '{"values": [{"fields": ["OrderedDict", ["1", "0"], [{"leaf": 5}, {"tensor": "t0"}]]}], "about": {}}'
    ((found,), _) = saving.load(written(tmp_path / "a", {"t0": torch.ones(1)}, recording=document))
    assert list(found) == ["1", "0"]
    assert found["1"] == 5
    assert found["0"].item() == 1


# -- documents -------------------------------------------------------------------------------------


def test_the_file_says_which_versions_wrote_it(tmp_path: Path) -> None:
    _, metadata = tensor_file.read(saving.save(tmp_path / "a", [], {}))
    versions = json.loads(metadata["recording"])["versions"]
    assert versions["torch"] == torch.__version__
    assert set(versions) >= {"torchhook", "torch", "python"}


def test_the_document_is_json_that_any_language_reads(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    path = saving.save(tmp_path / "a", [math.nan, math.inf, complex(-math.inf, math.nan), [-math.inf]], {})
    _, metadata = tensor_file.read(path)
    assert json.loads(metadata["recording"], parse_constant=refuse)["about"] == {}


def written(path: Path, tensors: dict[str, Tensor] | None = None, **metadata: str) -> Path:
    about = {"format": saving.FORMAT, "version": "2", "recording": '{"values": [], "about": {}}', **metadata}
    return tensor_file.write(path, tensors or {}, about)


def test_another_programs_file_is_named_by_its_format(tmp_path: Path) -> None:
    path = written(tmp_path / "a", format="pt")
    with pytest.raises(RecordingFileError) as caught:
        saving.load(path)
    assert str(caught.value) == f"{path} is not a torchhook recording: its format is 'pt'."


def test_a_newer_format_says_to_upgrade(tmp_path: Path) -> None:
    path = written(tmp_path / "a", version="99")
    with pytest.raises(RecordingFileError) as caught:
        saving.load(path)
    assert str(caught.value) == (
        f"{path} has format version 99; this torchhook ({__version__}) reads up to {saving.VERSION}: "
        "install a newer one from its repository."
    )


@pytest.mark.parametrize(
    "document",
    [
        "not json",
        "[]",
        "{}",
        '{"values": [{}], "about": {}}',
        '{"values": [{"a": 1, "b": 2}], "about": {}}',
        '{"values": [{"unheard": 1}], "about": {}}',
        '{"values": [{"tensor": "t9"}], "about": {}}',
        '{"values": [{"float": "x"}], "about": {}}',
        '{"values": [{"dtype": "nothing"}], "about": {}}',
        '{"values": [{"complex": ["1"]}], "about": {}}',
        '{"values": [{"fields": ["A", ["x"], []]}], "about": {}}',
        '{"values": [3], "about": {}}',
    ],
)
def test_a_document_that_makes_no_sense_is_one_clear_error(tmp_path: Path, document: str) -> None:
    path = written(tmp_path / "a", recording=document)
    with pytest.raises(RecordingFileError, match=r"cannot be understood: \w+Error"):
        saving.load(path)


def test_a_version_that_is_no_number_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingFileError, match="cannot be understood: ValueError"):
        saving.load(written(tmp_path / "a", version="one"))


def test_what_was_replaced_while_it_was_recorded_is_still_said_after_a_file(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    with pytest.warns(th.errors.NeverRanWarning, match="replaced"), th.capture(model, "0", "1") as rec:
        model(torch.ones(1, 2))
        model[0] = torch.nn.Linear(2, 2)
        model(torch.ones(1, 2))
    assert list(rec.replaced) == ["0"]
    loaded = th.load(rec.save(tmp_path / "a"))
    assert loaded.replaced == rec.replaced
    assert "replaced: 0 (" in str(loaded)
    loaded.save(tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
