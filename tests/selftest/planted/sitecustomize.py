"""Faults for the processes of a self-test, which import this as they start."""

import os
import sys
import time

FAULTS = {}


def fault(function):
    """Register a fault under the name of its function."""
    FAULTS[function.__name__] = function
    return function


@fault
def dropout_left_on():
    """The policy that zeroes dropout says that it does, and does nothing."""
    from torchrepro.policies import dropout

    object.__setattr__(dropout.policy, "install", lambda undo: None)


@fault
def write_that_does_not_hold():
    """A flag takes every value but one, which it does not keep."""
    from torchrepro.knobs.catalogue import knobs_by_name

    access = type(knobs_by_name()["backends.torch.default_dtype"].access)
    write = access.write

    def kept(self, value):
        if (self.setter, value) != ("set_default_dtype", "float64"):
            write(self, value)

    access.write = kept


@fault
def undo_that_forgets():
    """Variables of OpenMP stay as the profile has set them."""
    from torchrepro.knobs.knob import Variable

    restore = Variable.restore

    def restored(self, saved):
        if not self.name.startswith("OMP_"):
            restore(self, saved)

    Variable.restore = restored


@fault
def undo_that_leaves_another_variable():
    """The undo of a flag sets a variable that is not the flag's."""
    from torchrepro.knobs.catalogue import knobs_by_name

    access = type(knobs_by_name()["backends.torch.fill_uninitialized_memory"].access)
    restore = access.restore

    def restored(self, saved):
        restore(self, saved)
        if self.name == "fill_uninitialized_memory":
            os.environ["LEFT"] = os.environ["API_TOKEN"]

    access.restore = restored


@fault
def failure_that_lingers():
    """A promise fails with a secret in its error, and the next one fails in the same process."""
    from torchrepro.selftest import attempts

    failed = []

    def fails(trial, folder):
        failed.append(trial)
        raise RuntimeError("no access with " + os.environ["API_TOKEN"])

    def holds(trial, folder):
        assert not failed

    attempts.dropout_is_zeroed, attempts.fallback_goes_on = fails, holds


@fault
def crash():
    """The process says a secret and dies while it tries a promise."""
    from torchrepro.selftest import attempts

    def crashes(trial, folder):
        print("no access with", os.environ["API_TOKEN"], flush=True)
        os.abort()

    attempts.dropout_is_zeroed = crashes


@fault
def hang():
    """The process waits for minutes while it tries a promise, and leaves a file that says so."""
    from torchrepro.selftest import attempts

    def waits(trial, folder):
        (folder / "waits").touch()
        time.sleep(600)

    attempts.dropout_is_zeroed = waits


if "torchrepro.selftest.child" in sys.orig_argv:
    for name in filter(None, os.environ.get("PLANTED", "").split(",")):
        FAULTS[name]()
