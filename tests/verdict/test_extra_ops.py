"""Ops that one run does more are found, whatever they resemble and whatever they write."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import torchrepro
from torchrepro.verdict.render import counted
from torchrepro.verdict.value import Kind

from .extra_ops import ExtraOps, Program, first_of

FEW, MANY = 100, 1000
MEMORY = Path("/dev/shm")
"""Where small files are quick: to write a trace waits for the disk."""

ONE_BIT = "x.reshape(-1).view(torch.int32)[-1:].bitwise_xor_(1)"
CASES = {
    "a write through a view, then views of what agrees by chance": Program.of_lines(
        [ONE_BIT],
        [
            *("y = x / 0", "z = y - y", "w = z.nan_to_num() + x"),
            "for t in (y, z, w): t.reshape(-1).view(torch.uint8)",
        ],
    ),
    "an op, a write and the op again": Program.of_lines(
        ["x.exp()", "x[:1].add_(1)"], ["x.exp()", "y.exp()", "(x * 0).exp()"]
    ),
    "a number is read before what it is read from is written": Program.of_lines(
        ["x.sum().item()", "x.mul_(2)"], ["x.sum().item()", "(x + y).sum().item()"]
    ),
    "views of the same memory": Program.of_lines(
        ["x.view(-1)", "x.view(2, 3)[0].zero_()"],
        ["x.view(-1)", "w = x * 1", "w.view(-1)", "w.view(2, 3)"],
    ),
    "a turn more of a loop": Program.of_lines(
        [], ["for t in in_turn([z, x], [y] if extra else [], [x, z]): t.add_(1)", "z.sum()"]
    ),
}
"""What was once taken for something else: lines that one run has, and those after them."""


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def _wrong(program: Program, *, more_in_left: bool, same_lines: bool = True) -> str:
    """Return in what the verdict on a program is wrong; nothing if it is right."""
    with _folder() as folder:
        plain = program.record(folder / "plain", extra=False)
        more = program.record(folder / "more", extra=True)
        verdict = torchrepro.compare(*((more, plain) if more_in_left else (plain, more)))
        truth = ExtraOps.of(more, plain, program.extra_places(), lines=same_lines)
    first, others = verdict.first, len(truth.places) - 1
    if first is None:
        return "it says the same"
    has = "A" if more_in_left else "B"
    if first.kind is not Kind.ONLY_ONE or not first.what.startswith(f"only {has} has it"):
        return f"it says {first.kind}: {first.what}, at {first.op} {first.source}"
    if first_of(verdict) not in truth.answers.values():
        return f"it names {first.op} {first.source}"
    if others and not any(
        one.startswith(f"{counted(others, 'more op')} ") for one in verdict.notes
    ):
        return f"it counts {verdict.notes}"
    return ""


def _require_all_found(seeds: Iterable[int], *, edited: bool = False) -> None:
    programs = {seed: Program.of(seed, edited=edited) for seed in seeds}
    wrong = {
        seed: found
        for seed, program in programs.items()
        if (found := _wrong(program, more_in_left=bool(seed % 2), same_lines=not edited))
    }
    texts = [f"seed {seed}: {what}\n{programs[seed]}" for seed, what in wrong.items()]
    assert not wrong, f"{len(wrong)} of {len(programs)}\n" + "\n".join(texts[:5])


def test_extra_ops_are_found_at_the_first_of_them() -> None:
    """The first op that only one run has is named as that, wherever the ops were put in."""
    _require_all_found(range(FEW))


@pytest.mark.slow
def test_extra_ops_are_found_in_a_thousand_programs() -> None:
    """The first op that only one run has is named as that, in each of a thousand programs."""
    _require_all_found(range(FEW, FEW + MANY))


def test_extra_ops_are_found_in_a_program_that_was_edited() -> None:
    """It makes no odds if the lines after the extra ones have other numbers."""
    _require_all_found(range(FEW // 2), edited=True)


@pytest.mark.parametrize("more_in_left", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_extra_ops_like_others_are_no_change_from_outside(name: str, *, more_in_left: bool) -> None:
    """Ops that only one run did are what the verdict names, not what they changed."""
    assert not _wrong(CASES[name], more_in_left=more_in_left)


def test_each_run_may_have_ops_of_its_own() -> None:
    """An op that one run did here is not the like one that the other run did on another line."""
    program = Program.of_lines(
        ["z.exp()", "x.mul_(2)"], ["y = x + z", "if not extra: z.exp()", "y.sum()"]
    )
    with _folder() as folder:
        runs = [program.record(folder / str(extra), extra=extra) for extra in (False, True)]
        first = torchrepro.compare(*runs).first

    assert first is not None
    assert (first.kind, first.op) == (Kind.ONLY_ONE, "aten::exp")
    assert first.what == "only B has it; A goes on with aten::add.Tensor"


def test_programs_that_do_the_same_are_the_same() -> None:
    """Two runs that both do the ops more are the same."""
    for seed in range(10):
        program = Program.of(seed)
        with _folder() as folder:
            runs = [program.record(folder / name, extra=True) for name in "ab"]

            assert torchrepro.compare(*runs).same, program
