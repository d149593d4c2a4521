"""What is told to people reaches them, or nobody, and never stops a program."""

import sys

from torchrepro.ground.console import say, show_aside, table


def test_a_process_without_standard_error_is_told_nothing(monkeypatch):
    """Where standard error is closed, as in some services, telling it something raises nothing."""
    monkeypatch.setattr(sys, "stderr", None)

    say("one", "two")
    show_aside("head", table(("a",), [("b",)]))


def test_each_line_names_who_says_it(capsys):
    """Every line on standard error begins with the name of the package."""
    say("one", ValueError("two"))

    assert capsys.readouterr().err == "torchrepro: one\ntorchrepro: two\n"
