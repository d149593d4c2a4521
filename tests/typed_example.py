"""The digits example as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DIGITS = Path(__file__).parent.parent / "examples" / "digits.py"
IN_FORCE_FROM_THE_START = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}
"""What its profile would start a run anew for."""


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Train in `folder`; the profile starts the run anew for what is not in force."""
    hidden = {"PYTEST_VERSION", *IN_FORCE_FROM_THE_START}
    return subprocess.run(
        [sys.executable, str(DIGITS), *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
