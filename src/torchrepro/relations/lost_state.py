"""What of its state a resumed run does not have again, from what both runs have noted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.relations.observations import noted
from torchrepro.relations.related import NotRestored
from torchrepro.verdict.render import short

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.relations.experiment import Experiment
    from torchrepro.verification.result import Run


@dataclass(frozen=True, slots=True)
class State:
    """What the process of a run that made most steps has noted."""

    steps: Sequence[Mapping[str, Any]]
    saves: Sequence[Mapping[str, Any]]
    """The checkpoints, each with the number of steps after which it was written."""
    killed: int
    """After how many steps it was killed; 0 if it was not."""

    @classmethod
    def of(cls, experiment: Experiment, run: Run) -> State:
        """Return what the processes of `run` have noted."""
        every = list(noted(experiment.observed(run.name)))
        steps = max(([n for n in notes if "step" in n] for notes in every), key=len, default=[])
        rest = [note for notes in every for note in notes]
        return cls(
            steps,
            [note for note in rest if "saved" in note],
            max((note["killed"] for note in rest if "killed" in note), default=0),
        )

    def batches(self, step: int) -> list[str]:
        """Return the digests of the batches of a step."""
        return [digest for *_, digest in self.steps[step]["batches"]]


def began_anew(whole: State, resumed: State) -> bool:
    """Whether the resumed run is the whole one again, from its first step on."""
    return (
        len(resumed.steps) == len(whole.steps)
        and resumed.steps[0]["parameters"] == whole.steps[0]["parameters"]
        and resumed.batches(0) == whole.batches(0)
    )


def step_restored(whole: State, resumed: State, written: int) -> int:
    """Return the step of the whole run with which the resumed one begins.

    It is the one before which most parameters are those of the resumed run; of several the nearest
    to the step after which the checkpoint was written, and that one where none is. Parameters as
    the whole run began with them are not restored.
    """
    own, first = resumed.steps[0]["parameters"], whole.steps[0]["parameters"]
    alike = [
        sum(
            own.get(name) == digest != first.get(name)
            for name, digest in step["parameters"].items()
        )
        for step in whole.steps
    ]
    most = max(alike, default=0)
    if not most:
        return min(written, len(whole.steps) - 1)
    best = [number for number, count in enumerate(alike) if count == most]
    return min(best, key=lambda number: abs(number - written))


def not_restored(whole: State, resumed: State, begins: int) -> tuple[NotRestored, ...]:
    """Return what the first step of the resumed run did not begin with, by the whole run's."""
    return tuple(_lost(whole, resumed, begins))


def _lost(whole: State, resumed: State, begins: int) -> Iterator[NotRestored]:
    left, right = whole.steps[begins], resumed.steps[0]
    for kind in ("parameter", "buffer"):
        mine, its = left[f"{kind}s"], right[f"{kind}s"]
        for name in _unequal(mine, its):
            yield NotRestored(kind, name)
    schedulers = _unequal(left["scheduler"], right["scheduler"])
    yield from _lost_of_optimizer(
        left["optimizer"], right["optimizer"], has_lost_scheduler=bool(schedulers)
    )
    for kind, names in (
        ("scheduler", schedulers),
        ("scaler", _unequal(left["scaler"], right["scaler"])),
    ):
        for name in names:
            yield NotRestored(kind, name, f"{left[kind][name]} became {right[kind][name]}")
    lost = [
        name
        for name, seen in left["generators"].items()
        if any(name in step["drew"] for step in whole.steps[begins:])
        and set(seen).isdisjoint(right["generators"].get(name, ()))
    ]
    for name in lost:
        yield NotRestored("generator", name)
    yield from _lost_of_loaders(left, right, whole, has_lost_generator=bool(lost))


def _unequal(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    return [name for name in left if name in right and left[name] != right[name]]


def _lost_of_optimizer(
    left: Mapping[str, str], right: Mapping[str, str], *, has_lost_scheduler: bool
) -> Iterator[NotRestored]:
    names = [name for name in left if left[name] != right.get(name)]
    by_key: dict[str, list[str]] = {}
    for name in names:
        key, _, of = name.partition(" of ")
        if not (has_lost_scheduler and of.startswith("group ")):  # it sets them in every step
            by_key.setdefault(key, []).append(of)
    for key, its in by_key.items():
        more = f" and {len(its) - 2} more" if len(its) > 2 else ""  # noqa: PLR2004
        yield NotRestored("optimizer", key, f"of {', '.join(its[:2])}{more}")


def _lost_of_loaders(
    left: Mapping[str, Any], right: Mapping[str, Any], whole: State, *, has_lost_generator: bool
) -> Iterator[NotRestored]:
    mine, its = left["batches"], right["batches"]
    its = its[-len(mine) :] if mine else []
    digests = [[digest for *_, digest in side] for side in (mine, its)]
    if not mine or digests[0] == digests[1]:
        return
    samplers = _unequal(left["sampler"], right["sampler"])
    for name in samplers:
        what = f"epoch {left['sampler'][name]} became {right['sampler'][name]}"
        yield NotRestored("sampler", name, what)
    if not its:
        yield NotRestored("loader", short(mine[0][0]), "it gave no batch")
        return
    where, _, position, _ = mine[-1]
    _, _, other, digest = its[-1]
    at = [each[2] for step in whole.steps for each in step["batches"] if each[3] == digest]
    moved = position != other
    if moved or not (samplers or has_lost_generator):
        what = f"batch {position} of its epoch became batch {at[0] if at else other}"
        yield NotRestored("loader", short(where), what)
