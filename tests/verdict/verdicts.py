"""Handwritten verdicts, for tests of rendering."""

from dataclasses import replace
from typing import Any

from torchrepro.verdict.value import (
    Advice,
    Cell,
    Compared,
    Distance,
    Divergence,
    Edit,
    Element,
    Kind,
    RunAtDivergence,
    RunFacts,
    Setting,
    Verdict,
)

MODULES = ("embed", *(f"layers.{n}.{part}" for n in range(4) for part in ("attn", "mlp")), "head")


def side(**values: Any) -> RunAtDivergence:
    """Return one run's record of an op."""
    usual = {
        "run": "runs/a",
        "source": "train.py:41",
        "outputs": "float32[16, 128, 1024]",
        "argument": "",
        "input_fingerprints": ("9f0b64a1c2d3e4f5",),
        "output_fingerprints": ("3f1c0000aaaabbbb3f1c0000aaaabbbb",),
    }
    return RunAtDivergence(**{**usual, **values})


def divergence(op: str = "aten::gelu", kind: Kind = Kind.OUTPUTS, **values: Any) -> Divergence:
    """Return a divergence: `op` at step 7 in layers.2.mlp."""
    other = ("9a020000ccccdddd9a020000ccccdddd",)
    usual = {
        "rank": 0,
        "step": 7,
        "phase": "forward",
        "module": "layers.2.mlp",
        "op": op,
        "source": "train.py:41",
        "kind": kind,
        "thread": "MainThread",
        "left": side(),
        "right": side(run="runs/b", output_fingerprints=other),
    }
    return Divergence(**{**usual, **values})


def unequal(first: Divergence | None = None, **values: Any) -> Verdict:
    """Return the verdict on two runs of 12 steps that diverge at step 7."""
    found = first or replace(
        divergence(),
        elements=(Element("output 0", (0, 3, 17), "0.12345678", "0.12345679", 1),),
        distances=(Distance("output 0", 1.2e-7, 3.1e-6, 0.99999999, 14, 3, 2_097_152),),
        what="Both runs gave it the same tensor.",
    )
    usual = {
        "same": False,
        "left": "runs/a",
        "right": "runs/b",
        "compared": Compared(1, 12, 11436, 14160000000, "op"),
        "first": found,
        "propagated": 1204,
        "independent": 0,
        "by_module": (("layers.2.mlp", 210), ("layers.3.attn", 400), ("head", 12)),
        "map": agreement(MODULES, 12, 7, 5),
        "losses": losses(12, 7),
        "settings": (
            Setting("env.OMP_NUM_THREADS", "2", "4"),
            Setting("version of torch", "2.6.0", "2.13.0"),
        ),
        "notes": ("B was killed in step 12.",),
        "about": (facts(), facts(date="2026-11-21T08:05:00+00:00", torch="2.6.0")),
        "advice": Advice(
            "aten::gelu gave two results.",
            Edit("train.py:41", "loss = net(empty(3))", "loss = net(zeros(3))"),
            closer="torchrepro run p --record runs/a-closer --steps 6:8 -- python train.py",
            cause_id="summation-order",
        ),
    }
    return Verdict(**{**usual, **values})


def equal(**values: Any) -> Verdict:
    """Return the verdict on two runs that are the same."""
    usual = {
        "same": True,
        "left": "runs/a",
        "right": "runs/b",
        "compared": Compared(2, 100, 95300, 118000000000, "op"),
        "map": agreement(MODULES, 100, 1000, 0),
        "losses": losses(100, 1000),
        "about": (facts(), facts(date="2026-11-21T08:05:00+00:00")),
    }
    return Verdict(**{**usual, **values})


def facts(**values: Any) -> RunFacts:
    """Return the facts about the recording of a run."""
    usual = {
        "date": "2026-11-20T08:05:00+00:00",
        "host": "node-3",
        "torch": "2.13.0",
        "commit": "0123456789ab, 2 files changed",
        "profile": "debug-strict (repeatable)",
    }
    return RunFacts(**{**usual, **values})


def agreement(modules: tuple[str, ...], steps: int, step: int, module: int) -> tuple[Cell, ...]:
    """Return a map: modules from `module` on differ in `step`, all modules in later steps."""
    return tuple(
        Cell(at, name, 20 - bad, bad)
        for at in range(steps)
        for position, name in enumerate(modules)
        for bad in [0 if at < step or (at == step and position < module) else 8]
    )


def losses(steps: int, step: int) -> tuple[tuple[int, float | None, float | None], ...]:
    """Return losses that are equal before `step` and diverge from then on."""
    found = []
    for at in range(steps):
        loss = 2.3 * 0.97**at
        found.append((at, loss, loss + max(0, at - step) * 0.02))
    return tuple(found)
