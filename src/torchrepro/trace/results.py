"""Fingerprints of tensors wherever they are, and quickly of those that an op has just written."""

from __future__ import annotations

from typing import Any

import xxhash

from torchrepro.trace.arguments import CPU, PLAIN
from torchrepro.trace.device_fingerprint import device_fingerprint
from torchrepro.trace.fingerprint import arrays, fingerprint

_NOT_A_DEVICE = ("cpu", "meta")
_digest = xxhash.xxh3_128_digest


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
            tensor.__class__ in PLAIN
            and tensor.device == CPU
            and tensor.is_contiguous()  # raises for sparse ones
            and (size := tensor.nbytes)
            and (start := tensor.data_ptr())  # none for zeros that autograd only imagines
        ):
            return _digest(arrays[size].from_address(start)), (shape, tensor.dtype), size
    except RuntimeError:
        return None
    return None
