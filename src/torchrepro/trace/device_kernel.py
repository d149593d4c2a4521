"""The kernel that computes the sums of many tensors in one launch, in Triton.

Import this module only where Triton may be missing: the import fails without it. The kernel reads
the addresses of the tensors from a table, so one launch takes any number of tensors of any length.
Integers wrap around and sums are commutative, so the order of the additions has no effect.
https://triton-lang.org
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

ROW = tl.constexpr(1024)
"""Words that a program reads at a time: the keys of one row."""

ROWS = tl.constexpr(16)
"""Rows that a program reads."""

WORDS = ROW.value * ROWS.value
"""Words that a program reads."""

NAME = f"Triton {triton.__version__}"


@triton.jit(do_not_specialize=["tensors", "programs"])
def add_up(  # noqa: PLR0913, PLR0917 - a kernel takes no objects
    table,
    tensors,
    programs,
    keys,
    sums,
    step: tl.constexpr,
    first_factor: tl.constexpr,
    second_factor: tl.constexpr,
    first_shift: tl.constexpr,
    second_shift: tl.constexpr,
):
    """Add the mixed words of a part of one tensor, and the mixed words times their keys, to `sums`.

    `table` has the address and the size in bytes of each tensor, then for each program the number
    of its tensor and its first row. Each address is a multiple of 8. The words after the end of a
    tensor count as zero, and only if the tensor ends within them.
    """
    program = tl.program_id(0)
    tensor = tl.load(table + 2 * tensors + program)
    first_row = tl.load(table + 2 * tensors + programs + program)
    address = tl.load(table + tensor)
    size = tl.load(table + tensors + tensor)
    whole = size // 8
    words = address.to(tl.pointer_type(tl.int64))
    rest = address.to(tl.pointer_type(tl.uint8)) + whole * 8
    last = tl.zeros([], tl.int64)
    for index in tl.static_range(7):
        byte = tl.load(rest + index, mask=whole * 8 + index < size, other=0)
        last |= byte.to(tl.int64) << (8 * index)
    columns = tl.arange(0, ROW)
    keys_of_first_row = tl.load(keys + columns)
    plain = tl.zeros([ROW], tl.int64)
    weighted = tl.zeros([ROW], tl.int64)
    for row in range(ROWS):
        at = (first_row + row) * ROW + columns
        word = tl.load(words + at, mask=at < whole, other=0)
        word = tl.where(at == whole, last, word)
        key = keys_of_first_row + (first_row + row) * step
        mixed = (word + key) * first_factor
        mixed = mixed ^ (mixed >> first_shift)
        mixed = mixed * second_factor
        mixed = mixed ^ (mixed >> second_shift)
        mixed = tl.where(at * 8 < size, mixed, 0)
        plain += mixed
        weighted += mixed * key
    tl.atomic_add(sums + 2 * tensor, tl.sum(plain, 0), sem="relaxed")
    tl.atomic_add(sums + 2 * tensor + 1, tl.sum(weighted, 0), sem="relaxed")


def start(table: Any, tensors: int, keys: Any, sums: Any, mixing: Any) -> None:
    """Launch the kernel for a table of `tensors` tensors on the current device."""
    programs = (len(table) - 2 * tensors) // 2
    constants = mixing.step, *mixing.multipliers, *mixing.shifts
    add_up[(programs,)](table, tensors, programs, keys, sums, *constants)
