"""The example on two ranks: repeatable, and resumed after a rank was killed."""

import os
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DEADLINE = 120


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_training_on_two_ranks_is_repeatable(on_two_ranks, distributed_digits, parallel):
    """Under one profile two runs on two ranks end with the same weights, bit for bit."""
    words = ("+repro=debug-strict", "repro.ranks=distinct", f"parallel={parallel}", "epochs=1")

    one, two = (on_two_ranks(distributed_digits, *words) for _ in range(2))

    assert one.status == two.status == 0, one.err + two.err
    assert one.out.startswith("weights ")
    assert one.out == two.out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_run_that_lost_a_rank_goes_on_where_it_was(
    on_two_ranks, start_on_two_ranks, distributed_digits, tmp_path, parallel
):
    """After SIGKILL of one rank, resuming ends with the weights of the uninterrupted run."""
    words = ("+repro=debug-strict", f"parallel={parallel}", "batch_size=64", "epochs=2")
    kept = ("checkpoint=kept", "checkpoint_every=1")
    whole = on_two_ranks(distributed_digits, *words)

    with start_on_two_ranks(distributed_digits, *words, *kept) as interrupted:
        _kill_a_rank(interrupted, tmp_path)
        interrupted.communicate(timeout=DEADLINE)
    interrupted_at = sorted((tmp_path / "kept").iterdir())[-1].name
    resumed = on_two_ranks(distributed_digits, *words, *kept)

    assert whole.status == resumed.status == 0, whole.err + resumed.err
    assert interrupted_at < "step-000000022", "it was killed too late to prove anything"
    assert resumed.out == whole.out


def _kill_a_rank(launcher, folder):
    deadline = time.monotonic() + DEADLINE
    while not list(folder.glob("kept/step-*/rank-1-of-2.pt")):
        assert time.monotonic() < deadline, "no checkpoint appeared"
        assert launcher.poll() is None, "the run ended by itself"
        time.sleep(0.02)
    os.kill(_children(launcher.pid)[-1], signal.SIGKILL)


def _children(pid):
    """Return the processes that `pid` started, in the order in which it started them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(word) for path in lists for word in path.read_text().split())
