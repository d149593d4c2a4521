"""What stands in for the forward of a module that a profile runs elsewhere."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import ref

from torchrepro.locks import fork_safe_lock
from torchrepro.policies.effects import count
from torchrepro.policies.placement.elsewhere import run_there

if TYPE_CHECKING:
    from inspect import Signature

    from torchrepro.policies.placement.elsewhere import Place

POLICY = "device.modules"
_ABSENT = object()


class PlacedForward:
    """The forward of one module, run at a place; an attribute of that module while in force.

    Whatever else a call of the module does, its hooks say, happens where it always did. torch
    compiles none of it (https://docs.pytorch.org/docs/stable/generated/torch.compiler.disable.html).
    """

    def __init__(self, name: str, module: Any, there: Place) -> None:
        self.name = name
        self.there = there
        self.calls = 0
        self._module = ref(module)
        self._in_force = False
        self._lock = fork_safe_lock()  # while it runs, the module has other parameters than its own
        self._own: Any = _own_of(module)
        self._uncompiled = import_module("torch").compiler.disable(self._run)

    def put(self) -> None:
        """Let the module run at its place."""
        self._in_force = True
        module = self._module()
        if module is not None:
            vars(module)["forward"] = self

    def take(self) -> None:
        """Let the module run where it is again; inside a wrapper of somebody's own too."""
        self._in_force = False
        module = self._module()
        if module is None or vars(module).get("forward") is not self:
            return
        if self._own is _ABSENT:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = self._own

    def is_for(self, module: Any) -> bool:
        """Whether this is the forward of `module` and of no other that it was copied to."""
        return self._module() is module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncompiled(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        forward = self._plain(module)
        if not self._in_force:
            return forward(*args, **kwargs)
        with self._lock:
            result, moved = run_there(self.there, module, forward, args, kwargs)
        self.calls += 1
        what = "ran on" if moved else "was already on"
        count(POLICY, self.name, f"{what} {self.there.device}", moved=moved)
        return result

    def _plain(self, module: Any) -> Any:
        return partial(type(module).forward, module) if self._own is _ABSENT else self._own

    @property
    def __name__(self) -> str:
        return "forward"

    @property
    def __signature__(self) -> Signature:
        return signature(self._plain(self._module()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the module's own forward: a copy is plain, and needs no torchrepro."""
        if self._own is _ABSENT:
            return getattr, (self._module(), "forward")
        return partial, (self._own,)


def _own_of(module: Any) -> Any:
    """Return the forward that `module` has besides that of its class, if it has one."""
    own = vars(module).get("forward", _ABSENT)
    if isinstance(own, PlacedForward):
        # A replica of DataParallel and a shallow copy come with the original's.
        return own._own  # noqa: SLF001 - of this very class
    # A deep copy of a placed module has the forward of its class as its own.
    of_class = getattr(own, "__func__", None) is type(module).forward
    return _ABSENT if of_class and own.__self__ is module else own
