"""What a stream gives, by heart: a number that changes here breaks the runs of every user."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchrepro
from torchrepro.seeding.streams import derive, seed_of_rank

FAR = {"rank": 1023, "worker": 15, "epoch": 99, "step": 2**63 - 1}
# fmt: off
KNOWN: list[tuple[int, str, dict[str, int], int, tuple[float, float, float, float]]] = [
    # seed, name, coordinates, seed64, first number of python, numpy, numpy_legacy, torch
    (0, "split", {}, 16586533184977876259,
     (0.44907535361715134, 0.11809299195312983, 0.3912281574119365, 0.17156468827386717)),
    (1234, "split", {}, 12866239345983445672,
     (0.8543210115460255, 0.553604734956002, 0.10589783109684991, 0.6263341391289424)),
    (4294967295, "split", {}, 6826111622816896034,
     (0.4998397723651511, 0.9398095752875026, 0.07081178947713274, 0.4507352634891667)),
    (0, "init", {"rank": 1}, 12466870200353869752,
     (0.45857772687865583, 0.6340926439588547, 0.16056399468373206, 0.6880048421596868)),
    (1234, "init", {"rank": 1}, 1570502103634312387,
     (0.6884813110326141, 0.17388574484033592, 0.49272213959363464, 0.7734277065353115)),
    (1234, "augment", {"rank": 7, "worker": 0}, 1800386925479895387,
     (0.7523858339384185, 0.357354424769327, 0.8059399926043339, 0.7778767524497538)),
    (1234, "augment", {"rank": 7, "worker": 3}, 12081782742226279474,
     (0.16273688518299712, 0.7681590356960964, 0.7918679830531768, 0.4162362354454717)),
    (1234, "augment", {"epoch": 0}, 9733927128449484574,
     (0.39475076312205715, 0.6850879727956581, 0.03701932624980242, 0.7090879513122456)),
    (1234, "augment", {"epoch": 12, "step": 345}, 10089258933990844965,
     (0.27250126855307466, 0.6272163578785485, 0.5756161315731305, 0.7930607806911703)),
    (1234, "augment", FAR, 13002262869825920581,
     (0.7378764692840016, 0.2899040031193749, 0.00017522918032486512, 0.8144438984041636)),
    (1234, "Zufällig 乱数 🎲", {}, 8430673246421105631,
     (0.23348466387047373, 0.8202841401055181, 0.5538610441543074, 0.7476529152739831)),
    (20261121, "a/b None", {"step": 0}, 18274432962580697626,
     (0.5269932134504974, 0.11030343499661499, 0.9675762620860924, 0.07182816376989154)),
]
# fmt: on
ASK = """
import json, sys, torch, torchrepro
answers = []
for seed, name, where in json.loads(sys.argv[1]):
    with torchrepro.apply({"seed": seed}):
        s = torchrepro.stream(name, **where)
    answers.append([s.seed64, s.python().random(), s.numpy().random(),
                    s.numpy_legacy().random_sample(),
                    torch.rand((), dtype=torch.float64, generator=s.torch()).item()])
print(json.dumps(answers))
"""


@pytest.mark.parametrize(("seed", "name", "where", "seed64", "numbers"), KNOWN)
def test_a_stream_gives_what_it_has_always_given(
    seed: int, name: str, where: dict[str, int], seed64: int, numbers: tuple[float, ...]
) -> None:
    """Seed, name and coordinates fix every number, on any machine and in any version."""
    with torchrepro.apply({"seed": seed}):
        stream = torchrepro.stream(name, **where)

    assert (stream.seed64, stream.seed) == (seed64, seed64 % 2**32)
    assert numbers == (
        stream.python().random(),
        stream.numpy().random(),
        stream.numpy_legacy().random_sample(),
        torch.rand((), dtype=torch.float64, generator=stream.torch()).item(),
    )


def test_another_process_gives_the_same(answer_of: Callable[..., Any]) -> None:
    """A fresh process under another PYTHONHASHSEED gives the known values."""
    here = os.environ.get("PYTHONHASHSEED")
    asked = json.dumps([row[:3] for row in KNOWN])

    answers = answer_of(ASK, asked, PYTHONHASHSEED="1" if here != "1" else "2")

    assert answers == [[seed64, *numbers] for *_, seed64, numbers in KNOWN]


def test_the_seeds_of_ranks_and_of_loaders_are_what_they_have_always_been() -> None:
    """What the global generators of a rank and the parts of a loader derive from is fixed too."""
    ranks = [seed_of_rank(1234, rank) for rank in (0, 1, 2, 1023)]
    loader = [derive("train", 1234, epoch=2, kind=kind).seed for kind in ("order", "loader")]

    assert ranks == [1234, 1444415726, 691450759, 2642327485]
    assert loader == [426306760, 549255288]
