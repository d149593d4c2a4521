"""The rig on which the real torch_npu runs without a device; see rig.py, which builds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ASKED_FOR = "TORCHREPRO_ASCEND_RIG"
TIMEOUT = 180
_FOREIGN = ("TORCHREPRO_", "PYTEST_", "HCCL_", "LCCL_", "ASCEND_", "TASK_QUEUE_", "COV_")
PRELUDE = """
import json, os, warnings
warnings.simplefilter("ignore")
import torch, torchrepro

def mark(name):
    "From here on the record belongs to `name`."
    if torch.npu.is_initialized():
        torch.npu.synchronize()
    for variable in ("CANN_STANDIN_RECORD", "CANN_STANDIN_VARIABLES"):
        with open(os.environ[variable], "a") as record:
            record.write(f"= {name}\\n")

def say(value):
    print("said", json.dumps(value), flush=True)
"""


@dataclass
class Ran:
    """How a program ended, what it said, and what reached CANN under each of its marks."""

    status: int
    stderr: str
    printed: list[str]
    said: list[object] = field(default_factory=list)
    calls: dict[str, list[str]] = field(default_factory=dict)
    """Each line is the device that was in use, the function, and its arguments."""

    variables: dict[str, set[str]] = field(default_factory=dict)
    """The environment variables that C code asked for."""


@dataclass(frozen=True)
class Rig:
    """The interpreter with torch_npu, and where to keep what a program leaves."""

    folder: Path
    place: Path

    def run(self, program: str, *, devices: int = 2, cann: str = "9.2.0", **variables: str) -> Ran:
        """Run `program` after `PRELUDE`; raises nothing if it fails."""
        python = self.folder / "venv/bin/python"
        return self.execute([python, "-c", PRELUDE + program], devices, cann, variables)

    def command(self, *words: str, devices: int = 2, cann: str = "9.2.0", **variables: str) -> Ran:
        """Run the console command ``torchrepro`` with `words`."""
        tool = self.folder / "venv/bin/torchrepro"
        return self.execute([tool, *words], devices, cann, variables)

    def execute(
        self, command: list[str | Path], devices: int, cann: str, variables: dict[str, str]
    ) -> Ran:
        """Run `command` with so many devices of this CANN and nothing exported but `variables`."""
        record, asked = self.place / "calls", self.place / "variables"
        for path in (record, asked):
            path.unlink(missing_ok=True)
        kept = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN)}
        stand_in = {
            "CANN_STANDIN_DEVICES": str(devices),
            "CANN_STANDIN_VERSION": cann,
            "CANN_STANDIN_RECORD": str(record),
            "CANN_STANDIN_VARIABLES": str(asked),
        }
        done = subprocess.run(
            [str(word) for word in command],
            env={**kept, **stand_in, **variables},
            cwd=self.place,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        lines = done.stdout.splitlines()
        return Ran(
            done.returncode,
            done.stderr,
            [line for line in lines if not line.startswith("Warning: ASCEND_HOME_PATH")],
            [json.loads(line.removeprefix("said ")) for line in lines if line.startswith("said ")],
            _by_mark(record),
            {mark: set(names) for mark, names in _by_mark(asked).items()},
        )

    @property
    def asking_recorded(self) -> dict[str, str]:
        """The variable under which every question for an environment variable is recorded."""
        library = next(
            self.folder.glob("venv/lib/python*/site-packages/torch_npu.libs/libgetenv.so")
        )
        return {"LD_PRELOAD": str(library)}


def _by_mark(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    mark = ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.startswith("= "):
            mark = line.removeprefix("= ")
        else:
            found.setdefault(mark, []).append(line)
    return found


@pytest.fixture(scope="session")
def rig_folder() -> Path:
    """Build the rig in the folder that was asked for, or skip."""
    folder = os.environ.get(ASKED_FOR)
    if not folder:
        pytest.skip(f"needs torch_npu on stand-ins for CANN: set {ASKED_FOR} to a folder for it")
    command = [sys.executable, str(Path(__file__).with_name("rig.py")), folder]
    subprocess.run(command, check=True, timeout=1200)
    return Path(folder).resolve()


@pytest.fixture
def rig(rig_folder: Path, tmp_path: Path) -> Rig:
    """Return the rig."""
    return Rig(rig_folder, tmp_path)
