"""The `worker_init_fn` of frameworks, which do nothing but seed workers: a row for each.

Under `dataloader.seeding: auto` a loader that has one is seeded as if it had none, so that what it
loads depends on no worker. A function is known by its identity: one of the same name, or one that
the program has put in its place, is the program's own. A framework is never imported for it.

accelerate has none. The generators that accelerate gives to samplers stay: they decide the order
alone, from the program's seed, the same for any number of workers.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple


class WorkerSeeder(NamedTuple):
    """A function with which a framework seeds the workers of its loaders."""

    framework: str
    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.function} of {self.framework}"


WORKER_SEEDERS = (
    WorkerSeeder("Lightning", "lightning.fabric.utilities.seed", "pl_worker_init_function"),
    WorkerSeeder("Lightning", "lightning_fabric.utilities.seed", "pl_worker_init_function"),
    WorkerSeeder("transformers", "transformers.trainer_utils", "seed_worker"),
    WorkerSeeder("timm", "timm.data.loader", "_worker_init"),
    WorkerSeeder("detectron2", "detectron2.data.build", "worker_init_reset_seed"),
)


def worker_seeder(init: Any) -> WorkerSeeder | None:
    """Return the row of a loader's `worker_init_fn`; None for one of the program's own.

    A framework's function that calls one of the program's (timm's `worker_seeding`) is its own.
    """
    function = init
    while isinstance(function, partial):
        if any(map(callable, (*function.args, *function.keywords.values()))):
            return None
        function = function.func
    for row in WORKER_SEEDERS:
        module = sys.modules.get(row.module)
        if module is not None and vars(module).get(row.function) is function:
            return row
    return None
