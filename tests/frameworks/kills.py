"""Runs a training program completely, and killed and resumed, in forks of one process.

The process has imported the program, a module with ``train(folder, workers, after_step)``. The
function trains to the end, resumes from a checkpoint in `folder` if there is one, calls
``after_step(n)`` after step n, counted from 1, and returns the weights as bytes and the checkpoint
from which it resumed, or None.
"""

import gc
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROFILE = "debug-strict"
SEED = 20
TIMEOUT = 600
"""Seconds that one run may take."""


@dataclass(frozen=True)
class Plan:
    """Executions of a program: one complete, one killed, and one resumed from each kill.

    The program is killed at the last step of `kills`. Its folder at the other steps is copied: a
    kill at that step would leave the same files.
    """

    workers: int
    kills: tuple[int, ...]
    profile: str | None = PROFILE  # None for the program as it is, which its author has seeded
    world: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # with which `train` is called besides


@dataclass(frozen=True)
class Resumed:
    """The outcome of a run that was killed and started again."""

    killed: int  # the signal that ended the first run
    resumed_from: str | None
    equal: bool  # whether its weights are bitwise those of the uninterrupted run
    said: str  # what the second run wrote on standard error


@dataclass(frozen=True)
class Outcome:
    """The weights of the uninterrupted run, and the outcome of each killed run."""

    weights: str
    resumed: tuple[Resumed, ...]


def outcomes(fork_python, program, folder, plans):
    """Execute `plans` with `program` in forks of a separate process, within `folder`."""
    done = fork_python(
        __file__, program, folder, stdin=json.dumps([asdict(plan) for plan in plans])
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the run differs from it" not in done.stderr
    return [
        Outcome(each["weights"], tuple(Resumed(**one) for one in each["resumed"]))
        for each in json.loads(done.stdout.splitlines()[-1])
    ]


def inexact(plans, found):
    """Return the runs that were not killed, not resumed, or not bitwise the uninterrupted run."""
    return [
        (plan, resumed)
        for plan, outcome in zip(plans, found, strict=True)
        for resumed in outcome.resumed
        if (resumed.killed, resumed.resumed_from is not None, resumed.equal) != (9, True, True)
    ]


def random_steps(program_steps, first, number):
    """Return `number` steps at which to kill, at random, not before the step `first`."""
    return tuple(sorted(random.sample(range(first, program_steps), number)))


# What follows runs in the process of its own.


def _main():
    plans = [Plan(**{**each, "kills": tuple(each["kills"])}) for each in json.load(sys.stdin)]
    signal.alarm(TIMEOUT * sum(2 * len(plan.kills) + 1 for plan in plans))
    sys.path[:0] = [str(HERE.parent / "policies"), str(Path(sys.argv[1]).parent)]
    from known_layers import let_torchvision_be_imported

    let_torchvision_be_imported()
    spec = importlib.util.spec_from_file_location("program", sys.argv[1])
    program = importlib.util.module_from_spec(spec)
    sys.modules["program"] = program
    spec.loader.exec_module(program)
    # What training and `apply` import and search is most of what a short run would take.
    import torch._dynamo  # noqa: F401

    import torchrepro
    import torchrepro.application.applier
    from torchrepro.seeding import global_seeds

    for profile in {plan.profile for plan in plans} - {None}:
        torchrepro.plan(profile)
    global_seeds._installed()
    gc.freeze()
    folder = Path(sys.argv[2])
    found = [asdict(_carried_out(program, folder / str(n), plan)) for n, plan in enumerate(plans)]
    print(json.dumps(found), flush=True)


def _carried_out(program, folder, plan):
    whole, status, said = _run(program, folder / "whole", plan)
    assert status == 0, said
    resumed = []
    own = folder / "killed"
    if plan.kills:
        _, killed, _ = _run(program, own, plan, plan.kills)
        own.rename(_left(own, plan.kills[-1]))
    for step in plan.kills:  # where it was: a checkpoint may name its folder
        _left(own, step).rename(own)
        after, status, said = _run(program, own, plan)
        assert status == 0, said
        shutil.rmtree(own)
        equal = after["weights"] == whole["weights"]
        resumed.append(Resumed(-killed, after["resumed_from"], equal, said))
    return Outcome(whole["weights"], tuple(resumed))


def _left(folder, step):
    """Return the path of a run's folder as a kill at `step` leaves it."""
    return folder.with_name(f"{folder.name}-{step}")


def _run(program, folder, plan, kills=()):
    """Run `program` in as many forks as the plan has processes; return the answer of rank 0.

    Its rank 0 ends at the last step of `kills`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answer, said = folder / "answer.json", folder / "said-0.txt"
    answer.unlink(missing_ok=True)
    store = None
    if plan.world > 1:  # where processes meet, as a launcher has it: its port is nobody else's
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(plan.world):
        child = os.fork()
        if not child:
            _be_rank(rank, program, folder, plan, kills, store)
        children.append(child)
    first, *others = children
    status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    for other in others:
        if status < 0:  # nobody else has to wait for a rank 0 that was killed
            os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    found = json.loads(answer.read_text()) if answer.exists() else {}
    return found, status, said.read_text()


def _be_rank(rank, program, folder, plan, kills, store):
    """Train, write the answer, and end this process."""

    def after_step(step):
        if rank or step not in kills:
            return
        if step == kills[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if not _left(folder, step).exists():  # a step of several batches is told once for each
            shutil.copytree(folder, _left(folder, step))

    status = 1
    signal.alarm(TIMEOUT)
    for descriptor, name in ((1, f"out-{rank}.txt"), (2, f"said-{rank}.txt")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    try:
        if store is not None:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(plan.world),
                "LOCAL_WORLD_SIZE": str(plan.world),
                "GROUP_RANK": "0",
                "TORCHELASTIC_RUN_ID": "kills",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
            }
        _put_in_force(plan.profile)
        weights, resumed_from = program.train(folder, plan.workers, after_step, **plan.options)
        if rank == 0:
            digest = hashlib.sha256(weights).hexdigest()
            answer = {"weights": digest, "resumed_from": resumed_from and str(resumed_from)}
            (folder / "answer.json").write_text(json.dumps(answer))
        status = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _put_in_force(profile):
    import numpy as np
    import torch

    import torchrepro

    random.seed()  # as they are in a new process: no fork draws what another one draws
    np.random.seed()
    if profile is not None:
        torchrepro.apply(profile)
        return
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


if __name__ == "__main__":
    _main()
