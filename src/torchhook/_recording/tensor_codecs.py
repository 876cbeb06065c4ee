"""Codecs of tensors: dense ones go to the file as they are, the others as the dense tensors that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchhook import _torch
from torchhook._recording import tensor_file
from torchhook._recording.codecs import OPAQUE, Codec, Reader, Writer
from torchhook._values.nodes import Node
from torchhook._values.wrappers import is_causal_bias, is_fake, is_wrapper

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor of another layout is made of."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        return list(_torch.sparse_parts(tensor))
    if tensor.layout in _COMPRESSED:
        first, second = _COMPRESSED[tensor.layout]
        return [getattr(tensor, first)(), getattr(tensor, second)(), tensor.values()]
    return [tensor.to_dense()]


def name(constant: torch.dtype | torch.layout) -> str:
    """What torch calls a dtype or a layout."""
    return str(constant).removeprefix("torch.")


# -- without numbers, and of other layouts ------------------------------------------------------------


def _write_meta(tensor: Tensor, writer: Writer) -> Any:
    return [list(tensor.shape), name(tensor.dtype)]


def _read_meta(body: Any, reader: Reader) -> Tensor:
    return torch.empty(body[0], dtype=getattr(torch, body[1]), device="meta")


def _write_nested(tensor: Tensor, writer: Writer) -> Any:
    layout = "jagged" if tensor.layout == torch.jagged else "strided"
    return [layout, writer.several(parts(tensor.detach()))]


def _read_nested(body: Any, reader: Reader) -> Tensor:
    layout = torch.jagged if body[0] == "jagged" else torch.strided
    return torch.nested.as_nested_tensor(reader.several(body[1]), layout=layout)


def _write_sparse(tensor: Tensor, writer: Writer) -> Any:
    coalesced = tensor.layout == torch.sparse_coo and tensor.is_coalesced()
    return [list(tensor.shape), writer.several(parts(tensor.detach())), coalesced]


def _read_coo(body: Any, reader: Reader) -> Tensor:
    indices, values = reader.several(body[1])
    # torch does not check by itself, and an index out of range, which a file may hold, may read foreign memory.
    return torch.sparse_coo_tensor(indices, values, body[0], check_invariants=True, is_coalesced=body[2] or None)


def _compressed(layout: torch.layout) -> Codec:
    def read(body: Any, reader: Reader) -> Tensor:
        first, second, values = reader.several(body[1])
        return torch.sparse_compressed_tensor(first, second, values, body[0], layout=layout, check_invariants=True)

    return Codec(name(layout), _of(lambda t: t.layout == layout), _write_sparse, read)


def _write_dense(tensor: Tensor, writer: Writer) -> Any:
    return writer.one(tensor.detach().to_dense())


def _read_mkldnn(body: Any, reader: Reader) -> Tensor:
    dense: Tensor = reader.one(body)
    return dense.to_mkldnn() if torch.backends.mkldnn.is_available() else dense  # not every machine has the layout


# -- quantized ----------------------------------------------------------------------------------------


def _is_quantized(tensor: Tensor) -> bool:
    return tensor.is_quantized and tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)


def _write_quantized(tensor: Tensor, writer: Writer) -> Any:
    tensor = tensor.detach()
    return [name(tensor.dtype), writer.one(tensor.int_repr()), tensor.q_scale(), tensor.q_zero_point()]


def _read_quantized(body: Any, reader: Reader) -> Tensor:
    # From the integers as they are: torch.quantize_per_tensor takes floats, and rounds them anew.
    return _torch.quantized_per_tensor(reader.one(body[1]), body[2], body[3])


def _write_channels(tensor: Tensor, writer: Writer) -> Any:
    tensor = tensor.detach()
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [name(tensor.dtype), *writer.several([tensor.int_repr(), scales, zeros]), tensor.q_per_channel_axis()]


def _read_channels(body: Any, reader: Reader) -> Tensor:
    integers, scales, zeros = reader.several(body[1:4])
    return _torch.quantized_per_channel(integers, scales, zeros, body[4])


# -- dense ------------------------------------------------------------------------------------------------


def _plain(tensor: Tensor) -> Tensor:
    # Conjugates and negatives may only be marked as such: their memory holds other numbers.
    return tensor.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg()


def _write_complex(tensor: Tensor, writer: Writer) -> Any:
    return writer.one(torch.view_as_real(_plain(tensor)))


def _read_complex(body: Any, reader: Reader) -> Tensor:
    return torch.view_as_complex(reader.one(body).contiguous())


def _is_small_float(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return dtype.is_floating_point and dtype.itemsize == 1 and dtype not in tensor_file.DTYPES


def _write_bits(tensor: Tensor, writer: Writer) -> Any:
    return [name(tensor.dtype), writer.one(_plain(tensor).contiguous().view(torch.uint8))]


def _read_bits(body: Any, reader: Reader) -> Tensor:
    bits: Tensor = reader.one(body[1])
    return bits.view(getattr(torch, body[0]))


def _write_causal_bias(tensor: Tensor, writer: Writer) -> Any:
    return writer.keep(_torch.materialized(tensor, torch.device("cpu")))


def _of(test: Callable[[Tensor], bool]) -> Callable[[Any, Node | None], bool]:
    """Takes the tensors for which ``test`` is true."""
    return lambda tensor, node: test(tensor)


_DENSE = Codec(
    "tensor",
    _of(lambda t: t.dtype in tensor_file.DTYPES),
    lambda tensor, writer: writer.keep(_plain(tensor)),
    lambda body, reader: reader.tensors[body],
)

# Layouts before dtypes: a sparse or nested tensor may be complex too.
TENSORS: tuple[Codec, ...] = (
    Codec("meta", _of(is_fake), _write_meta, _read_meta),
    _DENSE._replace(takes=_of(is_causal_bias), write=_write_causal_bias),
    # What is left of the wrappers, after those that say what they stand for: nobody knows their numbers.
    OPAQUE._replace(takes=_of(is_wrapper)),
    Codec("nested", _of(lambda t: t.is_nested), _write_nested, _read_nested),
    Codec("sparse_coo", _of(lambda t: t.layout == torch.sparse_coo), _write_sparse, _read_coo),
    *map(_compressed, _COMPRESSED),
    Codec("mkldnn", _of(lambda t: t.is_mkldnn), _write_dense, _read_mkldnn, since=2),
    Codec("quantized", _of(_is_quantized), _write_quantized, _read_quantized),
    Codec("quantized_channels", _of(lambda t: t.is_quantized), _write_channels, _read_channels),
    Codec("complex_tensor", _of(lambda t: t.is_complex()), _write_complex, _read_complex),
    Codec("bits", _of(_is_small_float), _write_bits, _read_bits),
    _DENSE,
    OPAQUE,
)
