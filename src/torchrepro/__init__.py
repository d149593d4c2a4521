"""A declared profile makes a PyTorch run reproducible, with a report and an exact undo.

Importing this package imports neither torch nor hydra. The first use of a public name imports its
module. So a profile can still set options that torch reads only during its own import.

PYTEST_DONT_REWRITE is a mark for pytest. Without it, pytest would warn under `torchrepro run`,
which imports this package before pytest.
"""

from torchrepro.ground.fork_safety import loading as _loading

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost 5 ms

if TYPE_CHECKING:
    from torchrepro import hf as hf
    from torchrepro.application.applier import Applied as Applied
    from torchrepro.application.applier import apply as apply
    from torchrepro.application.planner import Plan as Plan
    from torchrepro.application.planner import plan as plan
    from torchrepro.frameworks.huggingface import attach as attach
    from torchrepro.ground.errors import ApplyError as ApplyError
    from torchrepro.ground.errors import DriftError as DriftError
    from torchrepro.ground.errors import LateError as LateError
    from torchrepro.ground.errors import ProfileError as ProfileError
    from torchrepro.ground.errors import SeedingError as SeedingError
    from torchrepro.ground.errors import TorchreproError as TorchreproError
    from torchrepro.ground.errors import TraceError as TraceError
    from torchrepro.integrations.logging_profile import Logged as Logged
    from torchrepro.integrations.logging_profile import log_to as log_to
    from torchrepro.policies.fallback import register_replacement as register_replacement
    from torchrepro.policies.fallback import unregister_replacement as unregister_replacement
    from torchrepro.policies.placement import place_modules as place_modules
    from torchrepro.profile.load import load as load
    from torchrepro.profile.schema import Profile as Profile
    from torchrepro.reporting.outcomes import Outcome as Outcome
    from torchrepro.reporting.report import Report as Report
    from torchrepro.seeding.checkpoint import Checkpoint as Checkpoint
    from torchrepro.seeding.generators import isolated_rng as isolated_rng
    from torchrepro.seeding.generators import register_generator as register_generator
    from torchrepro.seeding.generators import seeded as seeded
    from torchrepro.seeding.generators import unregister_generator as unregister_generator
    from torchrepro.seeding.global_seeds import register_seeder as register_seeder
    from torchrepro.seeding.global_seeds import use_mesh as use_mesh
    from torchrepro.seeding.loader import sample_rng as sample_rng
    from torchrepro.seeding.loader_hook import dataloader_kwargs as dataloader_kwargs
    from torchrepro.seeding.loader_hook import set_epoch as set_epoch
    from torchrepro.seeding.state import rng_state as rng_state
    from torchrepro.seeding.state import save_rng_state as save_rng_state
    from torchrepro.seeding.state import set_rng_state as set_rng_state
    from torchrepro.seeding.streams import Stream as Stream
    from torchrepro.seeding.streams import stream as stream
    from torchrepro.trace.recorder import end_step as end_step
    from torchrepro.trace.recorder import record as record
    from torchrepro.verdict.comparison import compare as compare
    from torchrepro.verdict.value import Verdict as Verdict
    from torchrepro.verification.result import Verification as Verification
    from torchrepro.verification.verifier import verify as verify

_PUBLIC = {
    "application.applier": ("Applied", "apply"),
    "ground.errors": (
        *("ApplyError", "DriftError", "LateError", "ProfileError", "SeedingError"),
        *("TorchreproError", "TraceError"),
    ),
    "frameworks.huggingface": ("attach",),
    "integrations.logging_profile": ("Logged", "log_to"),
    "application.planner": ("Plan", "plan"),
    "policies.fallback": ("register_replacement", "unregister_replacement"),
    "policies.placement": ("place_modules",),
    "profile.load": ("load",),
    "profile.schema": ("Profile",),
    "reporting.outcomes": ("Outcome",),
    "reporting.report": ("Report",),
    "seeding.checkpoint": ("Checkpoint",),
    "seeding.generators": ("isolated_rng", "register_generator", "seeded", "unregister_generator"),
    "seeding.global_seeds": ("register_seeder", "use_mesh"),
    "seeding.loader": ("sample_rng",),
    "seeding.loader_hook": ("dataloader_kwargs", "set_epoch"),
    "seeding.state": ("rng_state", "save_rng_state", "set_rng_state"),
    "seeding.streams": ("Stream", "stream"),
    "trace.recorder": ("end_step", "record"),
    "verdict.comparison": ("compare",),
    "verdict.value": ("Verdict",),
    "verification.result": ("Verification",),
    "verification.verifier": ("verify",),
}
"""Module -> its public names; the first use of a name imports the module."""

WORKERS = {"ray": "application.ray_workers:reach_workers"}
"""Library -> the function that passes an active profile to the processes of the library.

Once the library is imported, the function is called with the profile and an error handler. It
returns its undo function. The table is part of this module because every process loads this module.
"""

_SUBMODULES = ("hf",)  # public modules; the first use of one imports it

_MODULE = {name: f"torchrepro.{module}" for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE)  # noqa: PLE0605 - the table above is the one list of public names


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("torchrepro")
    if name in _SUBMODULES:
        return _loaded(f"torchrepro.{name}")
    if name not in _MODULE:
        raise AttributeError(f"module 'torchrepro' has no attribute {name!r}")
    value = getattr(_loaded(_MODULE[name]), name)
    globals()[name] = value
    return value


def _loaded(module: str) -> object:
    """Import `module` with garbage collection switched off.

    Imports create hardly any garbage, and with torch loaded a full collection takes as long as all
    of these imports.
    """
    import gc
    from importlib import import_module

    with _loading:
        collecting = gc.isenabled()
        gc.disable()
        try:
            # `torchrepro run` may apply its profile at the import of random, which must not happen
            # within an import of our own modules.
            import_module("random")
            return import_module(module)
        finally:
            if collecting:
                gc.enable()


def __dir__() -> list[str]:
    return [*__all__, *_SUBMODULES, "__version__"]
