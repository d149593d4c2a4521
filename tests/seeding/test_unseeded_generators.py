"""An unseeded generator counts as a read once it has drawn, and not when it is made."""

import copy
import gc
import linecache
import os
import pickle
import random
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchrepro
from torchrepro.seeding.nondeterministic_calls import UNSEEDED
from torchrepro.seeding.nondeterministic_reads import Watch

MADE = {
    "random.Random": ("random.Random()", "random.Random(3)"),
    "numpy.random.RandomState": ("np.random.RandomState()", "np.random.RandomState(3)"),
    "numpy.random.default_rng": ("np.random.default_rng()", "np.random.default_rng(3)"),
}
"""A name -> how a line makes it without a seed, and with one."""

DRAWS = {"draw": "g.random()", "draw many": "for _ in range(5000): g.random()"}
COPIES = {
    "copy": "g = copy.copy(g)",
    "deep copy": "g = copy.deepcopy(g)",
    "pickle": "g = pickle.loads(pickle.dumps(g))",
}
SEEDS = {
    "random.Random": {"seed": "g.seed(3)", "set": "g.setstate(random.Random(4).getstate())"},
    "numpy.random.RandomState": {
        "seed": "g.seed(3)",
        "set": "g.set_state(np.random.RandomState(4).get_state())",
    },
    "numpy.random.default_rng": {
        "set": "g.bit_generator.state = np.random.default_rng(4).bit_generator.state"
    },
}
STEPS = {name: {**DRAWS, **COPIES, **seeds} for name, seeds in SEEDS.items()}


@contextmanager
def _watched() -> Iterator[Watch]:
    watch = Watch(UNSEEDED)
    try:
        yield watch
    finally:
        watch.stop()


def _run(lines: list[str], folder: Path, watch: Watch) -> dict[str, Any]:
    program = folder / "program.py"
    program.write_text("\n".join(lines))
    linecache.cache.pop(str(program), None)  # the text of an earlier program
    names = {"__name__": "program", "random": random, "np": np, "copy": copy, "pickle": pickle}
    names["look"] = watch.reads
    exec(compile(program.read_text(), str(program), "exec"), names)
    return names


def _drew_unseeded(steps: list[str], *, seeded: bool) -> bool:
    for step in steps:
        if step in DRAWS and not seeded:
            return True
        seeded = seeded or step in ("seed", "set")
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@given(st.data())
def test_a_generator_is_recorded_exactly_if_it_draws_before_it_is_seeded(
    folder: Path, data: st.DataObject
) -> None:
    """Seeded, restored, copied or unpickled first: no record; a draw before that: its line.

    For numpy's generators the reads are checked before a state is set, because states are
    compared. Copies of unseeded generators are not followed.
    """
    made = data.draw(st.sampled_from(list(MADE)))
    seeded = data.draw(st.booleans())
    possible = [step for step in STEPS[made] if seeded or step not in COPIES]
    steps = data.draw(st.lists(st.sampled_from(possible), max_size=5))
    lines = [f"g = {MADE[made][seeded]}", "kept = [g]"]
    for step in steps:
        lines += ["look()"] * (step == "set" and made != "random.Random")
        lines += [STEPS[made][step], "kept.append(g)"]
    with _watched() as watch:
        names = _run(lines, folder, watch)
        reads = watch.reads()

    assert names["kept"]
    drew = _drew_unseeded(steps, seeded=seeded)
    noted = [(made, f"{folder}/program.py:1", 1)] if drew else []
    assert [(read.name, read.where, read.times) for read in reads] == noted


def test_a_numpy_generator_is_recorded_after_many_draws(folder: Path) -> None:
    """A million numbers later its state is still recognized as following from the first."""
    with _watched() as watch:
        _run(["g = np.random.RandomState()", "g.rand(1_000_000)"], folder, watch)

        assert [read.where for read in watch.reads()] == [f"{folder}/program.py:1"]


def test_draws_of_spawned_generators_count_for_their_parent(folder: Path) -> None:
    """`spawn` of an unseeded generator makes unseeded generators."""
    with _watched() as watch:
        _run(["g = np.random.default_rng().spawn(1)[0]", "g.random()"], folder, watch)

        assert [read.where for read in watch.reads()] == [f"{folder}/program.py:1"]


def test_unseeded_generators_are_counted_at_the_line_that_made_them(folder: Path) -> None:
    """The count of a line is its generators that drew, in the order in which they were made."""
    lines = [
        "made = [random.Random() for _ in range(9)]",
        "first, second = np.random.default_rng(), random.Random()",
        "for g in (second, *made[:3], first): g.random()",
    ]
    with _watched() as watch:
        kept = _run(lines, folder, watch)
        reads = watch.reads()

    assert kept
    where = [(read.name, read.where.rpartition(":")[2], read.times) for read in reads]
    assert where == [
        ("random.Random", "1", 3),
        ("numpy.random.default_rng", "2", 1),
        ("random.Random", "2", 1),
    ]


@pytest.mark.parametrize("made", [line for lines in MADE.values() for line in lines])
def test_watching_changes_neither_lifetime_nor_numbers(folder: Path, made: str) -> None:
    """A watch keeps no `random.Random` alive, and comparing states moves no generator."""
    with _watched() as watch:
        names = _run([f"g = {made}", "twin = copy.deepcopy(g)", "look()"], folder, watch)
        generator, twin = names.pop("g"), names.pop("twin")
        for _ in range(3):
            assert generator.random() == twin.random()
            watch.reads()
        if isinstance(generator, random.Random):
            alive = weakref.ref(generator)
            gc.disable()
            del generator
            gc.enable()
            assert alive() is None


def test_functions_and_types_are_restored_after_a_watch(folder: Path) -> None:
    """Also after it has seen unseeded generators."""

    twister, sending = attrgetter("random.mtrand._MT19937"), attrgetter("_send_bytes")

    def present() -> tuple[Any, ...]:
        methods = random.Random.seed, random.Random.setstate, sending(Connection)
        return *methods, os._exit, twister(np), np.random.default_rng

    before = present()
    with _watched() as watch:
        _run([f"{lines[0]}.random()" for lines in MADE.values()], folder, watch)
        assert [now for now, was in zip(present(), before, strict=True) if now is was] == []
        with pytest.raises(TypeError, match="re-seed"):
            np.random.RandomState(np.random.PCG64(1)).seed(3)
        with pytest.raises(IndexError):
            random.Random().setstate(())

    assert [now for now, was in zip(present(), before, strict=True) if now is not was] == []


IN_CHILDREN = """
import os, random, numpy as np, torch

class Noise(torch.utils.data.Dataset):
    def __init__(self):
        self.drawn = random.Random()  # noted
        self.numpy = np.random.default_rng()  # noted
        self.seeded = random.Random()
        self.never = np.random.RandomState()
    def __len__(self):
        return 2
    def __getitem__(self, index):
        own = random.Random()
        own.seed(index)
        return self.drawn.random() + self.numpy.random() + self.seeded.random() + own.random()

def seed(worker):
    torch.utils.data.get_worker_info().dataset.seeded.seed(worker)

data = Noise()
list(torch.utils.data.DataLoader(data, num_workers=1, worker_init_fn=seed))
left = random.Random()  # noted
if not (child := os.fork()):
    left.random()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_draw_of_a_forked_child_counts_in_its_parent(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The child reports it; the report names the line of the parent that made the generator."""
    program = folder / "children.py"
    program.write_text(IN_CHILDREN)
    with torchrepro.apply({"seed": 1, "guarantee": "repeatable"}) as applied:
        exec(compile(IN_CHILDREN, str(program), "exec"), {"__name__": "program"})
        reads = applied.report.unseeded

    lines = IN_CHILDREN.splitlines()
    noted = [f"{program}:{at}" for at, line in enumerate(lines, 1) if "# noted" in line]
    assert [read.where for read in reads] == noted
    said = [line for line in capfd.readouterr().err.splitlines() if "in workers" in line]
    assert [place in line for place, line in zip(noted, said, strict=False)] == [True, True]


@pytest.mark.slow
def test_a_generator_freed_at_exit_prints_nothing(folder: Path) -> None:
    """Python clears modules before it frees the generator."""
    program = folder / "outlives.py"
    program.write_text(
        "import builtins, ctypes, random, sys, torchrepro\n"
        "torchrepro.apply({'seed': 1, 'guarantee': 'repeatable'})\n"
        "for module in (builtins, ctypes, random, sys, torchrepro):\n"
        "    module.own = random.Random()\n"
        "    module.own.random()\n"
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)

    assert (ran.returncode, ran.stdout) == (0, "")
    assert "Exception" not in ran.stderr


@pytest.mark.parametrize("draws", [False, True])
def test_a_freed_generator_is_recorded_exactly_if_it_drew(folder: Path, draws: bool) -> None:
    """Also one that the garbage collector frees, and one of a class of the program."""
    lines = [
        "class Own(random.Random): pass",
        "for made in (random.Random(), Own()):",
        "    made.own = made",
        *(["    made.random()"] if draws else []),
        "made = random.Random()" + draws * ".random()",
        "del made",
    ]
    with _watched() as watch:
        _run(lines, folder, watch)
        gc.collect()

        assert [read.times for read in watch.reads()] == ([2, 1] if draws else [])


def test_without_numpys_private_name_a_random_state_counts_when_it_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No profile fails."""
    legacy = attrgetter("random.mtrand")(np)
    twister = legacy._MT19937
    with monkeypatch.context() as without:
        without.delattr(legacy, "_MT19937")
        watch = Watch(UNSEEDED)
    try:
        assert legacy._MT19937 is twister
        kept = _run(["g = np.random.RandomState()"], folder, watch)

        assert kept
        assert [read.name for read in watch.reads()] == ["numpy.random.RandomState"]
    finally:
        watch.stop()
