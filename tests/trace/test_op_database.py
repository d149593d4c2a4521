"""Every op that torch has samples of is the same in two recordings, whatever fresh memory holds."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

PARTS = 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_op_of_torch_is_a_false_alarm(
    fork_python: Callable[..., CompletedProcess[str]], part: int
) -> None:
    """Equal values in are equal values out: what an op leaves unwritten is not compared."""
    done = fork_python(Path(__file__).with_name("op_database.py"), part, PARTS)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the same: "), done.stdout
