"""What a record needs of a tensor: its fingerprint, its size and its version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import xxhash

from torchrepro.trace.fingerprint import arrays, device_fingerprint, fingerprint, widths
from torchrepro.trace.op_facts import PLAIN, shape_of

BORROWED = torch.UntypedStorage._cdata, torch.Tensor._nnz, torch.Tensor._is_zerotensor  # noqa: SLF001
"""Asked for as a recording begins, which a torch without one of them refuses before any op."""

_digest = xxhash.xxh3_128_digest


def fingerprint_of(tensor: Any) -> Any:
    """Return the fingerprint of a tensor, `Pending` for one whose device still computes it."""
    if tensor.is_cpu or tensor.is_meta:
        return fingerprint(tensor)
    return device_fingerprint(tensor)


def read_each(tensors: Iterable[Any]) -> tuple[list[Any], list[Any], int]:
    """Return the fingerprints of tensors, their shapes, and how many bytes they have in all.

    It is `fingerprint_of` and `shape_of` of each, with each thing asked once of a plain tensor.
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
    """Return how many bytes the elements of a tensor take; of a sparse one, those it stores."""
    try:
        return tensor.nbytes  # type: ignore[no-any-return]
    except (RuntimeError, NotImplementedError):
        return tensor._nnz() * tensor.element_size() if tensor.is_sparse else 0  # noqa: SLF001 - the public `values` needs a coalesced tensor


def fingerprint_of_plain_result(tensor: Any) -> bytes | None:
    """Return the fingerprint of a plain contiguous tensor on the CPU, else None.

    An op has just written it: its memory exists, and no value waits to be conjugated or negated.
    Fewer checks than in `fingerprint` are therefore enough; the fingerprint is the same.
    """
    try:
        if (
            tensor.__class__ in PLAIN
            and tensor.is_cpu
            and tensor.dtype in widths  # not quantised
            and tensor.shape is not None  # raises for nested tensors
            and tensor.is_contiguous()  # raises for sparse ones
            and (size := tensor.nbytes)
            and (start := tensor.data_ptr())  # none for zeros that autograd only imagines
        ):
            return _digest(arrays[size].from_address(start))
    except RuntimeError:
        pass
    return None


def version_of(tensor: Any) -> int:
    """Return how often torch has written `tensor` in place.

    Inference tensors do not count it: of these it is how often ops that were seen wrote their
    memory, as any view of it. https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks
    """
    try:
        return tensor._version  # type: ignore[no-any-return]  # noqa: SLF001 - documented, see above
    except RuntimeError:
        return writes.get(memory_shared(tensor), 0)


writes: dict[int, int] = {}  # of inference tensors, by their storage


def memory_shared(tensor: Any) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # noqa: SLF001 - see `_notice`
