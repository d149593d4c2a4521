"""What of a run that goes on from a checkpoint is not as it was saved, said at its first step.

A checkpoint holds digests of its optimizers: of their parameters, and of what they remember of
each. An optimizer of the resumed run is known by the shapes of its parameters.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import xxhash

from torchrepro.console import say
from torchrepro.messages import some
from torchrepro.seeding import loader_places
from torchrepro.seeding.streams import world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_awaited: list[Any] = []  # the hook that waits for the first step, if any


def digests_of(optimizer: Any) -> dict[str, str]:
    """Return digests of the parameters of `optimizer`, and of its state without its rates."""
    parameters, state = xxhash.xxh3_64(), xxhash.xxh3_64()
    for number, parameter in enumerate(_parameters(optimizer)):
        _add(parameters, "", parameter)
        its = optimizer.state.get(parameter) or {}
        for name, value in sorted(its.items(), key=str) if isinstance(its, dict) else ():
            _add(state, f"{number} {name} ", value)
    return {
        "kind": _kind(optimizer),
        "parameters": parameters.hexdigest(),
        "state": state.hexdigest(),
    }


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _kind(optimizer: Any) -> str:
    # Some keep other parameters while they train than while they are saved: `train_mode` says it.
    shapes = [tuple(each.shape) for each in _parameters(optimizer)]
    modes = [group.get("train_mode") for group in optimizer.param_groups]
    return xxhash.xxh3_64(repr((shapes, modes)).encode()).hexdigest()


def _add(digest: Any, name: str, value: Any) -> None:
    digest.update(name.encode())
    part = getattr(value, "to_local", lambda: value)()
    if hasattr(part, "untyped_storage"):
        held = part.detach().cpu().contiguous()
        digest.update(f"{held.dtype} {tuple(held.shape)} ".encode())
        digest.update(held.reshape(-1).view(sys.modules["torch"].uint8).numpy().data)
    else:
        digest.update(repr(part).encode())


def compare_at_first_step(saved: Sequence[Mapping[str, str]], where: str) -> None:
    """Say at the first step what is not as the checkpoint `where` has `saved` it, in one line."""

    def compare(optimizer: Any) -> None:
        now, name = digests_of(optimizer), type(optimizer).__name__
        same = [each for each in saved if each["parameters"] == now["parameters"]]
        others = [] if same else [f"the parameters of {name}"]
        if now["state"] not in [each["state"] for each in same or saved]:
            others.append(f"the state of {name}")
        others += loader_places.behind()
        if others:
            _say_not_as_saved(where, others)

    _await_step(saved, compare)


def expect_weights(saved: Sequence[Mapping[str, str]], loaders: Iterable[str], where: str) -> None:
    """Say at the first step if it goes on with the weights of the checkpoint `where`, and no more.

    The program has read that checkpoint by itself: for its weights alone, perhaps, to train them on
    other data than what `loaders` read. Of that nothing is said.
    """
    kinds = {*loaders}

    def compare(optimizer: Any) -> None:
        now, name = digests_of(optimizer), type(optimizer).__name__
        same = [each for each in saved if each["parameters"] == now["parameters"]]
        if same and kinds.intersection(loader_places.kinds_in_use()):
            is_lost = now["state"] not in [each["state"] for each in same]
            others = [f"the state of {name}"] * is_lost + ["the generators", "the loaders"]
            _say_not_as_saved(where, others)

    _await_step(saved, compare)


def _say_not_as_saved(where: str, others: Sequence[str]) -> None:
    if not world().rank:
        say(
            f"{where}: not as saved at the first step: {some(others)}; so this run is not the "
            "uninterrupted one"
        )


def _await_step(saved: Sequence[Mapping[str, str]], compare: Callable[[Any], None]) -> None:
    """Call `compare` with the first optimizer that makes a step and is of a `saved` kind."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    forget()
    kinds = {each["kind"] for each in saved}
    stepped: WeakSet[Any] = WeakSet()

    def before_step(optimizer: Any, *_: Any) -> None:
        if not kinds or optimizer in stepped:
            return
        stepped.add(optimizer)
        if _kind(optimizer) in kinds:
            kinds.clear()  # torch is reading its hooks: this one is removed later
            compare(optimizer)

    if kinds:
        _awaited.append(register_optimizer_step_pre_hook(before_step))


def forget() -> None:
    """Compare nothing any more."""
    while _awaited:
        _awaited.pop().remove()
