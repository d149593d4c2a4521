"""Hands the profile in force to the workers of Ray, wherever Ray starts them.

A worker inherits the environment of whoever started Ray on its machine. For a cluster that runs
already that is not this process. So the profile travels in Ray's runtime environment, which comes
with the job: as variables, which are there before a worker's Python starts, and as Ray's set-up
hook, which runs in each worker before the first task
(https://docs.ray.io/en/latest/ray-core/handling-dependencies.html#api-reference).

Ray is never imported here. `ray.init` is wrapped once the program has imported Ray, also where it
has been imported by its name. Ray's variable for a hook names `add_profile` during that call at
most: a Python without torchrepro that this process starts would inherit it, and fail in its own
`ray.init`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.imports import AfterImport
from torchrepro.ground.patching import surround_everywhere, variables_put_back

if TYPE_CHECKING:
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.profile.resolved import ResolvedProfile

HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Ray's variable for the one function that may change the runtime environment of a job."""

FORMER = "TORCHREPRO_FORMER_RAY_HOOK"
"""Variable that keeps what `HOOK` named before, while it names ours."""

_OURS = f"{__name__}.add_profile"
_SET_UP = "worker_process_setup_hook"
_SET_UP_OF_THE_JOB = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Where Ray keeps the set-up hook of a submitted job; another one beside it is an error there."""

_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set for a job that was submitted to Ray, whose runtime environment Ray merges before our hook."""

_NEEDED = ("init", "is_initialized", "get_runtime_context")  # what is called of Ray

_ENTER = "torchrepro.start.bootstrap.put_in_force_in_worker"
_PASSED = (
    *("TORCHREPRO_SEED", "TORCHREPRO_FIRST", "TORCHREPRO_RECORD", "TORCHREPRO_AT_START"),
    *("TORCHREPRO_QUIET", "TORCHREPRO_VERBOSE"),
)


class _Scope(NamedTuple):
    """A profile that workers get, and what is done where they cannot."""

    resolved: Callable[[], ResolvedProfile]
    refuse: Callable[[TorchreproError], None]


_scopes: list[_Scope] = []  # innermost last
_undo: list[ExitStack] = []  # what was done to Ray, while it is


def reach_workers(
    resolved: Callable[[], ResolvedProfile], refuse: Callable[[TorchreproError], None]
) -> Callable[[], None]:
    """Have workers of Ray that are started from now on get `resolved`; return the undo.

    Nothing changes until Ray is imported. Workers that a strict profile cannot reach go to
    `refuse`, and otherwise to standard error.
    """
    scope = _Scope(resolved, refuse)
    _scopes.append(scope)
    if "ray" in sys.modules:
        _attach("ray")
        if _is_job_without(sys.modules["ray"], resolved()):
            from torchrepro.ground.console import say_once

            say_once(
                f"workers of Ray are not under {resolved().name}: ray.init was called before\n"
                "  to do: put the profile in force before ray.init, or call ray.shutdown first"
            )
    else:
        _waiting.watch()

    def leave() -> None:
        _scopes.remove(scope)
        if not _scopes:
            _waiting.unwatch()
            while _undo:
                _undo.pop().close()

    return leave


def _attach(module: str) -> None:
    ray = sys.modules[module]
    lacking = [name for name in _NEEDED if not callable(vars(ray).get(name))]
    if lacking and hasattr(ray, "remote"):
        from torchrepro.ground.console import say_once

        version = getattr(ray, "__version__", "")
        say_once(f"ray {version} has no {lacking[0]}: its workers may not be under the profile")
    if lacking or _undo:
        return
    _undo.append(ExitStack())
    surround_everywhere(_undo[0], ray, "init", partial(_init_with_profile, ray))


_waiting = AfterImport(["ray"], _attach)


def _init_with_profile(ray: Any, init: Any, *args: Any, **kwargs: Any) -> Any:
    if not _scopes:
        return init(*args, **kwargs)
    address = args[0] if args else kwargs.get("address")
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS")
    if "://" in (address or ""):
        why = "Ray runs no set-up hook for a client"
        _refuse_or_say(why, "start the driver on the cluster itself")
        return init(*args, **kwargs)
    with ExitStack() as meanwhile:
        if not ray.is_initialized():
            submitted = _SUBMITTED in os.environ
            if submitted or os.environ.get(HOOK):  # which may drop what it is given
                meanwhile.enter_context(variables_put_back((HOOK, FORMER)))
                os.environ[FORMER], os.environ[HOOK] = os.environ.get(HOOK, ""), _OURS
            if not submitted:
                # Ray calls no hook for a driver that `uv run` started, and drops a runtime
                # environment of `job_config` where a hook returns one.
                job = kwargs.get("job_config")
                given = kwargs.get("runtime_env") or getattr(job, "runtime_env", None)
                kwargs = {**kwargs, "runtime_env": _with_profile(given)}
        result = init(*args, **kwargs)
    if _is_job_without(ray, _scopes[-1].resolved()):
        _refuse_or_say(
            "Ray was started before the profile, or dropped what came with it",
            "call ray.shutdown before ray.init, so that the job begins anew",
        )
    return result


def add_profile(runtime_env: Mapping[str, Any] | None = None) -> Any:
    """Return `runtime_env` of a job with what puts the profile in force in its workers.

    Ray calls this hook in `ray.init`, for a submitted job and where there was a hook before, which
    is called first.
    """
    former = os.environ.get(FORMER)
    if former:
        module, _, name = former.rpartition(".")  # as Ray finds a hook
        runtime_env = getattr(import_module(module), name)(runtime_env)
    return _with_profile(runtime_env)


def _with_profile(runtime_env: Mapping[str, Any] | None) -> Any:
    if not _scopes:
        return runtime_env  # a process that Ray has started meanwhile
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.reporting.process_state import PROFILE

    given = dict(runtime_env or {})
    theirs = dict(given.get("env_vars") or {})
    try:
        resolved = _scopes[-1].resolved()
        ours = _variables(resolved)
    except TorchreproError as error:
        _scopes[-1].refuse(error)
        return runtime_env
    against = [
        f"{knob.variable} is {theirs[knob.variable]} there, and the profile wants {value}"
        for knob, value in resolved.settings()
        if knob.variable in theirs
        and theirs[knob.variable] not in (value, ours.get(knob.variable))
        and not (knob.enough and knob.enough(theirs[knob.variable]))
    ]
    if against:  # what the program gives to workers wins over the profile
        why = f"env_vars in the program's runtime_env differ from it: {'; '.join(against)}"
        todo = "take it out of runtime_env, or override the profile"
        _refuse_or_say(why, todo, extent="wholly ")
    set_up = given.get(_SET_UP)
    if theirs.get(PROFILE) == ours[PROFILE] and getattr(set_up, "__module__", "") == __name__:
        return runtime_env  # it has come through `ray.init` already
    if _SET_UP_OF_THE_JOB in theirs:
        why = f"the submitted job has a {_SET_UP}, and Ray takes no other beside it"
        _refuse_or_say(why, f"call {_ENTER} in it")
        return runtime_env
    always = {name: ours[name] for name in (PROFILE, *_PASSED) if name in ours}
    return {
        **given,
        "env_vars": {**ours, **theirs, **always},
        _SET_UP: _entering(resolved.name, resolved.strict, set_up),
    }


def _variables(resolved: ResolvedProfile) -> dict[str, str]:
    from torchrepro.application.launch import environment_for
    from torchrepro.application.planner import make_plan
    from torchrepro.reporting.process_state import PROFILE

    environment = environment_for(make_plan(resolved, closed={}))
    names = (*resolved.environment(), *_PASSED, PROFILE)
    chosen = {name: environment[name] for name in names if name in environment}
    # Ray replaces $NAME by the value of a variable, which JSON has another spelling to prevent.
    document = json.dumps(json.loads(chosen[PROFILE]), sort_keys=True)
    return {**chosen, PROFILE: document.replace("$", "\\u0024")}


def _refuse_or_say(why: str, todo: str, extent: str = "") -> None:
    """Say that workers are not under the innermost profile; a strict one is refused.

    `extent` says how far they are not, in a word.
    """
    from torchrepro.ground.console import say_once
    from torchrepro.ground.errors import ApplyError

    scope = _scopes[-1]
    resolved = scope.resolved()
    words = f"workers of Ray are not {extent}under {resolved.name}: {why}\n  to do: {todo}"
    if resolved.strict:
        scope.refuse(ApplyError(words))
    else:
        say_once(words)


def _entering(name: str, strict: bool, former: Any) -> Callable[[], None]:  # noqa: FBT001
    """Return the set-up hook. Ray sends its code, so it runs where no torchrepro is installed."""

    module, _, function = _ENTER.rpartition(".")
    hook, its_former, ours = HOOK, FORMER, _OURS

    def enter() -> None:
        import os
        import sys
        from importlib import import_module

        if os.environ.get(hook) == ours:  # inherited from a Ray that `ray.init` has started
            os.environ[hook] = os.environ.pop(its_former, "")
            if not os.environ[hook]:
                del os.environ[hook]
        try:
            put_in_force = getattr(import_module(module), function)
        except (ImportError, SyntaxError) as error:
            words = (
                f"torchrepro: this worker of Ray is not under {name}: {sys.executable} cannot "
                f"import torchrepro: {error}"
            )
            if strict:
                raise RuntimeError(words) from None
            sys.stderr.write(words + "\n")
        else:
            put_in_force()
        if callable(former):
            former()
        elif former:
            path = former.rpartition(".")
            getattr(import_module(path[0]), path[2])()

    return enter


def _is_job_without(ray: Any, resolved: ResolvedProfile) -> bool:
    if not _undo or not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    mode = getattr(getattr(context, "worker", None), "mode", None)
    if mode == getattr(ray, "WORKER_MODE", 1):
        return False
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.reporting.process_state import PROFILE

    text = (dict(context.runtime_env or {}).get("env_vars") or {}).get(PROFILE, "")
    return not text or ResolvedProfile.from_json(json.loads(text)).digest != resolved.digest
