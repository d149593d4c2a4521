"""Write a small program and a profile of the reader's own, to try torchrepro on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from shutil import which

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem

PROGRAM = '''\
"""Fit a small network to made-up points. Nothing is seeded, so no two runs are the same."""

import torch

STEPS = 20

points = torch.rand(256, 2) * 2 - 1
labels = (points.norm(dim=1, keepdim=True) < 0.8).float()

model = torch.nn.Sequential(
    torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for step in range(STEPS):
    chosen = torch.randint(len(points), (64,))
    predicted = model(points[chosen])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(predicted, labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

print(f"loss after {STEPS} steps: {loss.item():.6f}")
'''
PROFILE = """\
# The profile of this project: what its runs need so that two of them are the same.
# `torchrepro show conf/repro/mine.yaml --origin` says what each value is and where it is set.
# A Hydra app whose config_path is conf takes it by its name: python app.py +repro=mine
defaults: [debug-strict, _self_] # begin with the strictest profile
schema: 1
name: mine
description: The same bits in every run on one machine.
guarantee: repeatable
seed: 42
"""
FILES = {"train.py": PROGRAM, "conf/repro/mine.yaml": PROFILE}


@dataclass(frozen=True, slots=True)
class NextCommand:
    """A command line that works in the folder from which the quickstart was asked for."""

    line: str
    what: str


@dataclass(frozen=True, slots=True)
class Quickstart:
    """What was written, and what to do with it."""

    files: tuple[Path, ...]
    next: tuple[NextCommand, ...]


def write_quickstart(folder: Path) -> Quickstart:
    """Write the program and the profile into `folder`, which is made if it is not there.

    Raises `ProfileError`, and writes nothing, if one of the files exists or cannot be written.
    """
    places = {folder / name: text for name, text in FILES.items()}
    existing = [place for place in places if place.is_symlink() or place.exists()]
    if existing:
        raise ProfileError(
            [
                Problem(
                    "exists already, and nothing is overwritten",
                    found=str(place),
                    todo="name another folder: torchrepro quickstart DIR",
                )
                for place in existing
            ]
        )
    written: list[Path] = []
    try:
        for place, text in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("x", encoding="utf-8") as file:
                written.append(place)
                file.write(text)
    except OSError as error:
        for place in written:
            place.unlink(missing_ok=True)
        raise ProfileError(
            Problem(
                f"cannot be written: {error.strerror}",
                found=str(error.filename or folder),
                todo="name another folder: torchrepro quickstart DIR",
            )
        ) from None
    program, profile = places
    command = ["--", _python(), str(program)]
    return Quickstart(
        tuple(places),
        (
            NextCommand(
                join(["torchrepro", "verify", *command]),
                "two runs as the program is: they diverge, and you see at which line",
            ),
            NextCommand(
                join(["torchrepro", "verify", str(profile), *command]),
                "two runs under your profile: the same, bit for bit",
            ),
            NextCommand(
                join(["torchrepro", "run", str(profile), *command]),
                "one run under your profile, as from now on",
            ),
        ),
    )


def _python() -> str:
    """Return how a shell calls the Python in which torchrepro is installed."""
    found = which("python")
    here = found is not None and Path(found).parent == Path(sys.executable).parent
    return "python" if here else sys.executable
