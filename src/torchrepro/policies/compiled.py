"""What torch.compile remembers: forgotten, and kept apart on disk, when a policy changes."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_tags: list[str] = []  # one for every policy in force that changes what compiled code computes


def tag(policy: str) -> None:
    """Have code compiled from now on belong to `policy`, in memory and in caches on disk.

    Changes ``torch.compiler.config.cache_key_tag``; code compiled before is compiled anew when it
    is next called (https://docs.pytorch.org/docs/stable/torch.compiler_api.html).
    """
    _tags.append(policy)
    _retag([*_tags[:-1]], _tags)


def untag(policy: str) -> None:
    """Take back what `tag` has done for `policy`."""
    before = [*_tags]
    _tags.remove(policy)
    _retag(before, _tags)


def _retag(before: list[str], after: list[str]) -> None:
    config: Any = import_module("torch.compiler.config")
    own = config.cache_key_tag.removesuffix(_text(before))
    config.cache_key_tag = own + _text(after)
    forget_compiled()


def _text(tags: list[str]) -> str:
    return f" torchrepro: {', '.join(tags)}" if tags else ""


def forget_compiled() -> None:
    """Have torch.compile compile everything anew; does nothing where it was never used."""
    if "torch._dynamo" in sys.modules:
        import_module("torch").compiler.reset()
