"""The dispatch mode that takes a record of every op, compiled and higher-order ones included."""

from __future__ import annotations

import marshal
import sys
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pkgutil import iter_modules
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrepro.imports import AfterImport
from torchrepro.trace.fingerprint_cache import Inputs, Outputs, fingerprinted, is_unset
from torchrepro.trace.frames import Origin, RunPosition
from torchrepro.trace.op_facts import PLAIN, OpFacts, call_text, facts_of, value_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchrepro.trace.buffer import RecordingState
    from torchrepro.trace.frames import Place


def written_by_region(args: Any) -> list[Any]:
    """Return the tensors that a compiled region is about to write in place, from its graph.

    `args` are those of inductor's higher-order op: the callable and the list of inputs. A region
    whose graph is not at hand may write any of them.
    """
    callable_, inputs = args[0], list(args[1])
    graph = getattr(getattr(callable_, "original_gm", None), "graph", None)
    if graph is None:
        return inputs
    given = [node for node in graph.nodes if node.op == "placeholder"]
    # Functionalisation leaves one trace of a write in place: a last copy into the input.
    written = {
        node.args[0]
        for node in graph.nodes
        if node.op == "call_function" and str(node.target).startswith("aten.copy_.")
    }
    return [
        tensor
        for node, tensor in zip(given, inputs, strict=False)
        if node in written and hasattr(tensor, "dtype")
    ]


MANY = 1 << 16
"""Records after which those of a step that goes on are handed to the store."""

_TRACING = "torch._subclasses"  # tensors that a compiler or an exporter looks at, not numbers
_facts: dict[int, OpFacts] = {}  # by id: ops take long to hash


class Detail(Protocol):
    """Looks at the tensors of an op itself, where fingerprints are not all that is asked for."""

    def before(self, place: Place, args: Any, kwargs: Any) -> Any:
        """Look at what goes in; what is returned goes to `after`."""

    def after(self, before: Any, outputs: list[Any]) -> None:
        """Look at what an op has written; its record was the last to be taken."""


class RecordingMode(TorchDispatchMode):
    """Takes a record of every op that torch dispatches on one thread.

    Autograd runs a thread's backward pass under the modes of that thread, whichever thread it
    uses. What runs is not changed: compiled code stays compiled and counts as one op, higher-order
    ops work, and subclasses of Tensor do their own part first.
    """

    supports_higher_order_operators = True

    def __init__(self, state: RecordingState, now: RunPosition, details: Detail | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = now
        self.details = details
        self.buffer = state.buffer
        self.cache = state.cache
        self.spill = state.spill
        self.inputs = Inputs(state.cache)
        self.outputs = Outputs(state.cache)
        self.origin = Origin(state.names, now)
        self.thread = state.buffer.new_thread()

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
        if self.details is not None or facts.compiled:
            return self._run_closely(facts, args, kwargs or {}, given)
        result = func(*args, **kwargs) if kwargs else func(*args)
        self._take(facts, args, kwargs, given, result)
        return result

    def _passed_on(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that computes nothing, and know its result by what it was given."""
        result = func(*args, **(kwargs or {}))
        entries = self.cache.entries
        entry = entries.get(id(args[0])) if args else None
        if entry is not None and entry[0]() is args[0] and isinstance(result, torch.Tensor):
            entries[id(result)] = (ref(result), *entry[1:])
            if self.now.optimizer is not None:
                self.origin.passed_on(args[0], result)
        return result

    def _run_closely(self, facts: OpFacts, args: Any, kwargs: Any, given: Any) -> Any:
        """Run a compiled region, or any op that is looked at more closely."""
        before = None
        if self.details is not None:
            read = args[1:] if facts.overwrites else args
            before = self.details.before(self.origin.of(facts, args)[1], read, kwargs)
        # A region empties the list of its inputs, and writes some without saying which.
        written = written_by_region(args) if facts.compiled else []
        returned = facts.op(*args, **kwargs)
        if facts.compiled:
            self.cache.forget()
        result = (returned, written) if facts.compiled else returned
        self._take(facts, args, kwargs, given, result)
        if self.details is not None:
            self.details.after(before, fingerprinted(facts, args, kwargs, result))
        return returned

    def _take(self, facts: OpFacts, args: Any, kwargs: Any, given: Any, result: Any) -> None:
        """Take the record of an op that has run."""
        buffer = self.buffer
        inputs, plain = given
        argument, key = 0, b""
        if plain:
            try:
                key = marshal.dumps(plain, 2)  # version 2 writes equal values as equal bytes
            except ValueError:
                key = value_text(plain).encode()
            argument = buffer.arguments.get((facts, key), 0)
            if not argument:
                argument = buffer.new_argument((facts, key), call_text(args, kwargs))
        if facts.view:
            outputs: list[Any] = []
            shapes = self.outputs.know_views(args, key, inputs, result)
        elif facts.keeps and inputs and is_unset(inputs[0]):
            outputs, shapes = self.outputs.know_unset(facts, key, inputs, result)
        else:
            outputs, shapes = self.outputs.read(facts, args, kwargs, result)
        phase, place = self.origin.of(facts, args)
        site_key = (facts, phase, place, *shapes)
        site = buffer.sites.get(site_key)
        if site is None:
            self._leave_workers_alone()
            site = buffer.new_site(site_key, phase, place, facts.name, shapes)
        if buffer.take(self.thread, site, argument, inputs, outputs) >= MANY:
            self.spill()

    def _leave_workers_alone(self) -> None:
        """Stop in a data-loading worker: its batches are recorded where they are used."""
        if torch.utils.data.get_worker_info() is not None:
            self.now.stop()


_HOMES = ("torch._higher_order_ops*", "torch.nn.attention*")
_DEFINED = "_higher_order_ops"


@contextmanager
def higher_order_ops_run() -> Iterator[None]:
    """Have higher-order ops run under the recording, those that are defined later as well.

    Newer torch asks a mode once, by `supports_higher_order_operators`; older torch refuses a
    higher-order op under a mode that the op has no rule for. The list of them all is private; were
    it gone where it is needed, such an op would raise torch's own error.
    """
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        yield
        return
    _give_rules()
    waiting = AfterImport(_HOMES, lambda _: _give_rules())
    waiting.watch()
    try:
        yield
    finally:
        waiting.unwatch()


def _give_rules() -> None:
    for op in getattr(torch._ops, _DEFINED, {}).values():  # noqa: SLF001 - see above
        if RecordingMode not in op.python_key_table:
            op.py_impl(RecordingMode)(_rule(op))


def _rule(op: Any) -> Callable[..., Any]:
    def run(mode: RecordingMode, *args: Any, **kwargs: Any) -> Any:
        return mode.__torch_dispatch__(op, (), args, kwargs)

    return run


_OPTION = "wrap_inductor_compiled_regions"
_INDUCTOR, _DYNAMO = "torch._inductor.config", "torch._dynamo"
_LOOKED_INTO = "module_hook"  # says itself what it is while a compiler looks at it
_left_out: list[bool] = []  # once is enough for a process


@contextmanager
def left_out_of_compilation() -> Iterator[None]:
    """Have torch.compile leave torchrepro's own code out where it meets it between two regions."""
    with _once_imported(_DYNAMO, _leave_out):
        yield


@contextmanager
def compiled_regions_seen() -> Iterator[None]:
    """Have regions that inductor compiles from now on pass through the dispatcher as one op.

    The option is inductor's own and leaves the generated code as it is; without it (older torch)
    the kernels that inductor wrote are not seen, those of libraries that it calls are.
    """
    with ExitStack() as back:
        back.enter_context(_once_imported(_INDUCTOR, lambda: _wrap_regions(back)))
        yield


@contextmanager
def _once_imported(module: str, call: Callable[[], None]) -> Iterator[None]:
    """Call back when `module` has been imported, at once if it is."""
    waiting = AfterImport((module,), lambda _: call())
    waiting.watch()
    if module in sys.modules:
        call()
    try:
        yield
    finally:
        waiting.unwatch()


def _wrap_regions(back: ExitStack) -> None:
    config = sys.modules[_INDUCTOR]
    if hasattr(config, _OPTION):
        back.callback(setattr, config, _OPTION, getattr(config, _OPTION))
        setattr(config, _OPTION, True)


def _leave_out() -> None:
    """Name our modules to torch.compile.

    ``trace_rules.add`` is not documented; the documented ``torch.compiler.disable`` costs a
    microsecond per op even where nothing is compiled, and is what remains were it gone.
    """
    if _left_out:
        return
    _left_out.append(True)
    rules = import_module("torch._dynamo.trace_rules")
    if hasattr(rules, "add"):
        for module in _own_modules():
            rules.add(module)
        return
    taken = RecordingMode.__torch_dispatch__
    RecordingMode.__torch_dispatch__ = torch.compiler.disable(taken)  # type: ignore[method-assign, no-untyped-call]


def _own_modules() -> list[str]:
    whole, part = (name.rpartition(".")[0] for name in (__package__, __name__))
    found = []
    for package in (whole, part):
        path = import_module(package).__path__
        found += [f"{package}.{module.name}" for module in iter_modules(path)]
    return [name for name in found if name not in (part, f"{part}.{_LOOKED_INTO}")]
