"""Passes the active profile to the workers of Ray, on every machine of the cluster.

A worker inherits the environment of the process that started Ray on the worker's machine. That may
be another process than this one. So the job's runtime environment contains the profile twice.
Variables are set before a worker's Python starts. Ray's set-up hook runs before the first task
(https://docs.ray.io/en/latest/ray-core/handling-dependencies.html#api-reference).

This module is imported once the program has imported Ray: see `torchrepro.WORKERS`. It wraps
`ray.init`, also in modules that imported `init` by name. The variable in `HOOK` names `add_profile`
only during this call, because a child Python without torchrepro would inherit the variable and fail
in `ray.init`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from torchrepro.application.launch import environment_for
from torchrepro.ground.console import say_once
from torchrepro.ground.errors import ApplyError, TorchreproError
from torchrepro.ground.patching import surround_everywhere, variables_restored
from torchrepro.profile.resolved import ResolvedProfile
from torchrepro.reporting.process_state import PROFILE

HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Ray's variable for the one function that may change the runtime environment of a job."""

FORMER = "TORCHREPRO_FORMER_RAY_HOOK"
"""Variable that keeps the former value of `HOOK` while `HOOK` names our function."""

_OURS = f"{__name__}.add_profile"
_SET_UP = "worker_process_setup_hook"
_SET_UP_OF_THE_JOB = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Ray's variable for the set-up hook of a submitted job; with a second hook Ray raises an error."""

_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's variable for a submitted job, whose runtime environment Ray merges before our hook."""

_NEEDED = ("init", "is_initialized", "get_runtime_context")  # the functions of Ray that we call

_APPLY_IN_WORKER = "torchrepro.start.bootstrap.apply_in_ray_worker"
_PASSED_VARIABLES = (
    *("TORCHREPRO_SEED", "TORCHREPRO_FIRST", "TORCHREPRO_RECORD", "TORCHREPRO_AT_START"),
    *("TORCHREPRO_QUIET", "TORCHREPRO_VERBOSE"),
)


class _Scope(NamedTuple):
    """A profile for workers, and the function to call if the profile cannot reach the workers."""

    resolved: Callable[[], ResolvedProfile]
    refuse: Callable[[TorchreproError], None]


class _Driver:
    """The profiles that this process passes to Ray's workers, and the wrapper of `ray.init`.

    The only object of this class lives as long as the process. `reach_workers` adds a profile, and
    the returned function removes it. `ray.init` is wrapped while there is a profile.
    """

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []  # innermost last
        self.is_wrapping = False
        self._undo = ExitStack()

    def wrap_init(self, ray: Any) -> None:
        """Wrap `ray.init`, unless it is wrapped already or this module is not Ray."""
        missing = [name for name in _NEEDED if not callable(vars(ray).get(name))]
        if missing and hasattr(ray, "remote"):
            version = getattr(ray, "__version__", "")
            say_once(f"ray {version} has no {missing[0]}: its workers may not be under the profile")
        if not missing and not self.is_wrapping:
            self.is_wrapping = True
            surround_everywhere(self._undo, ray, "init", partial(_init_with_profile, ray))

    def leave(self, scope: _Scope) -> None:
        """Remove a profile, and the wrapper with the last one."""
        self.scopes.remove(scope)
        if not self.scopes:
            self.is_wrapping = False
            self._undo.close()


_driver = _Driver()


def reach_workers(
    resolved: Callable[[], ResolvedProfile], refuse: Callable[[TorchreproError], None]
) -> Callable[[], None]:
    """Pass `resolved` to all workers of Ray that start from now on, and return the undo function.

    Prints a warning if `ray.init` was called before. If the profile is strict and a later
    `ray.init` cannot pass it to the workers, `refuse` is called.
    """
    scope = _Scope(resolved, refuse)
    _driver.scopes.append(scope)
    _driver.wrap_init(sys.modules["ray"])
    if _lacks_profile(sys.modules["ray"], scope):
        say_once(
            f"workers of Ray are not under {resolved().name}: ray.init was called before\n"
            "  to do: apply the profile before ray.init, or call ray.shutdown first"
        )
    return partial(_driver.leave, scope)


def _init_with_profile(ray: Any, init: Any, *args: Any, **kwargs: Any) -> Any:
    if not _driver.scopes:
        return init(*args, **kwargs)
    address = args[0] if args else kwargs.get("address")
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS")
    if "://" in (address or ""):
        why = "Ray runs no set-up hook for a client"
        _refuse_or_warn(why, "start the driver on the cluster itself")
        return init(*args, **kwargs)
    with ExitStack() as during_init:
        if not ray.is_initialized():
            submitted = _SUBMITTED in os.environ
            if submitted or os.environ.get(HOOK):  # the former hook may drop our entries
                during_init.enter_context(variables_restored((HOOK, FORMER)))
                os.environ[FORMER], os.environ[HOOK] = os.environ.get(HOOK, ""), _OURS
            if not submitted:
                # Ray calls no hook for a driver that `uv run` started, and drops a runtime
                # environment of `job_config` if a hook returns one.
                job = kwargs.get("job_config")
                given = kwargs.get("runtime_env") or getattr(job, "runtime_env", None)
                kwargs = {**kwargs, "runtime_env": _with_profile(given)}
        result = init(*args, **kwargs)
    if _lacks_profile(ray, _driver.scopes[-1]):
        _refuse_or_warn(
            "Ray was started before the profile, or dropped its runtime environment",
            "call ray.shutdown before ray.init, so that a new job starts",
        )
    return result


def add_profile(runtime_env: Mapping[str, Any] | None = None) -> Any:
    """Return the `runtime_env` of a job with the entries that apply the profile in the workers.

    Ray calls this hook in `ray.init` for a submitted job, or if the variable in `HOOK` named
    another hook before. The other hook is called first.
    """
    former = os.environ.get(FORMER)
    if former:
        module, _, name = former.rpartition(".")  # the same rule as in Ray
        runtime_env = getattr(import_module(module), name)(runtime_env)
    return _with_profile(runtime_env)


def _with_profile(runtime_env: Mapping[str, Any] | None) -> Any:
    if not _driver.scopes:
        return runtime_env  # a process that Ray started during `ray.init`
    given = dict(runtime_env or {})
    theirs = dict(given.get("env_vars") or {})
    try:
        resolved = _driver.scopes[-1].resolved()
        ours = _variables(resolved)
    except TorchreproError as error:
        _driver.scopes[-1].refuse(error)
        return runtime_env
    against = [
        f"{knob.variable} is {theirs[knob.variable]} in it, and the profile wants {value}"
        for knob, value in resolved.settings()
        if knob.variable in theirs
        and theirs[knob.variable] not in (value, ours.get(knob.variable))
        and not (knob.enough and knob.enough(theirs[knob.variable]))
    ]
    if against:  # the program's variables for workers win over the profile
        why = f"env_vars in the program's runtime_env differ from it: {'; '.join(against)}"
        todo = "remove the variable from runtime_env, or override the profile"
        _refuse_or_warn(why, todo, extent="fully ")
    set_up = given.get(_SET_UP)
    if theirs.get(PROFILE) == ours[PROFILE] and getattr(set_up, "__module__", "") == __name__:
        return runtime_env  # our wrapper of `ray.init` has added the profile already
    if _SET_UP_OF_THE_JOB in theirs:
        why = f"the submitted job has a {_SET_UP}, and Ray accepts only one"
        _refuse_or_warn(why, f"call {_APPLY_IN_WORKER} in it")
        return runtime_env
    always = {name: ours[name] for name in (PROFILE, *_PASSED_VARIABLES) if name in ours}
    return {
        **given,
        "env_vars": {**ours, **theirs, **always},
        _SET_UP: _set_up_hook(resolved.name, resolved.strict, set_up),
    }


def _variables(resolved: ResolvedProfile) -> dict[str, str]:
    environment = environment_for(resolved)
    names = (*resolved.environment(), *_PASSED_VARIABLES, PROFILE)
    chosen = {name: environment[name] for name in names if name in environment}
    # Ray expands $NAME in values; JSON's escape for the dollar sign prevents it.
    document = json.dumps(json.loads(chosen[PROFILE]), sort_keys=True)
    return {**chosen, PROFILE: document.replace("$", "\\u0024")}


def _refuse_or_warn(why: str, todo: str, extent: str = "") -> None:
    """Report that workers do not run under the innermost profile.

    Calls `refuse` if the profile is strict, otherwise prints a warning. If `extent` is "fully ",
    reports that only part of the profile reaches the workers.
    """
    scope = _driver.scopes[-1]
    resolved = scope.resolved()
    words = f"workers of Ray are not {extent}under {resolved.name}: {why}\n  to do: {todo}"
    if resolved.strict:
        scope.refuse(ApplyError(words))
    else:
        say_once(words)


def _set_up_hook(name: str, strict: bool, former: Any) -> Callable[[], None]:  # noqa: FBT001
    """Return the set-up hook. Ray sends the hook's code, so it also runs without torchrepro."""

    module, _, function = _APPLY_IN_WORKER.rpartition(".")
    hook, its_former, ours = HOOK, FORMER, _OURS

    def enter() -> None:
        import os
        import sys
        from importlib import import_module

        if os.environ.get(hook) == ours:  # inherited from the Ray that `ray.init` started
            os.environ[hook] = os.environ.pop(its_former, "")
            if not os.environ[hook]:
                del os.environ[hook]
        try:
            apply_profile = getattr(import_module(module), function)
        except (ImportError, SyntaxError) as error:
            words = (
                f"torchrepro: this worker of Ray is not under {name}: {sys.executable} cannot "
                f"import torchrepro: {error}"
            )
            if strict:
                raise RuntimeError(words) from None
            sys.stderr.write(words + "\n")
        else:
            apply_profile()
        if callable(former):
            former()
        elif former:
            path = former.rpartition(".")
            getattr(import_module(path[0]), path[2])()

    return enter


def _lacks_profile(ray: Any, scope: _Scope) -> bool:
    if not _driver.is_wrapping or not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    mode = getattr(getattr(context, "worker", None), "mode", None)
    if mode == getattr(ray, "WORKER_MODE", 1):
        return False
    text = (dict(context.runtime_env or {}).get("env_vars") or {}).get(PROFILE, "")
    return not text or ResolvedProfile.from_json(json.loads(text)).digest != scope.resolved().digest
