"""Compares the settings of all ranks of a run, once, before the first step.

Ranks exchange settings through the store of the process group. A collective operation would need a
device, and would create a communicator before the knobs of communicators are set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import ref

from torchrepro.ground.console import note
from torchrepro.ground.errors import ApplyError, shown
from torchrepro.ground.patching import surround_everywhere
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.variables import VARIABLES_FOR_ORDER_OF_SUMS
from torchrepro.seeding import streams
from torchrepro.seeding.global_seeds import seed_as_this_rank

if TYPE_CHECKING:
    from torchrepro.reporting.report import Report

TIMEOUT = timedelta(seconds=60)
_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed.device_mesh")
"""Modules of torch that import `init_process_group` by its name."""

_PROGRAM_SEED = "seed set by the program"
"""Key for the seed that the program set itself; ranks may have different ones."""

_watching: list[Agreement] = []  # innermost profile last: only the last one compares
_turns = count()  # equal on all ranks, because all ranks compare in the same order


class Agreement:
    """Compares the settings of this rank with the settings of the other ranks.

    Compares once per process group: at its creation, or at the latest before the first step. Wraps
    `torch.distributed.init_process_group`. If a launcher has set the rank in a variable, also wraps
    the function in all modules that imported it by name, and registers a hook before optimizer
    steps.
    """

    def __init__(self, report: Callable[[], Report], refuse: Callable[[ApplyError], None]) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._report = report
        self._refuse = refuse
        self._compared: Callable[[], Any] = lambda: None  # weak reference to the compared group
        self._undo = ExitStack()

        def then_compare(init_process_group: Any, *args: Any, **kwargs: Any) -> Any:
            made = init_process_group(*args, **kwargs)
            self.compare({_PROGRAM_SEED: json.dumps(streams.given_seed())})
            return made

        module = sys.modules["torch.distributed"]
        if hasattr(module, "init_process_group"):
            ranked = any(rank in os.environ for rank, _ in streams.VARIABLES)
            modules = None if ranked else [*filter(None, map(sys.modules.get, _MODULES))]
            surround_everywhere(self._undo, module, "init_process_group", then_compare, modules)

        def before_step(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self.compare()

        # Torch iterates over its hooks when it calls this one, so `compare` cannot remove it.
        self._undo.callback(register_optimizer_step_pre_hook(before_step).remove)
        _watching.append(self)

    def close(self) -> None:
        """Remove the wrappers and the hook."""
        self._undo.close()
        _watching.remove(self)

    def compare(self, program_seed: Mapping[str, str] | None = None) -> None:
        """Compare with the other ranks, at most once per process group.

        If `program_seed` is equal on all ranks, all data loaders use this seed from now on.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return
        if _watching[-1:] != [self] or self._compared() is dist.group.WORLD:
            return
        self._compared = ref(dist.group.WORLD)
        size, rank = dist.get_world_size(), dist.get_rank()
        if size == 1:
            return
        seed_as_this_rank()
        if dist.get_backend() == "fake":
            return  # torch's backend for tests, without other ranks
        try:
            mine = {**settings_of(self._report()), **(program_seed or {})}
            store = dist.distributed_c10d.PrefixStore(f"torchrepro/{next(_turns)}", _store())
            differing = exchange(store, size, rank, mine)
        except ApplyError as error:
            self._refuse(error)
            return
        if program_seed:
            seeds = [keys.pop(_PROGRAM_SEED, None) for keys in differing.values()]
            agreed = None if any(seeds) else json.loads(program_seed[_PROGRAM_SEED])
            streams.set_plan(replace(streams.current_plan(), agreed_seed=agreed))
        lines = [
            f"  {key}: {first} on rank 0, {second} on rank {number}"
            for number, keys in differing.items()
            for key, (first, second) in keys.items()
        ]
        if lines:
            words = "\n".join(["ranks differ in settings or versions:", *lines])
            self._refuse(ApplyError(words, self._report()))
        elif rank == 0:
            note_unpinned_sums(dist.get_backend())


def settings_of(report: Report) -> dict[str, str]:
    """Return the settings and versions that have to be equal on all ranks, as text.

    Generators may have different seeds on each rank, but all ranks must use the same plan of seeds.
    """
    from torchrepro.manifest.environment import versions  # a single process does not need it

    knobs = knobs_by_name()
    shared = (row for row in report if row.knob not in knobs or knobs[row.knob].key != "seed")
    settings = {row.knob: shown(row.state) for row in shared}
    for key, choice in streams.current_plan().to_json().items():
        settings[f"seed plan: {key}"] = shown(choice)
    return settings | {f"version of {name}": text for name, text in versions().items()}


def exchange(
    store: Any, size: int, rank: int, mine: Mapping[str, str]
) -> dict[int, dict[str, list[str]]]:
    """Return the keys with different values on rank 0 and another rank: rank -> key -> both values.

    All `size` ranks return the same dict. Raises `ApplyError` if a rank does not answer.
    """
    if rank == 0:
        store.set("mine/0", json.dumps(dict(mine)))
        answers = [json.loads(_answer(store, f"differs/{n}", size)) for n in range(1, size)]
        verdict = {number: answer for number, answer in enumerate(answers, 1) if answer}
        store.set("verdict", json.dumps(verdict))
        if verdict:
            # Rank 0 may host the store: it must not stop before every rank has the verdict.
            for number in range(1, size):
                _answer(store, f"received/{number}", size)
        return verdict
    theirs = json.loads(_answer(store, "mine/0", size))
    differing = {
        key: [theirs.get(key, "not set"), mine.get(key, "not set")]
        for key in sorted(theirs.keys() | mine.keys())
        if theirs.get(key) != mine.get(key)
    }
    store.set(f"differs/{rank}", json.dumps(differing))
    received = json.loads(_answer(store, "verdict", size))
    store.set(f"received/{rank}", "1")
    return {int(number): keys for number, keys in received.items()}


def _answer(store: Any, key: str, size: int) -> str:
    try:
        store.wait([key], TIMEOUT)
    except Exception as error:  # the classes of the store's errors differ between versions
        number = key.rpartition("/")[2]
        sender = f"rank {number}" if number.isdigit() else "rank 0"
        why = str(error).strip().partition("\n")[0]
        raise ApplyError(
            f"{sender} of {size} did not send its settings (waited at most {TIMEOUT.seconds} s): "
            f"{why}\n"
            "  to do: apply the same profile on every rank, before the process group is created"
        ) from error
    content: bytes = store.get(key)
    return content.decode()


def _store() -> Any:
    """Return the store of the default process group.

    ``_get_default_store`` is private, since torch has no public access to the store. If torch
    removes it, this raises `ApplyError`.
    """
    from torch.distributed import distributed_c10d

    get = getattr(distributed_c10d, "_get_default_store", None)
    if get is None:
        raise ApplyError("ranks cannot be compared: this torch has no access to their store")
    return get()


def note_unpinned_sums(backend: str) -> None:
    """Print a note if the variables that fix the order of sums of `backend` are not set."""
    for library, variables in VARIABLES_FOR_ORDER_OF_SUMS.items():
        missing = [name for name in variables if name not in os.environ]
        if library in backend and missing:
            unset = ", ".join(missing)
            note(f"{library} chooses the order in which it adds up: {unset} not set")
