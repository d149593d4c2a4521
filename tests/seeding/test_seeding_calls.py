"""Seeding calls of the program itself work as without a profile, and are recorded."""

import contextlib
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torchrepro
from torchrepro.ground import callers
from torchrepro.seeding.call_records import ObservedCall
from torchrepro.seeding.nondeterministic_calls import EXPLICIT_SEED, FUNCTIONS
from torchrepro.seeding.seeding_calls import seeding_calls

HERE = str(Path(__file__))
State = Callable[[], dict[str, Any]]


def _first_name(name: str) -> str:
    """The name under which a call is recorded: one function may have two."""
    last = name.rpartition(".")[2]
    two = getattr(torch, last, None) is getattr(torch.random, last, None)  # not once compile is in
    return name.replace("torch.random.", "torch.") if two else name


@pytest.fixture(autouse=True)
def _generators_come_back() -> Iterator[None]:
    with torchrepro.isolated_rng():
        yield


def _line() -> int:
    return sys._getframe(1).f_lineno


def _originals() -> dict[tuple[str, str], Any]:
    owners = {"random": random, "numpy.random": np.random, "torch": torch}
    found = {}
    for module, name in FUNCTIONS:
        owner = owners.get(module) or getattr(torch, module.partition(".")[2], None)
        found[module, name] = getattr(owner, name, None)
    return found


HOST = {"random": "python", "numpy.random": "numpy", "torch": "torch", "torch.random": "torch"}
PRESENT = [place for place, function in _originals().items() if function is not None]


@pytest.mark.parametrize("place", PRESENT, ids=".".join)
def test_a_seeding_call_works_and_is_recorded(place: tuple[str, str], generators: State) -> None:
    """It sets the same state as without a profile, and makes one record, whatever it calls inside.

    The record has function, last value, file, line and count.
    """
    seeds = [(), ()] if place[0].startswith("torch") and place[1] == "seed" else [(5,), (77,)]
    for given in seeds:
        _originals()[place](*given)
    expected = generators()
    with torchrepro.apply({"seed": 1}) as applied:
        random.random(), np.random.rand(), torch.rand(1)
        for given in seeds:
            _originals()[place](*given), (line := _line())
        inside = generators()

    if place[0] in HOST and seeds[1]:
        assert inside[HOST[place[0]]] == expected[HOST[place[0]]]
    function, value = _first_name(".".join(place)), "77" if seeds[1] else ""
    call = ObservedCall(function, EXPLICIT_SEED, f"{HERE}:{line}", value=value, times=2)
    assert applied.seeding_calls == (call,)
    assert str(applied.seeding_calls[0]) == f"{function}({value}) at {HERE}:{line} (2 times)"


def test_every_line_is_recorded_in_the_order_of_its_first_call(seed_1234: Any) -> None:
    """Two lines are two records, and undo keeps them for a comparison of runs."""
    for _ in range(2):
        random.seed("text"), (first := _line())
        torch.manual_seed(seed=5), (second := _line())
        torch.seed(), (third := _line())
    seed_1234.restore()
    random.seed(3)

    assert [str(call) for call in seed_1234.seeding_calls] == [
        f"random.seed(text) at {HERE}:{first} (2 times)",
        f"torch.manual_seed(5) at {HERE}:{second} (2 times)",
        f"torch.seed() at {HERE}:{third} (2 times)",
    ]


def test_a_call_through_a_library_is_recorded_at_the_line_of_the_program(seed_1234: Any) -> None:
    """If a library makes the call, the record has the line that called the library."""
    with contextlib.ExitStack() as stack:
        stack.callback(random.seed, 3)
        stack.close(), (line := _line())

    assert [call.where for call in seed_1234.seeding_calls] == [f"{HERE}:{line}"]


def test_a_library_that_seeds_at_its_import_is_recorded_at_the_import(
    seed_1234: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is the program's import, not a line of Python's import machinery.

    The test treats a folder like site-packages, as the folder of installed packages.
    """
    (tmp_path / "seeds_at_import.py").write_text("import random\nrandom.seed(5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(callers, "_LIBRARIES", (*callers._LIBRARIES, str(tmp_path)))
    try:
        importlib.import_module("seeds_at_import"), (line := _line())
    finally:
        sys.modules.pop("seeds_at_import", None)

    assert [call.where for call in seed_1234.seeding_calls] == [f"{HERE}:{line}"]


def test_a_call_without_a_line_of_the_program_is_recorded_at_the_library(seed_1234: Any) -> None:
    """A thread that starts with a seeding function is recorded at the library's own line."""
    thread = threading.Thread(target=random.seed, args=(3,))
    thread.start()
    thread.join()

    (call,) = seed_1234.seeding_calls
    assert call.where.startswith(f"{threading.__file__}:")


def test_calls_of_torchrepro_and_torch_are_not_recorded(seed_1234: Any) -> None:
    """Scopes, profiles, loaders and torch's own functions make no record."""
    with torchrepro.seeded("init"), torchrepro.isolated_rng():
        torchrepro.set_rng_state(torchrepro.rng_state())
        list(DataLoader(range(4), shuffle=True))
        list(DataLoader(range(4), **torchrepro.dataloader_kwargs("train"), shuffle=True))
    with torch.random.fork_rng():
        torch.nn.Linear(2, 2).reset_parameters()
    with torchrepro.apply({"seed": 7}):
        pass

    assert seed_1234.seeding_calls == ()


def test_a_call_that_raises_is_not_recorded(seed_1234: Any) -> None:
    """The error is the library's own."""
    with pytest.raises(ValueError, match="Seed must be between 0"):
        np.random.seed(-1)
    with pytest.raises(TypeError):
        random.seed([1])  # type: ignore[arg-type]

    assert seed_1234.seeding_calls == ()


def test_without_a_seed_no_call_is_recorded() -> None:
    """Before, after and under a profile without a seed, also through names kept from a profile."""
    random.seed(1)
    with torchrepro.apply({"dropout": "keep"}) as applied:
        random.seed(2)
        assert applied.seeding_calls == ()
    with torchrepro.apply({"seed": 1}) as applied:
        kept = random.seed
        assert applied.seeding_calls == ()
    random.seed(3), kept(3)

    assert random.getstate() == random.Random(3).getstate()
    assert seeding_calls.calls() == applied.seeding_calls == ()


def test_nested_profiles_have_separate_records(seed_1234: Any) -> None:
    """Calls under an inner profile with a seed belong to it; earlier records stay."""
    random.seed(1)
    before = seed_1234.seeding_calls
    with torchrepro.apply({"seed": 2}) as inner:
        np.random.seed(2)
    torch.manual_seed(3)

    assert [call.function for call in inner.seeding_calls] == ["numpy.random.seed"]
    assert before == seed_1234.seeding_calls[:1]
    assert [c.function for c in seed_1234.seeding_calls] == ["random.seed", "torch.manual_seed"]


def test_at_most_1000_lines_are_recorded(seed_1234: Any) -> None:
    """The first 1000 lines keep their records and counts."""
    program = compile("random.seed(1)\n" * 1500, "generated.py", "exec")
    for _ in range(2):
        exec(program, {"random": random, "__name__": "generated"})
    found = seed_1234.seeding_calls

    assert [call.where for call in found] == [f"generated.py:{line}" for line in range(1, 1001)]
    assert {call.times for call in found} == {2}
