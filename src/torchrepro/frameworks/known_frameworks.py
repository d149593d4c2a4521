"""Hook into training frameworks while a profile is active. `HOOKS` has one row per module.

This module does not import a framework. It hooks into a framework after the program has
imported it, and removes the hooks when the last profile is restored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from torchrepro.frameworks.hooking import ActiveProfile, active_profile, profiles, skip_on_error
from torchrepro.ground.console import say_once
from torchrepro.ground.imports import AfterImport, named, when_imported
from torchrepro.ground.patching import MissingHookError

HOOKS = {
    "lightning.pytorch": "frameworks.lightning:hook_trainer",
    "pytorch_lightning": "frameworks.lightning:hook_trainer",
    "lightning.fabric.fabric": "frameworks.lightning:hook_fabric",
    "lightning_fabric.fabric": "frameworks.lightning:hook_fabric",
    "ignite.handlers.checkpoint": "frameworks.ignite:hook_checkpoint",
    "accelerate.accelerator": "frameworks.huggingface:hook_accelerator",
    "accelerate.utils.random": "frameworks.huggingface:hook_seeds",
    "accelerate.data_loader": "frameworks.huggingface:hook_loaders",
    "transformers.trainer": "frameworks.huggingface:hook_trainer",
    "transformers.integrations.integration_utils": "frameworks.huggingface:hook_reporters",
}
"""Module of a framework -> the function that hooks into it and pushes the undo onto a stack."""

_hooked: dict[str, ExitStack] = {}


def hook_frameworks(profile: ActiveProfile) -> Callable[[], None]:
    """Hook into every framework that is loaded now or later; return the undo function.

    Changes `sys.meta_path`, and replaces functions and methods of each loaded framework.
    """
    profiles.append(profile)
    if len(profiles) == 1:
        _finder.watch()
        for module in filter(sys.modules.__contains__, HOOKS):
            # Under `torchrepro run` the framework may be importing torch just now.
            when_imported(sys.modules[module], partial(_hook, module))

    def unhook() -> None:
        profiles.remove(profile)
        if not profiles:
            _finder.unwatch()
            while _hooked:
                _hooked.popitem()[1].close()

    return unhook


def _hook(module: str) -> None:
    if active_profile() is None or module in _hooked or module not in sys.modules:
        return
    framework = module.partition(".")[0]
    try:
        with skip_on_error(framework, f"hooking into {module}"), ExitStack() as undo:
            named(HOOKS[module])(sys.modules[module], undo)
            _hooked[module] = undo.pop_all()
    except MissingHookError as missing:
        version = getattr(sys.modules.get(framework), "__version__", "")
        say_once(
            f"{framework} {version} has no {missing}: a run resumed from its checkpoint may draw "
            "other random numbers than the uninterrupted run"
        )


_finder = AfterImport(HOOKS, _hook)
