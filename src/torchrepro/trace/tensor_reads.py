"""The fingerprint, the size and the version of a tensor, as records need them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import xxhash

from torchrepro.trace.fingerprint import arrays, device_fingerprint, fingerprint, widths
from torchrepro.trace.op_facts import PLAIN, shape_of

BORROWED_NAMES = torch.UntypedStorage._cdata, torch.Tensor._nnz, torch.Tensor._is_zerotensor  # noqa: SLF001
"""Private names of torch. If one is missing, importing this module fails and recording is refused
before any op runs."""

_digest = xxhash.xxh3_128_digest


def fingerprint_of(tensor: Any) -> Any:
    """Return the fingerprint of a tensor, or a `Pending` one while its device computes it."""
    if tensor.is_cpu or tensor.is_meta:
        return fingerprint(tensor)
    return device_fingerprint(tensor)


def read_each(tensors: Iterable[Any]) -> tuple[list[Any], list[Any], int]:
    """Return the fingerprints of tensors, their shapes, and their total size in bytes.

    Same as `fingerprint_of`, `shape_of` and `size_of` of each tensor, but faster: every attribute
    of a plain tensor is read once.
    """
    fingerprints, shapes, total = [], [], 0
    for tensor in tensors:
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
        except RuntimeError:  # as in `fingerprint`
            pass
        fingerprints.append(fingerprint_of(tensor))
        shapes.append(shape_of(tensor))
        total += size_of(tensor)
    return fingerprints, shapes, total


def size_of(tensor: Any) -> int:
    """Return the size of a tensor's elements in bytes; a sparse tensor counts stored elements."""
    try:
        return tensor.nbytes  # type: ignore[no-any-return]
    except (RuntimeError, NotImplementedError):
        return tensor._nnz() * tensor.element_size() if tensor.is_sparse else 0  # noqa: SLF001 - the public `values` needs a coalesced tensor


def fingerprint_of_plain_result(tensor: Any) -> bytes | None:
    """Return the fingerprint of a plain contiguous tensor on the CPU, else None.

    Only for a tensor that an op has just written: its memory exists, and no conjugation or negation
    is pending. So it needs fewer checks than `fingerprint` for the same fingerprint.
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


def version_of(tensor: Any) -> int:
    """Return how often torch has written `tensor` in place.

    Inference tensors have no such counter. For them it is how often recorded ops wrote their
    storage, through any view. https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks
    """
    try:
        return tensor._version  # type: ignore[no-any-return]  # noqa: SLF001 - documented, see above
    except RuntimeError:
        return inference_writes.get(storage_id(tensor), 0)


inference_writes: dict[int, int] = {}  # number of writes to inference tensors, by storage


def storage_id(tensor: Any) -> int:
    """Return a number that all tensors of one storage share; 0 for tensors without a storage."""
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # noqa: SLF001 - see `BORROWED_NAMES`
