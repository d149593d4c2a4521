"""Where an op belongs: its phase, its module, its line."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from torchrepro.trace.frames import NOWHERE, ModuleNames, Place, place_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.trace.op_facts import OpFacts

# Which node of autograd's graph runs, and the number that its next one gets: no public door tells
# either. Without them backward ops would have no module.
_current_node: Callable[[], Any] = torch._C._current_autograd_node  # noqa: SLF001 - see above
_next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr  # noqa: SLF001 - see above
_AccumulateGrad: Any = getattr(torch._C._functions, "AccumulateGrad", None)  # noqa: SLF001 - the node that writes `.grad`


class Now:
    """What the program is doing, as far as the doors of its training loop tell; for all threads."""

    __slots__ = ("aside", "backward", "loading", "optimizer", "owner", "paused", "stopped")

    def __init__(self) -> None:
        self.optimizer: tuple[int, Place] | None = None
        """The thread on which an optimizer makes a step, and the line that called for it."""
        self.owner = ""
        """The module whose parameter the optimizer has come to."""
        self.backward = 0
        """The thread that has called for a backward pass; 0 for none."""
        self.loading = 0
        """The thread on which a loader prepares a batch; 0 for none."""
        self.paused = 0
        """The thread whose ops are torchrepro's own; 0 for none."""
        self.stopped = False
        self.aside = False
        """Whether either of these is so: the one thing that every op asks."""

    def pause(self, thread: int) -> int:
        """Leave out the ops of `thread`, of none for 0; returns whose were left out before."""
        before, self.paused = self.paused, thread
        self.aside = self.stopped or bool(thread)
        return before

    def stop(self) -> None:
        """Leave out all ops from now on."""
        self.stopped = self.aside = True


class Origin:
    """Finds where the ops of one thread belong, and remembers it for their gradients."""

    def __init__(self, names: ModuleNames, now: Now) -> None:
        self.names = names
        self.now = now
        self._places: dict[int, Place] = {}  # number of a node of autograd's graph -> its origin
        self._last_sequence = _next_sequence()

    def of(self, facts: OpFacts, args: Any) -> tuple[str, Place]:
        """Return the phase that an op belongs to, its module and its line."""
        now = self.now
        node = _current_node()
        if node is not None:
            phase = "backward"
            place, in_engine = place_of_call(self.names, 3)
            if in_engine or not place.module:
                place = self._place_of_node(node, place)
            self._note_nodes(place)
        elif now.optimizer is not None and now.optimizer[0] == get_ident():
            phase, place = "optimizer", now.optimizer[1].within(self._owner(args))
        else:
            phase = self._phase() if now.loading or now.backward else "forward"
            place, _ = place_of_call(self.names, 3)
            self._note_nodes(place)
        return ("collective" if facts.collective else phase), place

    def _owner(self, args: Any) -> str:
        """Return the module whose parameter, or state of it, an optimizer's op is about."""
        if not args or not isinstance(args[0], torch.Tensor):
            return ""  # many at once
        for value in args:
            owner = self.names.of_parameter(value)
            if owner is not None:
                self.now.owner = owner[0]
                break
        return self.now.owner  # what is computed from the last one's state is about it as well

    def passed_on(self, given: Any, result: Any) -> None:
        """Take note that an op of an optimizer has returned what it was given."""
        owner = self.names.of_parameter(given)
        if owner is not None:
            self.names.learn(result, *owner)

    def _phase(self) -> str:
        """Return the phase of an op that neither autograd nor an optimizer has called."""
        now = self.now
        if now.loading and now.loading == get_ident():
            return "data"
        return "backward" if now.backward and now.backward == get_ident() else "forward"

    def _note_nodes(self, place: Place) -> None:
        """Note where the nodes come from that autograd has added to its graph since last time."""
        sequence = _next_sequence()
        if sequence != self._last_sequence:
            for number in range(self._last_sequence, sequence):
                self._places[number] = place
            self._last_sequence = sequence

    def _place_of_node(self, node: Any, place: Place) -> Place:
        """Return where the forward op was whose gradient is computed."""
        if node.__class__ is _AccumulateGrad:
            owner = self.names.of_parameter(node.variable)
            return place if owner is None else place.within(owner[0])
        forward = self._places.get(node._sequence_nr(), NOWHERE)  # noqa: SLF001 - see the top
        return forward if place.code is None else place.within(forward.module)

    def end_step(self) -> None:
        """Forget the graph of the step that has ended."""
        self._places.clear()
        self._last_sequence = _next_sequence()
