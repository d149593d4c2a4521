"""What torch.compile remembers: forgotten, and kept apart on disk, when a policy changes."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_tags: list[str] = []  # one for every policy in force that changes what compiled code computes


@contextmanager
def kept_apart(policy: str) -> Iterator[None]:
    """Have code compiled within the block belong to `policy`, in caches on disk too.

    Changes ``torch.compiler.config.cache_key_tag``. At its end all compiled code is forgotten; who
    enters it does so once what the policy changes is in place
    (https://docs.pytorch.org/docs/stable/torch.compiler_api.html).
    """
    _retag([*_tags, policy])
    try:
        yield
    finally:
        if not sys.is_finalizing():  # an ending interpreter imports nothing, and compiles nothing
            left = [*_tags]
            left.remove(policy)
            _retag(left)
            forget_compiled()


def _retag(tags: list[str]) -> None:
    config: Any = import_module("torch.compiler.config")
    own = config.cache_key_tag.removesuffix(_text(_tags))
    config.cache_key_tag = own + _text(tags)
    _tags[:] = tags


def _text(tags: list[str]) -> str:
    return f" torchrepro: {', '.join(tags)}" if tags else ""


def forget_compiled() -> None:
    """Have torch.compile compile everything anew; does nothing where it was never used."""
    if "torch._dynamo" in sys.modules:
        import_module("torch").compiler.reset()
