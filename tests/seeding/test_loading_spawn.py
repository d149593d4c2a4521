"""Workers that are started afresh (spawn, forkserver) load what forked ones and none load."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, random, sys
import numpy, torch, torchrepro
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchrepro.seeding import streams

CONTEXT = sys.argv[1] if len(sys.argv) > 1 else "none"
MARKS = []

def drawn():
    ready = torchrepro.sample_rng().random()
    return [random.random(), numpy.random.random(), torch.rand(()).item(), ready]

def known():
    plan = streams.current_plan()
    return [plan.seed, dict(plan.streams), plan.coordinate(), torchrepro.stream("noise").seed]

class Noisy(Dataset):
    def __len__(self):
        return 7
    def __getitem__(self, index):
        return index, drawn()

class Known(Noisy):
    def __getitem__(self, index):
        return get_worker_info().id, known(), list(MARKS)

class Items(IterableDataset):
    def __iter__(self):
        for item in range(5):
            yield item, drawn()

def leave_a_mark(worker):
    MARKS.append(worker)

def loader(dataset, workers=2, live_on=True, **options):
    if CONTEXT == "none":
        return DataLoader(dataset, 2, collate_fn=list, **options)
    return DataLoader(
        dataset, 2, collate_fn=list, num_workers=workers, persistent_workers=live_on,
        multiprocessing_context=CONTEXT, **options
    )

def at_epoch(dataset, epoch):
    kwargs = torchrepro.dataloader_kwargs("train")
    made = loader(dataset, live_on=False, shuffle=True, **kwargs)
    torchrepro.set_epoch(made, epoch)
    return list(made)

def main():
    profile = {"seed": 5, "streams": {"noise": 9}, "dataloader": {"seeding": "auto"}}
    found = {}
    with torchrepro.apply(profile):
        made = load(found)
    if CONTEXT != "none":
        free = [[index for batch in made for index, _ in batch] for _ in range(4)]
        found["free"] = len({tuple(order) for order in free})
    print(json.dumps(found))

def load(found):
    kwargs = torchrepro.dataloader_kwargs
    made = loader(Noisy(), shuffle=True, **kwargs("train"))
    found["explicit"] = [list(made) for _ in range(3)]
    found["named epoch"] = at_epoch(Noisy(), 2)
    made = loader(Noisy(), shuffle=True)
    found["auto"] = [list(made) for _ in range(2)]
    items = loader(Items(), 1, **kwargs("items"))
    found["items"] = [list(items) for _ in range(2)]
    found["expected"] = [
        [*known()[:3], torchrepro.stream("noise", worker=worker).seed] for worker in range(2)
    ]
    if CONTEXT != "none":
        marked = kwargs("known", worker_init_fn=leave_a_mark)
        found["known"] = [sample for batch in loader(Known(), **marked) for sample in batch]
    return made

if __name__ == "__main__":
    main()
"""
CONTEXTS = ["fork", "spawn", "forkserver"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return the function that runs the program in a context, once, and gives what it found."""
    script = tmp_path_factory.mktemp("spawn") / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    results: dict[str, dict[str, Any]] = {}

    def loaded(context: str) -> dict[str, Any]:
        if context not in results:
            done = subprocess.run(
                [sys.executable, str(script), context],
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


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", ["explicit", "named epoch", "auto"])
def test_workers_started_in_any_way_load_what_none_load(
    context: str, kind: str, loaded: Callable[[str], Any]
) -> None:
    """Order and samples of each epoch are those of a loader without workers."""
    assert loaded(context)[kind] == loaded("none")[kind]


@pytest.mark.parametrize("context", CONTEXTS)
def test_items_are_the_same_on_a_worker_started_in_any_way(
    context: str, loaded: Callable[[str], Any]
) -> None:
    """An IterableDataset gives in each epoch what it gives without workers."""
    found = loaded(context)["items"]

    assert found == loaded("none")["items"]
    assert found[0] != found[1]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_worker_knows_the_seed_plan_its_rank_and_its_number(
    context: str, loaded: Callable[[str], Any]
) -> None:
    """Where no profile is in force, in a worker, streams are those of its rank and number."""
    found = loaded(context)
    workers = {worker for worker, _, _ in found["known"]}

    assert workers == {0, 1}
    for worker, known, marks in found["known"]:
        assert known == found["expected"][worker]
        assert marks == [worker]
    assert found["expected"][0][:3] == [5, {"noise": 9}, 1]
    assert found["expected"][0][3] != found["expected"][1][3]


@pytest.mark.parametrize("context", CONTEXTS)
def test_workers_that_outlive_the_profile_shuffle_anew(
    context: str, loaded: Callable[[str], Any]
) -> None:
    """After undo a loader of the profile goes on with other orders on any kind of worker."""
    assert loaded(context)["free"] > 1
