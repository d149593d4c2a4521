"""The ladder: stricter and stricter profiles, to find out which of them makes two runs equal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.profile.composition import flatten
from torchrepro.verdict.cause import ANY_VALUE, Fix
from torchrepro.verdict.causes import accelerator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrepro.verdict.value import Divergence

NO_EFFECT = "null"
"""What a trace has for a knob that was asked for and does not exist where it was recorded."""

_NOT_IN_A_KEY = re.compile(r"[^A-Za-z0-9_.-]")
"""What Hydra's grammar does not take in the key of a mapping."""

_MISREAD = re.compile(r".*_|true|false|null|nan|inf|.*\de[0-9-]+", re.IGNORECASE)
"""Keys that are taken for another value, or for an instruction such as ``_target_``."""


@dataclass(frozen=True, slots=True)
class Step:
    """A row of the ladder."""

    name: str
    values: tuple[Fix, ...]
    why: str
    """What it means if this makes the runs equal."""

    of_accelerator: bool = False
    """Whether it acts only where a device besides the CPU computes."""

    of_module: bool = False
    """Whether its key is a module, that of the divergence."""


@dataclass(frozen=True, slots=True)
class Rung:
    """What to add to a profile."""

    name: str
    overrides: tuple[str, ...]
    """Those of this rung and of all below it that are not in force yet."""

    why: str


LADDER: tuple[Step, ...] = (
    Step(
        "seeds",
        (
            Fix("seed", "1234", ANY_VALUE),
            Fix("dataloader.seeding", "auto"),
            Fix("env.PYTHONHASHSEED", "0", ANY_VALUE),
        ),
        "random numbers differed: something was not seeded",
    ),
    Step(
        "deterministic kernels",
        (
            Fix("backends.torch.deterministic_algorithms", "error"),
            Fix("backends.torch.fill_uninitialized_memory", "true"),
            Fix("backends.torch.inductor_deterministic", "true"),
            Fix("backends.cudnn.benchmark", "false"),
            Fix("backends.cudnn.deterministic", "true"),
            Fix("backends.cpu.mkldnn_deterministic", "true"),
            Fix("env.CUBLAS_WORKSPACE_CONFIG", ":4096:8", (":16:8",)),
            Fix("env.NCCL_ALGO", "Ring", ANY_VALUE),
            Fix("env.NCCL_PROTO", "Simple", ANY_VALUE),
            Fix("env.HCCL_DETERMINISTIC", '"true"', ("true", "strict")),
            # An op that raises would end the climb, and one that did not raise needs no other way.
            Fix("device.fallback", "cpu", ("error",)),
        ),
        "a kernel added up in varying order",
    ),
    Step(
        "no loader workers",
        (Fix("dataloader.num_workers", "0"),),
        "the loader's workers gave other data",
    ),
    Step(
        "no dropout",
        (Fix("dropout", "zero"),),
        "dropout drew other masks",
    ),
    Step(
        "random numbers from the host",
        (Fix("device.rng", "host"),),
        "the device's own generator gave other numbers",
        of_accelerator=True,
    ),
    Step(
        "the suspect module on the CPU",
        (Fix("device.modules", "cpu"),),
        "the device computes that module in varying order",
        of_accelerator=True,
        of_module=True,
    ),
)


def next_rung(
    profile_values: Mapping[str, Any], divergence: Divergence | None = None, accelerator: str = ""
) -> Rung | None:
    """Return the first rung that a profile is not on yet; None at the top.

    `profile_values` are those of a resolved profile; `accelerator` is the type of device that
    computes besides the CPU, or empty.
    """
    return next(rungs(profile_values, divergence, accelerator), None)


def rung_above_recording(
    meta: Mapping[str, Any], divergence: Divergence | None = None
) -> Rung | None:
    """Return the first rung that a recorded run was not on yet, by what its trace says of it."""
    return next_rung(_in_force(meta.get("knobs") or {}), divergence, accelerator(meta))


def _in_force(knobs: Mapping[str, str]) -> Mapping[str, str]:
    """Return the values of a profile by the text of its knobs, one of those that a key sets."""
    found: dict[str, str] = {}
    for knob in CATALOGUE:
        text = knobs.get(knob.name)
        if text is not None and found.get(knob.profile_key, NO_EFFECT) == NO_EFFECT:
            found[knob.profile_key] = text
    return found


def rungs(
    profile_values: Mapping[str, Any], divergence: Divergence | None = None, accelerator: str = ""
) -> Iterator[Rung]:
    """Yield the rungs above a profile from the lowest, each with the overrides of those below."""
    given = flatten(profile_values)
    climbed: tuple[str, ...] = ()
    for step in LADDER:
        missing = _overrides(step, given, divergence) if _helps(step, accelerator) else ()
        if missing:
            climbed += missing
            yield Rung(step.name, climbed, step.why)


def _helps(step: Step, accelerator: str) -> bool:
    return bool(accelerator) or not step.of_accelerator


def _overrides(
    step: Step, given: Mapping[str, Any], divergence: Divergence | None
) -> tuple[str, ...]:
    if step.of_module:
        return _of_module(step.values[0], given, divergence)
    return tuple(f"{each.key}={each.value}" for each in step.values if not _holds(each, given))


def _of_module(
    value: Fix, given: Mapping[str, Any], divergence: Divergence | None
) -> tuple[str, ...]:
    module = divergence.module if divergence else ""
    if not _can_be_placed(module) or _pattern(module) in (given.get(value.key) or {}):
        return ()
    return (f"{value.key}={{{_pattern(module)}: {value.value}}}",)


def _pattern(module: str) -> str:
    """Return `module` as a key of `device.modules`, a pattern in which ? is any letter."""
    key = _NOT_IN_A_KEY.sub("?", module)
    return f"{key[:-1]}?" if _MISREAD.fullmatch(key) else key


def _can_be_placed(module: str) -> bool:
    """Whether `module` is a path within a model; a model as a whole goes by its class."""
    return bool(module) and ("." in module or not module[:1].isupper())


def _holds(each: Fix, given: Mapping[str, Any]) -> bool:
    value = given.get(each.key)
    if value is None:
        return False
    if isinstance(value, Mapping):
        return True  # decided op by op: whoever wrote that has decided
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return each.is_met_by(text, NO_EFFECT)
