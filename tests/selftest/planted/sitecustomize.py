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
    """A flag keeps the value that it has, whatever is written."""
    from torchrepro.knobs.catalogue import knobs_by_name

    access = type(knobs_by_name()["backends.torch.default_dtype"].access)
    write = access.write

    def kept(self, value):
        if self.setter != "set_default_dtype":
            write(self, value)

    access.write = kept


@fault
def undo_that_forgets():
    """A variable stays as the profile has set it."""
    from torchrepro.knobs.knob import Variable

    Variable.restore = lambda self, saved: None


@fault
def crash():
    """The process dies while it tries a promise."""
    from torchrepro.selftest import attempts

    attempts.dropout_is_zeroed = lambda trial, folder: os.abort()


@fault
def hang():
    """The process waits for minutes while it tries a promise."""
    from torchrepro.selftest import attempts

    attempts.dropout_is_zeroed = lambda trial, folder: time.sleep(600)


if "torchrepro.selftest.child" in sys.orig_argv:
    for name in filter(None, os.environ.get("PLANTED", "").split(",")):
        FAULTS[name]()
