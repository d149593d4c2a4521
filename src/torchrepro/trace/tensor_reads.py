"""Reads the fingerprints and the sizes of tensors for records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash

from torchrepro.trace.device_fingerprint import device_fingerprint, device_fingerprints
from torchrepro.trace.fingerprint import arrays, fingerprint, widths
from torchrepro.trace.op_facts import PLAIN, shape_of

BORROWED_NAMES = torch.UntypedStorage._cdata, torch.Tensor._nnz, torch.Tensor._is_zerotensor  # noqa: SLF001
"""Private names of torch. If one is missing, importing this module fails and recording is refused
before any op runs."""

_digest = xxhash.xxh3_128_digest


def fingerprint_of(tensor: Any) -> Any:
    """Return the fingerprint of a tensor, or a `PendingDigest` while a device computes it."""
    if tensor.is_cpu or tensor.is_meta:
        return fingerprint(tensor)
    return device_fingerprint(tensor)


def fingerprints_of(tensors: Sequence[Any]) -> list[Any]:
    """Return the fingerprint of each tensor. Fingerprints on a device are computed together."""
    fingerprints: list[Any] = [
        fingerprint(tensor) if tensor.is_cpu or tensor.is_meta else None for tensor in tensors
    ]
    on_devices = [index for index, digest in enumerate(fingerprints) if digest is None]
    pending = device_fingerprints([tensors[index] for index in on_devices])
    for index, digest in zip(on_devices, pending, strict=True):
        fingerprints[index] = digest
    return fingerprints


def read_each(tensors: Iterable[Any]) -> tuple[list[Any], list[Any], int]:
    """Return the fingerprints of tensors, their shapes, and their total size in bytes.

    Equivalent to `fingerprint_of`, `shape_of` and `size_of` for each tensor, but faster, because
    every attribute of a plain tensor is read only once.
    """
    fingerprints: list[Any] = []
    shapes, total = [], 0
    remaining: dict[int, Any] = {}
    for index, tensor in enumerate(tensors):
        try:
            if (
                tensor.__class__ in PLAIN
                and (shape := tensor.shape) is not None  # raises for nested tensors
                and (width := widths.get(dtype := tensor.dtype)) is not None
                and tensor.is_cpu
                and tensor.is_contiguous()
                and not (tensor.is_neg() or tensor.is_conj())
                and (start := tensor.data_ptr())
                and tensor.untyped_storage().nbytes()
                >= tensor.storage_offset() * width + (size := tensor.nbytes)
            ):
                fingerprints.append(_digest(arrays[size].from_address(start)))
                shapes.append((shape, dtype))
                total += size
                continue
        except RuntimeError:  # nested, sparse or without memory
            pass
        remaining[index] = tensor
        fingerprints.append(None)
        shapes.append(shape_of(tensor))
        total += size_of(tensor)
    for index, digest in zip(remaining, fingerprints_of([*remaining.values()]), strict=True):
        fingerprints[index] = digest
    return fingerprints, shapes, total


def size_of(tensor: Any) -> int:
    """Return the size in bytes of all elements, or of the stored elements of a sparse tensor."""
    try:
        return tensor.nbytes  # type: ignore[no-any-return]
    except (RuntimeError, NotImplementedError):
        return tensor._nnz() * tensor.element_size() if tensor.is_sparse else 0  # noqa: SLF001 - the public `values` needs a coalesced tensor


def fingerprint_of_plain_result(tensor: Any) -> bytes | None:
    """Return the fingerprint of a plain contiguous tensor on the CPU. Returns None for others.

    Call this only for a tensor that an op has just written: the tensor has memory, and no pending
    conjugation or negation. So fewer checks than in `fingerprint` give the same fingerprint.
    """
    try:
        if (
            tensor.__class__ in PLAIN
            and tensor.is_cpu
            and tensor.dtype in widths  # not quantised
            and tensor.shape is not None  # raises for nested tensors
            and tensor.is_contiguous()  # raises for sparse ones
            and (size := tensor.nbytes)
            and (start := tensor.data_ptr())  # 0 for autograd's zeros without memory
        ):
            return _digest(arrays[size].from_address(start))
    except RuntimeError:
        pass
    return None
