"""The file format, read back by the stock safetensors library."""

from __future__ import annotations

import json

import pytest
import torch
import xxhash
from safetensors import safe_open

from torchhook._features import shards
from torchhook._recording import tensor_file
from torchhook.errors import BrokenShardError

TENSORS = {
    "small": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "wide": torch.arange(6, dtype=torch.int64).reshape(2, 3),
    "single": torch.randn(2, 2),
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
}


@pytest.fixture(params=[2, 3], ids=["format 2", "format 3"])
def data(request) -> bytes:
    return b"".join(shards.encode(TENSORS, {"shard": "0"}, request.param))


def reader(data: bytes):
    return lambda start, end: data[start:end]


def test_a_stock_reader_reads_a_shard(tmp_path, data):
    (tmp_path / "a.safetensors").write_bytes(data)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["shard"] == "0"
        assert set(file.keys()) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_every_tensor_starts_at_a_multiple_of_its_item_size(data):
    found = shards.header("x", reader(data), len(data))
    assert found.start % 64 == 0
    for name, tensor in TENSORS.items():
        dtype, shape, first, last = found.span(name)
        assert (dtype, shape, last - first) == (tensor.dtype, list(tensor.shape), tensor.nbytes)
        assert first % tensor.element_size() == 0


def test_the_same_rows_are_the_same_bytes():
    one, other = ({name: tensor.clone() for name, tensor in TENSORS.items()} for _ in range(2))
    assert b"".join(shards.encode(one, {"shard": "0"})) == b"".join(shards.encode(other, {"shard": "0"}))


def test_the_checksum_covers_what_the_header_says_and_the_bytes_after_it():
    data = b"".join(shards.encode(TENSORS, {"shard": "0"}))
    found = shards.check("x", reader(data), len(data))
    signed = tensor_file.signed(found.entries, found.metadata)
    whole = xxhash.xxh3_64_hexdigest(signed + data[found.start :])
    assert found.checksum == f"{xxhash.xxh3_64_hexdigest(signed)}-{whole}"


def test_a_header_longer_than_the_first_read_is_read_whole():
    many = {f"layer.{i}": torch.ones(1) for i in range(200)}
    data = b"".join(shards.encode(many, {}))
    assert len(shards.check("x", reader(data), len(data)).entries) == 200


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_shard_is_found(data, kept):
    cut = data[:kept]
    with pytest.raises(BrokenShardError, match="truncated"):
        shards.check("s0", reader(cut), len(cut))


def test_any_flipped_byte_is_found(data):
    header_end = 8 + int.from_bytes(data[:8], "little")
    padding = range(len(data[:header_end].rstrip(b" ")), header_end)
    for at in range(8, len(data), 3):
        if at in padding:
            continue
        altered = bytearray(data)
        altered[at] ^= 0x01
        with pytest.raises(BrokenShardError):
            shards.check("s0", reader(bytes(altered)), len(altered))


def test_only_names_of_shards_are_shards():
    assert shards.number_of(shards.name_of(12)) == 12
    for name in (".s000000001.safetensors.7.ab.tmp", "s1.safetensors", "s000000001.bin", "x.safetensors", "s"):
        assert shards.number_of(name) is None


def test_a_strangers_safetensors_file_is_refused():
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = len(text).to_bytes(8, "little") + text + b"\0" * 4
    with pytest.raises(BrokenShardError, match="stranger"):
        shards.header("s0", reader(data), len(data))
