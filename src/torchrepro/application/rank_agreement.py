"""Whether all ranks of a run have the same in force: asked once, before the first step.

Ranks exchange what they have in force through the store of their process group, not through a
collective: that needs no device, and makes no communicator before its knobs are settled.
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
from torchrepro.ground.errors import ApplyError
from torchrepro.ground.messages import shown
from torchrepro.ground.patching import surround_everywhere
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.variables import ORDER_OF_SUMS
from torchrepro.seeding import streams
from torchrepro.seeding.global_seeds import seed_as_this_rank

if TYPE_CHECKING:
    from torchrepro.reporting.report import Report

TIMEOUT = timedelta(seconds=60)
_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed.device_mesh")
"""Those of torch that have imported the function which makes the process group by its name."""

_PROGRAM_SEED = "seed given by the program"
"""What the program has given as a seed, which need not be the same on all ranks."""

_watching: list[Agreement] = []  # innermost last: it alone compares
_turns = count()  # ranks compare in the same order, so they number their turns alike


class Agreement:
    """Compares what is in force on this rank with the other ranks', once per process group.

    As soon as a process group is made, at the latest before the first step. Wraps
    `torch.distributed.init_process_group`, in a rank that a launcher has numbered wherever it was
    imported by that name, and adds a hook of torch's own before optimizer steps, which goes away
    once ranks were compared.
    """

    def __init__(self, report: Callable[[], Report], refuse: Callable[[ApplyError], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._report = report
        self._refuse = refuse
        self._compared: Callable[[], Any] = lambda: None  # the group, for as long as it lives
        self._undo, self._hook = ExitStack(), ExitStack()

        def then_compare(init_process_group: Any, *args: Any, **kwargs: Any) -> Any:
            made = init_process_group(*args, **kwargs)
            self.compare({_PROGRAM_SEED: json.dumps(streams.given_seed())})
            return made

        module = sys.modules["torch.distributed"]
        if hasattr(module, "init_process_group"):
            ranked = any(rank in os.environ for rank, _ in streams.VARIABLES)
            own = None if ranked else [*filter(None, map(sys.modules.get, _MODULES))]
            surround_everywhere(self._undo, module, "init_process_group", then_compare, own)
        self._hook.callback(register_optimizer_step_pre_hook(lambda *_: self.compare()).remove)
        _watching.append(self)

    def close(self) -> None:
        """Take back what was changed."""
        self._undo.close()
        self._hook.close()
        _watching.remove(self)

    def compare(self, program_seed: Mapping[str, str] | None = None) -> None:
        """Compare with the other ranks if there are any and they were not compared yet.

        Where all ranks have the same `program_seed`, their loaders depend on it from then on.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return
        if _watching[-1:] != [self] or self._compared() is dist.group.WORLD:
            return
        self._compared = ref(dist.group.WORLD)
        self._hook.close()
        size, rank = dist.get_world_size(), dist.get_rank()
        if size == 1:
            return
        seed_as_this_rank()
        if dist.get_backend() == "fake":
            return  # torch's stand-in for a group whose other ranks do not exist
        try:
            mine = {**in_force(self._report()), **(program_seed or {})}
            store = dist.distributed_c10d.PrefixStore(f"torchrepro/{next(_turns)}", _store())
            differing = exchange(store, size, rank, mine)
        except ApplyError as error:
            self._refuse(error)
            return
        if program_seed:
            seeds = [keys.pop(_PROGRAM_SEED, None) for keys in differing.values()]
            agreed = None if any(seeds) else json.loads(program_seed[_PROGRAM_SEED])
            streams.put_plan(replace(streams.current_plan(), agreed_seed=agreed))
        lines = [
            f"  {key}: {first} on rank 0, {other} on rank {number}"
            for number, keys in differing.items()
            for key, (first, other) in keys.items()
        ]
        if lines:
            words = "\n".join(["ranks do not have the same in force:", *lines])
            self._refuse(ApplyError(words, self._report()))
        elif rank == 0:
            name_what_is_not_pinned(dist.get_backend())


def in_force(report: Report) -> dict[str, str]:
    """Return everything on which ranks have to agree, as text under dotted keys.

    The generators of ranks may start from different seeds; the plan they derive from may not.
    """
    from torchrepro.manifest.environment import versions  # one process alone never asks

    knobs = knobs_by_name()
    shared = (row for row in report if row.knob not in knobs or knobs[row.knob].key != "seed")
    found = {row.knob: shown(row.state) for row in shared}
    found |= {f"seed plan: {key}": shown(v) for key, v in streams.current_plan().to_json().items()}
    return found | {f"version of {name}": text for name, text in versions().items()}


def exchange(
    store: Any, size: int, rank: int, mine: Mapping[str, str]
) -> dict[int, dict[str, list[str]]]:
    """Return, for every rank that differs from rank 0, the differing keys with both values.

    Every rank of the `size` ranks returns the same. Raises `ApplyError` if a rank does not answer.
    """
    if rank == 0:
        store.set("mine/0", json.dumps(dict(mine)))
        others = [f"differs/{other}" for other in range(1, size)]
        answers = [json.loads(_answer(store, key, size)) for key in others]
        found = {number: answer for number, answer in enumerate(answers, 1) if answer}
        store.set("verdict", json.dumps(found))
        for other in range(1, size) if found else ():
            # Rank 0 may host the store: it stays until every other rank knows why it stops.
            _answer(store, f"heard/{other}", size)
        return found
    theirs = json.loads(_answer(store, "mine/0", size))
    differing = {
        key: [theirs.get(key, "not set"), mine.get(key, "not set")]
        for key in sorted(theirs.keys() | mine.keys())
        if theirs.get(key) != mine.get(key)
    }
    store.set(f"differs/{rank}", json.dumps(differing))
    verdict = json.loads(_answer(store, "verdict", size))
    store.set(f"heard/{rank}", "1")
    return {int(number): keys for number, keys in verdict.items()}


def _answer(store: Any, key: str, size: int) -> str:
    try:
        store.wait([key], TIMEOUT)
    except Exception as error:  # the store raises classes of its own, which differ between versions
        who = key.rpartition("/")[2]
        whose = f"rank {who}" if who.isdigit() else "rank 0"
        why = str(error).strip().partition("\n")[0]
        raise ApplyError(
            f"{whose} of {size} did not say what it has in force, waited for {TIMEOUT.seconds} s "
            f"at most: {why}\n"
            "  to do: apply the same profile on every rank, before the process group is made"
        ) from error
    content: bytes = store.get(key)
    return content.decode()


def _store() -> Any:
    """Return the store through which the ranks of the default group found each other.

    Private (``_get_default_store``), because torch gives no public access to it; where it is gone,
    comparing fails and says so.
    """
    from torch.distributed import distributed_c10d

    get = getattr(distributed_c10d, "_get_default_store", None)
    if get is None:
        raise ApplyError("this torch shows no store through which ranks could be compared")
    return get()


def name_what_is_not_pinned(backend: str) -> None:
    """Tell standard error which variables leave the order of sums of `backend` to itself."""
    for kind, variables in ORDER_OF_SUMS.items():
        missing = [name for name in variables if name not in os.environ]
        if kind in backend and missing:
            unset = ", ".join(missing)
            note(f"{kind} adds up in an order of its own choosing: {unset} not set")
