"""Fingerprints of tensors wherever they are, and quickly of those that an op has just written."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import xxhash

from torchrepro.trace.device_fingerprint import device_fingerprint
from torchrepro.trace.fingerprint import fingerprint

_NOT_A_DEVICE = ("cpu", "meta")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")
_digest = xxhash.xxh3_128_digest
_arrays: dict[int, Any] = {}


def fingerprint_of(tensor: Any) -> Any:
    """Return the fingerprint of a tensor, `Pending` for one whose device still computes it."""
    if tensor.device.type in _NOT_A_DEVICE:
        return fingerprint(tensor)
    return device_fingerprint(tensor)


def fingerprint_of_result(tensor: Any) -> Any:
    """Return the fingerprint of a tensor whose memory an op has just written."""
    plain = plain_result(tensor)
    return fingerprint_of(tensor) if plain is None else plain[0]


def plain_result(tensor: Any) -> tuple[bytes, Any, int] | None:
    """Return fingerprint, shape and size of a plain contiguous tensor on the CPU, else None.

    It is one that an op has just written: its memory is there and no value of it waits to be
    conjugated or negated, so that nothing more has to be asked before it is read. The fingerprint
    is the same as `fingerprint` takes.
    """
    try:
        shape = tensor.shape  # raises for nested tensors
        if (
            tensor.__class__ in _PLAIN
            and tensor.device == _CPU
            and tensor.is_contiguous()  # raises for sparse ones
            and (size := tensor.nbytes)
            and (start := tensor.data_ptr())  # none for zeros that autograd only imagines
        ):
            array = _arrays.get(size)
            if array is None:
                array = _arrays[size] = ctypes.c_char * size
            digest = _digest(array.from_address(start))
            return digest, (shape, tensor.dtype), size
    except RuntimeError:
        return None
    return None
