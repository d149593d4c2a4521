"""What is told to people reaches them, or nobody, and never stops a program."""

import pickle
import sys
from dataclasses import dataclass

from torchrepro.console import Displayed, as_text, parts, say, show_aside, table


def test_a_process_without_standard_error_is_told_nothing(monkeypatch):
    """Where standard error is closed, as in some services, telling it something raises nothing."""
    monkeypatch.setattr(sys, "stderr", None)

    say("one", "two")
    show_aside("head", table(("a",), [("b",)]))


def test_each_line_names_who_says_it(capsys):
    """Every line on standard error begins with the name of the package."""
    say("one", ValueError("two"))

    assert capsys.readouterr().err == "torchrepro: one\ntorchrepro: two\n"


@dataclass(frozen=True, slots=True)
class _Answer(Displayed):
    number: int


def test_a_value_is_shown_as_its_maker_says():
    """A value that nobody renders shows its fields; one that its maker renders is shown so."""
    before = str(_Answer(7))
    parts.register(_Answer, lambda answer: (table(("number",), [(answer.number,)]),))

    assert before == "_Answer(number=7)"
    assert str(pickle.loads(pickle.dumps(_Answer(7)))) == as_text("number", "7")
