"""Find out why a profile would have no effect on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torchrepro.application.planner import Plan, make_plan
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.torch_state import cann_too_old, compiled_ops_blocked
from torchrepro.knobs.variables import VARIABLES_FOR_ORDER_OF_SUMS, WITHOUT_EFFECT
from torchrepro.profile.resolved import ResolvedProfile, flatten
from torchrepro.reporting.outcomes import Outcome
from torchrepro.reporting.process_state import closed_latches, untested_torch
from torchrepro.reporting.report import absent_lines


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or a fact that the user should know."""

    what: str
    to_do: str = ""
    serious: bool = True  # True if it makes the profile ineffective


def examine(resolved: ResolvedProfile) -> list[Finding]:
    """Return the problems of the profile `resolved` on this machine; imports torch."""
    closed = closed_latches()
    try:
        torch = import_module("torch")
    except ImportError as error:
        return [Finding(f"torch cannot be imported: {error}", "install torch")]
    except RuntimeError as error:
        words = str(error).partition("\n")[0]
        todo = "repair that backend (for torch_npu: source CANN's set_env.sh), or export "
        todo += "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run without it"
        return [Finding(f"torch cannot be imported: {words}", todo)]
    return list(_findings(resolved, make_plan(resolved, closed), torch))


def _findings(resolved: ResolvedProfile, plan: Plan, torch: Any) -> Iterator[Finding]:
    wanted, report = flatten(resolved.values), plan.report
    for outcome in (Outcome.CONFLICT, Outcome.INEFFECTIVE):
        for row in report.having(outcome):
            yield Finding(f"{row.knob}: {row.why}")
    for knob in CATALOGUE:
        name = knob.name.removeprefix("env.")
        value = os.environ.get(name) if name != knob.name else None
        if value is not None and (complaint := knob.legal.complaint(value)):
            todo = f"unset it, or export one of {knob.legal.words}"
            yield Finding(f"{name}={value} is exported: {complaint}", todo)
    for step in plan.steps:
        if step.knob.warn_if_unsupported and step.expected.outcome is Outcome.UNSUPPORTED:
            yield Finding(f"{step.knob.name}: {step.expected.why}")
    algorithms = wanted.get("backends.torch.deterministic_algorithms")
    workspace = "CUBLAS_WORKSPACE_CONFIG"
    fixed = wanted.get(f"env.{workspace}") is not None or workspace in os.environ
    if torch.version.cuda and algorithms == "error" and not fixed:
        yield Finding(
            "deterministic algorithms without a fixed cuBLAS workspace: torch raises at the "
            "first matrix product on a GPU",
            'set env.CUBLAS_WORKSPACE_CONFIG to ":4096:8"',
        )
    strict = resolved.strict and torch.distributed.is_available()
    for backend, variables in VARIABLES_FOR_ORDER_OF_SUMS.items():
        missing = [
            name
            for name in variables
            if wanted.get(f"env.{name}") is None and name not in os.environ
        ]
        if strict and missing and torch.distributed.is_backend_available(backend):
            yield Finding(
                f"the order of sums in collectives of {backend} is not fixed: "
                f"{', '.join(missing)} is not set",
                f"set env.{missing[0]}, as debug-strict does",
                serious=False,
            )
    if "torch_npu" in sys.modules:
        yield from _npu_findings(resolved.guarantee, wanted, plan, torch.npu)
    spec = find_spec("hydra_plugins")
    if spec is not None and spec.origin:
        yield Finding(
            f"{spec.origin} makes hydra_plugins an ordinary package, so Hydra finds no plugins of "
            "other packages: `+repro=` would set a plain string",
            "remove that __init__.py",
        )
    elif find_spec("hydra_plugins.torchrepro") is None:
        problem = "Hydra cannot find the plugin of torchrepro: `+repro=` would set a plain string"
        yield Finding(problem, "install torchrepro again")
    if untested := untested_torch():
        yield Finding(untested, "torchrepro selftest tests each setting with it", serious=False)
    if wanted.get("seed") is None:
        yield Finding("no seed: every run draws different random numbers", "set `seed`")
    for name, why in WITHOUT_EFFECT.items():
        if name in os.environ:
            yield Finding(f"{name} is exported and does nothing: {why}", serious=False)
    if plan.late:
        late = ", ".join(step.knob.name for step in plan.late)
        yield Finding(
            f"takes effect only if set before Python starts: {late}",
            f"start programs with `torchrepro run {resolved.name} -- ...`",
            serious=False,
        )
    unsupported = [row.knob for row in report.having(Outcome.UNSUPPORTED) if not row.absent]
    known = [name for name in unsupported if "." in name and not name.startswith("device.")]
    if known:
        yield Finding(f"missing in this process, so not set: {', '.join(known)}", serious=False)
    for line in absent_lines(report):
        yield Finding(line, serious=False)


def _npu_findings(
    guarantee: str, wanted: Mapping[str, Any], plan: Plan, npu: Any
) -> Iterator[Finding]:
    if not npu.is_available():
        problem = "torch_npu finds no NPU: reading the seed or the state of an NPU raises"
        yield Finding(problem, serious=False)
        # Matters only for jobs on other machines with this software.
        why = cann_too_old() or compiled_ops_blocked({s.knob.name: s.value for s in plan.steps})
        algorithms = wanted.get("backends.torch.deterministic_algorithms")
        if why and algorithms in ("error", "warn"):
            yield Finding(why)
    if guarantee == "aligned" and wanted.get("backends.npu.conv_allow_hf32") is None:
        yield Finding(
            "convolutions on the NPU use HF32 by default",
            "set backends.npu.conv_allow_hf32 to false",
        )
    if hasattr(npu, "_DeferredNpuCallError") and not hasattr(npu, "DeferredNpuCallError"):
        yield Finding(
            "if a seed or state set before the first use of an NPU is out of range, this torch_npu "
            "raises a NameError at every later use, even if the program catches the first error",
            "seed with 0 to 2**64 - 1",
            serious=False,
        )
    if "torch_npu.contrib.transfer_to_npu" in sys.modules:
        yield Finding(
            "transfer_to_npu is active: code that requests CUDA gets an NPU", serious=False
        )
