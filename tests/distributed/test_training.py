"""The example on two ranks: repeatable, and resumed after a rank was killed."""

import signal

import pytest

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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_training_by_torchrun_is_repeatable(by_torchrun, distributed_digits, parallel):
    """Under one profile two runs on two ranks end with the same weights, bit for bit."""
    words = ("+repro=debug-strict", "repro.ranks=distinct", f"parallel={parallel}", "epochs=1")

    one, two = (by_torchrun(distributed_digits, *words) for _ in range(2))

    assert one.status == two.status == 0, one.err + two.err
    assert one.out.startswith("weights ")
    assert one.out == two.out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_run_that_lost_a_rank_goes_on_where_it_was(
    by_torchrun, distributed_digits, tmp_path, parallel
):
    """After SIGKILL of one rank, resuming ends with the weights of the uninterrupted run."""
    words = ("+repro=debug-strict", f"parallel={parallel}", "batch_size=64", "epochs=2")
    kept = ("checkpoint=kept", "checkpoint_every=1")
    whole = by_torchrun(distributed_digits, *words)

    losing = LOSING_A_RANK.replace("EXAMPLE", repr(str(distributed_digits)))
    interrupted = by_torchrun(losing.replace("KILLED_AFTER", str(KILLED_AFTER)), *words, *kept)
    interrupted_at = sorted((tmp_path / "kept").iterdir())[-1].name
    resumed = by_torchrun(distributed_digits, *words, *kept)

    assert whole.status == resumed.status == 0, whole.err + resumed.err
    assert "killed" in interrupted.out, interrupted.err
    assert f"Signal {signal.SIGKILL:d}" in interrupted.err
    assert "step-000000007" <= interrupted_at < "step-000000022"
    assert resumed.out == whole.out
