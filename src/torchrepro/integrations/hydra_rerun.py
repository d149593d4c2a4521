"""The profile of a job that Hydra runs again from its pickled config.

Hydra 1.3's `--experimental-rerun` reads that config and calls the task: no plugin, no source and
no callback of anybody takes part. All that is read is the pickle, so the profile travels in it, as
an entry of the cache that OmegaConf keeps with a config (OmegaConf.get_cache), and puts itself in
force as soon as it is read for a rerun. Hydra 1.4 composes anew, as for any run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from torchrepro.applier import in_force
from torchrepro.profile.resolved import Resolved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

_OPTION = "--experimental-rerun"
_ENTRY = "torchrepro"


def send_with(config: DictConfig, resolved: Resolved) -> None:
    """Have the pickled `config` of a job carry its profile.

    It lies with Hydra's own part, which is never in the config that the task gets and may save.
    """
    OmegaConf.get_cache(config.hydra)[_ENTRY] = _Passenger(resolved.to_json())


class _Passenger:
    """The profile of a job as plain values; reading it from a pickle may put it in force."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self.content,)

    def __deepcopy__(self, memo: Any) -> _Passenger:
        return self


def _read(content: Mapping[str, Any]) -> _Passenger:
    if _is_a_rerun() and not in_force():
        from torchrepro.integrations.hydra_callback import protect

        protect(Resolved.from_json(content))
    return _Passenger(content)


def _is_a_rerun() -> bool:
    """Whether this program was started to run a job again; argparse takes a shorter option too."""
    words = [word.partition("=")[0] for word in sys.argv[1:]]
    return any(word.startswith("--e") and _OPTION.startswith(word) for word in words)
