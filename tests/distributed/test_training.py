"""The example on two ranks: repeatable, and resumed after a rank was killed."""

import signal
from functools import partial

import pytest

from ..typed_example import IN_FORCE_FROM_THE_START

KILLED_AFTER = 7
"""The step that the first run is killed after, of 22."""

LOSING_A_RANK = """
import os, runpy, signal, sys
import torchrepro

save = torchrepro.Checkpoint.save

def saves_and_is_killed(checkpoint, every=1):
    save(checkpoint, every)
    if os.environ["RANK"] == "1" and checkpoint.step == KILLED_AFTER:
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

torchrepro.Checkpoint.save = saves_and_is_killed
sys.path.insert(0, os.path.dirname(EXAMPLE))
runpy.run_path(EXAMPLE, run_name="__main__")
"""
"""The example, one of whose ranks is killed right after it has saved a step."""


WORDS = ("+repro=debug-strict", "repro.ranks=distinct", "batch_size=64", "epochs=2")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_run_that_lost_a_rank_goes_on_where_it_was(
    on_two_ranks, by_torchrun, distributed_digits, tmp_path, parallel
):
    """After SIGKILL of one rank, resuming ends with the weights of the uninterrupted run.

    Ranks draw differently, and two runs under one profile agree, bit for bit. So it is where
    torchrun started the run that was lost, and another launcher the others.
    """
    in_forks = partial(on_two_ranks, env=IN_FORCE_FROM_THE_START)
    first = by_torchrun if parallel == "ddp" else in_forks
    words = (*WORDS, f"parallel={parallel}")
    kept = ("checkpoint=kept", "checkpoint_every=1")
    whole = in_forks(distributed_digits, *words)

    losing = LOSING_A_RANK.replace("EXAMPLE", repr(str(distributed_digits)))
    interrupted = first(losing.replace("KILLED_AFTER", str(KILLED_AFTER)), *words, *kept)
    interrupted_at = sorted((tmp_path / "kept").iterdir())[-1].name
    resumed = in_forks(distributed_digits, *words, *kept)

    assert whole.returncode == resumed.returncode == 0, whole.stderr + resumed.stderr
    assert interrupted.returncode != 0
    assert "killed" in interrupted.stdout, interrupted.stderr
    assert first is in_forks or f"Signal {signal.SIGKILL:d}" in interrupted.stderr
    assert "step-000000007" <= interrupted_at < "step-000000022"
    assert resumed.stdout == whole.stdout
    assert whole.stdout.startswith("weights ")
