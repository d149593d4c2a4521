"""Spawned workers (spawn, forkserver) load the same samples as a loader without workers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, multiprocessing, random, sys
sys.path.insert(0, sys.argv[1])
import numpy, torch, torchrepro
from torch.utils.data import get_worker_info
from torchrepro.seeding import streams
from loaders import Items, Noisy, Wandering, all_draws, epoch, order, run

CONTEXT = sys.argv[2]
MARKS = []

def known():
    plan = streams.current_plan()
    return [plan.seed, dict(plan.streams), plan.coordinate(), torchrepro.stream("noise").seed]

def known_to_worker():
    return get_worker_info().id, known(), list(MARKS)

def leave_a_mark(worker):
    MARKS.append(worker)

def options(workers=2, live_on=True):
    if CONTEXT == "none":
        return {}
    own = {"multiprocessing_context": CONTEXT, "persistent_workers": live_on}
    return {"num_workers": workers, **own}

def states():
    numbers = numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return [random.getstate(), *numbers]

def main():
    found = {"loaded": {}}
    for way in ("auto", "named"):
        with run(way, streams={"noise": 9}) as make:
            random.seed(1), numpy.random.seed(2)
            made = make(Noisy(9, all_draws), shuffle=True, **options())
            found["loaded"][way] = [epoch(made) for _ in range(3)]
            for live_on in (True, False):
                drawn = make(Noisy(40, all_draws), sampler=Wandering(), **options(1, live_on))
                found["loaded"][f"{way}, wandering, {live_on}"] = [epoch(drawn), states()]
            if way == "auto":
                outliving = made
                continue
            torchrepro.set_epoch(made, 2)
            assert epoch(made) == found["loaded"][way][2]
            items = make(Items(draw=all_draws), name="items", **options(1))
            found["loaded"]["items"] = [epoch(items) for _ in range(2)]
            found["expected"] = [
                [*known()[:3], torchrepro.stream("noise", worker=worker).seed] for worker in (0, 1)
            ]
            if CONTEXT != "none":
                kwargs = torchrepro.dataloader_kwargs("known", worker_init_fn=leave_a_mark)
                marked = make(Noisy(draw=known_to_worker), **options(), **kwargs)
                found["known"] = epoch(marked)
    free = [order(epoch(outliving)) for _ in range(4)]
    found["free"] = len(set(map(tuple, free)))
    print(json.dumps(found))

if __name__ == "__main__":
    # Its workers start without torchrepro, as spawned ones do, and need not import torch again.
    multiprocessing.set_forkserver_preload(["numpy", "torch"])
    main()
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return the function that runs the program in a context, once, and returns its output."""
    script = tmp_path_factory.mktemp("spawn") / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    results: dict[str, dict[str, Any]] = {}

    def loaded(context: str) -> dict[str, Any]:
        if context not in results:
            done = subprocess.run(
                [sys.executable, str(script), str(Path(__file__).parent), context],
                env={**os.environ, "RANK": "1", "WORLD_SIZE": "4"},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            results[context] = json.loads(done.stdout)
        return results[context]

    return loaded


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_spawned_workers_load_the_same_as_no_workers(
    context: str, loaded: Callable[[str], Any]
) -> None:
    """Order, samples and moved generators of each epoch equal those of a loader without workers.

    A worker knows the seed plan, its rank and its number, though no profile is active in it.
    After the undo a loader of the profile continues with other orders.
    """
    found, expected = loaded(context), loaded("none")["loaded"]

    for kind, epochs in expected.items():
        assert found["loaded"][kind] == epochs, kind
        assert epochs[0] != epochs[1]
    assert {worker for _, (worker, _, _) in found["known"]} == {0, 1}
    for _, (worker, known, marks) in found["known"]:
        assert known == found["expected"][worker]
        assert marks == [worker]
    assert found["expected"][0][:3] == [5, {"noise": 9}, 1]
    assert found["expected"][0][3] != found["expected"][1][3]
    assert found["free"] > 1
