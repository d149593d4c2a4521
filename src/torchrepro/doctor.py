"""What on this machine would make a profile ineffective, in plain words."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.torch_state import cann_too_old, compiled_ops_blocked
from torchrepro.knobs.variables import ORDER_OF_SUMS, WITHOUT_EFFECT
from torchrepro.outcomes import Outcome
from torchrepro.planner import Plan, make_plan
from torchrepro.process_state import closed_doors
from torchrepro.profile.resolved import flatten
from torchrepro.profile.search_path import SHIPPED
from torchrepro.report import absent_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrepro.profile.resolved import ResolvedProfile


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a reader should know."""

    what: str
    todo: str = ""
    serious: bool = True
    """Whether it makes the profile ineffective; otherwise it is worth knowing."""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON values."""
        return {"what": self.what, "to_do": self.todo, "serious": self.serious}


class _Context(NamedTuple):
    """The profile and the process that are examined."""

    resolved: ResolvedProfile
    plan: Plan
    torch: Any

    def wants(self, key: str, *values: Any) -> bool:
        """Whether the profile sets `key`, to one of `values` if any are given."""
        value = flatten(self.resolved.values).get(key)
        return value in values if values else value is not None


def examine(resolved: ResolvedProfile) -> list[Finding]:
    """Return what would make `resolved` ineffective here; imports torch, changes nothing else."""
    closed = closed_doors()
    try:
        torch = import_module("torch")
    except ImportError as error:
        return [Finding(f"torch cannot be imported: {error}", "install torch")]
    except RuntimeError as error:
        words = str(error).partition("\n")[0]
        todo = "repair that back end (for torch_npu: source CANN's set_env.sh), or export "
        todo += "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to go on without it"
        return [Finding(f"torch cannot be imported: {words}", todo)]
    context = _Context(resolved, make_plan(resolved, closed), torch)
    return [finding for check in CHECKS for finding in check(context)]


def _exported_values(context: _Context) -> Iterator[Finding]:
    for knob in CATALOGUE:
        name = knob.name.removeprefix("env.")
        value = os.environ.get(name) if name != knob.name else None
        complaint = knob.legal.complaint(value) if value is not None else ""
        if complaint:
            yield Finding(
                f"{name}={value} is exported: {complaint}",
                f"unset it, or export one of {knob.legal.words}",
            )


def _exported_without_effect(context: _Context) -> Iterator[Finding]:
    for name, why in WITHOUT_EFFECT.items():
        if name in os.environ:
            yield Finding(f"{name} is exported and does nothing: {why}", serious=False)


def _not_in_force(context: _Context) -> Iterator[Finding]:
    for outcome in (Outcome.CONFLICT, Outcome.INEFFECTIVE):
        for row in context.plan.report.having(outcome):
            yield Finding(f"{row.knob}: {row.why}")


def _too_late(context: _Context) -> Iterator[Finding]:
    late = [row.knob for row in context.plan.late]
    if late:
        yield Finding(
            f"takes effect only before Python starts: {', '.join(late)}",
            f"start programs with `torchrepro run {context.resolved.name} -- ...`",
            serious=False,
        )


def _not_acted_on(context: _Context) -> Iterator[Finding]:
    for step in context.plan.steps:
        if step.knob.warn_if_unsupported and step.expected.outcome is Outcome.UNSUPPORTED:
            yield Finding(f"{step.knob.name}: {step.expected.why}")


def _absent(context: _Context) -> Iterator[Finding]:
    report = context.plan.report
    missing = [row for row in report.having(Outcome.UNSUPPORTED) if not row.absent]
    known = [row.knob for row in missing if "." in row.knob and not row.knob.startswith("device.")]
    if known:
        yield Finding(f"not in this process, so not set: {', '.join(known)}", serious=False)
    for line in absent_lines(report):
        yield Finding(line, serious=False)


def _without_seed(context: _Context) -> Iterator[Finding]:
    if not context.wants("seed"):
        yield Finding("no seed: every run draws other random numbers", "set `seed`")


def _cublas(context: _Context) -> Iterator[Finding]:
    algorithms = context.wants("backends.torch.deterministic_algorithms", "error")
    workspace = context.wants("env.CUBLAS_WORKSPACE_CONFIG")
    exported = "CUBLAS_WORKSPACE_CONFIG" in os.environ
    if context.torch.version.cuda and algorithms and not workspace and not exported:
        yield Finding(
            "deterministic algorithms without a fixed cuBLAS workspace: torch raises at the "
            "first matrix product on a GPU",
            'set env.CUBLAS_WORKSPACE_CONFIG to ":4096:8"',
        )


def _collectives(context: _Context) -> Iterator[Finding]:
    distributed = context.torch.distributed
    if not context.resolved.strict or not distributed.is_available():
        return
    for backend, variables in ORDER_OF_SUMS.items():
        left = [
            name for name in variables if not (context.wants(f"env.{name}") or name in os.environ)
        ]
        if left and distributed.is_backend_available(backend):
            yield Finding(
                f"collectives of {backend} add up in an order of their own: nothing sets "
                f"{', '.join(left)}",
                f"set env.{left[0]}, as debug-strict does",
                serious=False,
            )


def _hydra_plugin(context: _Context) -> Iterator[Finding]:
    spec = find_spec("hydra_plugins")
    shadow = spec.origin if spec else None
    if shadow:
        yield Finding(
            f"{shadow} makes hydra_plugins an ordinary package, so Hydra finds no plugin of "
            "another one: `+repro=` would set a plain string",
            "remove that __init__.py",
        )
    elif find_spec("hydra_plugins.torchrepro") is None:
        yield Finding(
            "Hydra cannot find torchrepro's plugin: `+repro=` would set a plain string",
            "install torchrepro again",
        )
    if not (SHIPPED / "debug-strict.yaml").is_file():
        yield Finding(
            f"the shipped profiles are missing from {SHIPPED}", "install torchrepro again"
        )


def _npu(context: _Context) -> Iterator[Finding]:
    if "torch_npu" not in sys.modules:
        return
    npu = context.torch.npu
    if not npu.is_available():
        yield Finding(
            "torch_npu finds no NPU: to ask one for its seed or its state raises",
            serious=False,
        )
        # For jobs on other machines with this software: no knob here is affected by it.
        wanted = {step.knob.name: step.value for step in context.plan.steps}
        why = cann_too_old() or compiled_ops_blocked(wanted)
        if why and context.wants("backends.torch.deterministic_algorithms", "error", "warn"):
            yield Finding(why)
    if context.resolved.guarantee == "aligned" and not context.wants(
        "backends.npu.conv_allow_hf32"
    ):
        yield Finding(
            "convolutions use HF32 on the NPU unless they are told not to",
            "set backends.npu.conv_allow_hf32 to false",
        )
    if hasattr(npu, "_DeferredNpuCallError") and not hasattr(npu, "DeferredNpuCallError"):
        yield Finding(
            "this torch_npu ends every later use of an NPU with a NameError if a seed or a state "
            "given before the first use is out of range, even where the program caught the error",
            "seed with 0 to 2**64 - 1",
            serious=False,
        )
    if "torch_npu.contrib.transfer_to_npu" in sys.modules:
        yield Finding("transfer_to_npu is active: what asks for CUDA gets an NPU", serious=False)


CHECKS: tuple[Callable[[_Context], Iterator[Finding]], ...] = (
    _not_in_force,
    _exported_values,
    _not_acted_on,
    _cublas,
    _collectives,
    _npu,
    _hydra_plugin,
    _without_seed,
    _exported_without_effect,
    _too_late,
    _absent,
)
