"""One declared profile makes a PyTorch run reproducible, says what happened, and undoes it.

Importing this package imports neither torch nor hydra: every public name is loaded when it is
first used, so that a profile can still set what is fixed while torch loads.
"""

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost 5 ms

if TYPE_CHECKING:
    from torchrepro.applier import Applied as Applied
    from torchrepro.applier import apply as apply
    from torchrepro.errors import ApplyError as ApplyError
    from torchrepro.errors import LateError as LateError
    from torchrepro.errors import ProfileError as ProfileError
    from torchrepro.errors import TorchreproError as TorchreproError
    from torchrepro.planner import Plan as Plan
    from torchrepro.planner import plan as plan
    from torchrepro.profile.load import load as load
    from torchrepro.profile.schema import Profile as Profile
    from torchrepro.report import Outcome as Outcome
    from torchrepro.report import Report as Report

_HOME = {
    "Applied": "torchrepro.applier",
    "ApplyError": "torchrepro.errors",
    "LateError": "torchrepro.errors",
    "Outcome": "torchrepro.report",
    "Plan": "torchrepro.planner",
    "Profile": "torchrepro.profile.schema",
    "ProfileError": "torchrepro.errors",
    "Report": "torchrepro.report",
    "TorchreproError": "torchrepro.errors",
    "apply": "torchrepro.applier",
    "load": "torchrepro.profile.load",
    "plan": "torchrepro.planner",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above is the one list of public names


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("torchrepro")
    if name not in _HOME:
        raise AttributeError(f"module 'torchrepro' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
