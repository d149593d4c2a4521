"""What a run was: the resolved profile, its digest, the report, and the versions it ran on."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from torchrepro.errors import Problem, ProfileError
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.seeding import seed_plan
from torchrepro.seeding.calls import seeding_calls

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.profile.difference import Difference
    from torchrepro.profile.resolved import Resolved
    from torchrepro.report import Report

FORMAT = 1
PACKAGES = ("torchrepro", "torch", "torch_npu", "numpy", "hydra-core", "omegaconf", "pydantic")
RECORDED = tuple(
    sorted(
        {knob.name.removeprefix("env.") for knob in CATALOGUE if knob.name.startswith("env.")}
        | {"CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "WORLD_SIZE"}
    )
)
"""The variables that a manifest may record: those that steer numbers, and never another."""


def manifest(resolved: Resolved, report: Report) -> dict[str, Any]:
    """Return the manifest of a run under `resolved` as plain JSON values.

    What the run has done with random numbers so far is part of it: the streams it drew from and
    the places from which it seeded a generator itself.
    """
    return {
        "manifest": FORMAT,
        "profile": json.loads(json.dumps(dict(resolved.values), default=dict)),
        "digest": resolved.digest,
        "report": report.to_json(),
        "streams": list(seed_plan.drawn()),
        "seeding_calls": [asdict(call) for call in seeding_calls()],
        "versions": versions(),
        "machine": {"system": platform.platform(), "processor": platform.machine()},
        "devices": _devices(),
        "environment": {name: os.environ[name] for name in RECORDED if name in os.environ},
    }


def write_manifest(path: Path, resolved: Resolved, report: Report) -> None:
    """Write the manifest to `path`, whose folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(manifest(resolved, report), indent=2, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a profile's effect depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _devices() -> dict[str, Any]:
    """Return what torch was built for and the devices in use, without initialising one."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    devices: dict[str, Any] = {"cuda_build": torch.version.cuda}
    if torch.cuda.is_initialized():
        devices["cuda"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
    return devices


def differing_seeding_calls(left: Path, right: Path) -> list[Difference]:
    """Return the seeding calls of the programs themselves in which two manifests differ.

    Raises `ProfileError` for a file that is no manifest.
    """
    from torchrepro.profile.difference import Difference

    one, two = _seeding_calls(left), _seeding_calls(right)
    return [
        Difference(key, one.get(key), two.get(key))
        for key in sorted({*one, *two})
        if one.get(key) != two.get(key)
    ]


def _seeding_calls(path: Path) -> dict[str, str]:
    """Return the seed of every seeding call in a manifest, by function and line."""
    calls = _content(path).get("seeding_calls", [])
    return {f"{call['function']} at {call['where']}": call["value"] for call in calls}


def read_manifest(path: Path) -> Resolved:
    """Return the resolved profile that the manifest in the file `path` holds.

    Raises `ProfileError` for a file that is no manifest.
    """
    from torchrepro.profile.compose import compose_document
    from torchrepro.profile.document import Document
    from torchrepro.profile.load import validate

    values = _content(path).get("profile")
    if not isinstance(values, dict):
        raise ProfileError(Problem("not a manifest: it holds no `profile`", str(path)))
    return validate(compose_document(Document(str(path), values))).resolved


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(Problem(f"cannot be read: {error.strerror}", str(path))) from None
    except ValueError as error:
        raise ProfileError(Problem(f"not JSON: {error}", str(path))) from None
    return content if isinstance(content, dict) else {}
