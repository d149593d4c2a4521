"""The documentation, built once."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from .blocks import REPO

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def documentation(tmp_path_factory):
    """Build the documentation, which has to give no warning, and return the folder of its pages."""
    folder: Path = tmp_path_factory.mktemp("documentation")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q"),
            *("-d", folder / "doctrees", REPO / "docs", folder / "html"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"
