"""The dispatch mode that takes a record of every op."""

from __future__ import annotations

import marshal
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrepro.trace.arguments import PLAIN, call_text, value_text
from torchrepro.trace.inputs import Inputs
from torchrepro.trace.known import is_unset
from torchrepro.trace.op_facts import OpFacts, facts_of
from torchrepro.trace.origin import Now, Origin
from torchrepro.trace.outputs import Outputs, fingerprinted
from torchrepro.trace.regions import written_by_region

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.trace.frames import ModuleNames, Place
    from torchrepro.trace.known import Known
    from torchrepro.trace.tape import Tape

MANY = 1 << 16
"""Records after which those of a step that goes on are handed to the store."""

_TRACING = "torch._subclasses"  # tensors that a compiler or an exporter looks at, not numbers
_facts: dict[int, OpFacts] = {}  # by id: ops take long to hash


class Closely(Protocol):
    """Looks at the tensors of an op itself, where fingerprints are not all that is asked for."""

    def before(self, place: Place, args: Any, kwargs: Any) -> Any:
        """Look at what goes in; what is returned goes to `after`."""

    def after(self, before: Any, outputs: list[Any]) -> None:
        """Look at what an op has written; its record was the last to be taken."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the modes of all threads have in common."""

    tape: Tape
    known: Known
    names: ModuleNames
    now: Now
    closely: Closely | None
    spill: Callable[[], None]
    """Called where a step has more records than are kept in memory."""


class RecordingMode(TorchDispatchMode):
    """Takes a record of every op that torch dispatches on one thread.

    Autograd runs a thread's backward pass under the modes of that thread, whichever thread it
    uses. What runs is not changed: compiled code stays compiled and counts as one op, higher-order
    ops work, and subclasses of Tensor do their own part first.
    """

    supports_higher_order_operators = True

    def __init__(self, shared: Shared) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = shared.now
        self.tape = shared.tape
        self.known = shared.known
        self.closely = shared.closely
        self.spill = shared.spill
        self.inputs = Inputs(shared.known)
        self.outputs = Outputs(shared.known)
        self.origin = Origin(shared.names, shared.now)
        self.thread = shared.tape.new_thread()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say so to older torch, whose compiler gives way to every mode that is no part of torch.

        It knows no `ignore_compile_internals`; this is what it asks instead.
        """
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, for two seconds, at the first op; `compiled` keeps
        # a compiler that is there from compiling this.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now = self.now
        if now.aside and (now.stopped or now.paused == get_ident()):
            return func(*args, **kwargs) if kwargs else func(*args)
        if types and not PLAIN.issuperset(types):
            if any(kind.__module__.startswith(_TRACING) for kind in types):
                return func(*args, **(kwargs or {}))
            return NotImplemented
        facts = _facts.get(id(func))
        if facts is None:
            facts = _facts[id(func)] = facts_of(func)
        if facts.transparent:
            return self._passed_on(func, args, kwargs)
        given = self.inputs.read(facts, args, kwargs)
        if self.closely is not None or facts.compiled:
            return self._run_closely(facts, args, kwargs or {}, given)
        result = func(*args, **kwargs) if kwargs else func(*args)
        self._take(facts, args, kwargs, given, result)
        return result

    def _passed_on(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that computes nothing, and know its result by what it was given."""
        result = func(*args, **(kwargs or {}))
        entries = self.known.entries
        entry = entries.get(id(args[0])) if args else None
        if entry is not None and entry[0]() is args[0] and isinstance(result, torch.Tensor):
            entries[id(result)] = (ref(result), *entry[1:])
            if self.now.optimizer is not None:
                self.origin.passed_on(args[0], result)
        return result

    def _run_closely(self, facts: OpFacts, args: Any, kwargs: Any, given: Any) -> Any:
        """Run a compiled region, or any op that is looked at more closely."""
        before = None
        if self.closely is not None:
            read = args[1:] if facts.overwrites else args
            before = self.closely.before(self.origin.of(facts, args)[1], read, kwargs)
        # A region empties the list of its inputs, and writes some without saying which.
        written = written_by_region(args) if facts.compiled else []
        returned = facts.op(*args, **kwargs)
        if facts.compiled:
            self.known.forget()
        result = (returned, written) if facts.compiled else returned
        self._take(facts, args, kwargs, given, result)
        if self.closely is not None:
            self.closely.after(before, fingerprinted(facts, args, kwargs, result))
        return returned

    def _take(self, facts: OpFacts, args: Any, kwargs: Any, given: Any, result: Any) -> None:
        """Take the record of an op that has run."""
        tape = self.tape
        inputs, plain = given
        argument, key = 0, b""
        if plain:
            try:
                key = marshal.dumps(plain, 2)  # version 2 writes equal values as equal bytes
            except ValueError:
                key = value_text(plain).encode()
            argument = tape.arguments.get((facts, key), 0)
            if not argument:
                argument = tape.new_argument((facts, key), call_text(args, kwargs))
        if facts.view:
            outputs: list[Any] = []
            shapes = self.outputs.know_views(args, key, inputs, result)
        elif facts.keeps and inputs and is_unset(inputs[0]):
            outputs, shapes = self.outputs.know_unset(facts, key, inputs, result)
        else:
            outputs, shapes = self.outputs.read(facts, args, kwargs, result)
        phase, place = self.origin.of(facts, args)
        site_key = (facts, phase, place, *shapes)
        site = tape.sites.get(site_key)
        if site is None:
            self._leave_workers_alone()
            site = tape.new_site(site_key, phase, place, facts.name, shapes)
        if tape.take(self.thread, site, argument, inputs, outputs) >= MANY:
            self.spill()

    def _leave_workers_alone(self) -> None:
        """Stop in a data-loading worker: its batches are recorded where they are used."""
        if torch.utils.data.get_worker_info() is not None:
            self.now.stop()
