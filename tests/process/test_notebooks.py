"""What answers look like where a notebook shows them."""

import re
from html import unescape

import pytest
import torch

import torchrepro

MARKUP = "[red]a[/red] <script>alert</script> & more"


@pytest.fixture
def answers(tmp_path):
    """One of every kind of answer, each of which holds a text of the user's."""
    with torchrepro.apply({"name": MARKUP, "seed": 1}) as applied:
        shown = {"applied": applied, "report": applied.report}
    for name in ("one", "three"):
        with torchrepro.record(tmp_path / f"{name} {MARKUP.replace('/', '-')}"):
            torch.ones(len(name))  # </script>
            torchrepro.end_step()
    one, two = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    return {
        **shown,
        "plan": torchrepro.plan({"name": MARKUP, "seed": 1}),
        "verdict": torchrepro.compare(one, two),
    }


def test_answers_show_themselves(answers):
    """The HTML of an answer says what its text says, and holds no markup of the user's."""
    for kind, answer in answers.items():
        page = answer._repr_html_()
        text = unescape(re.sub("<[^>]*>", "", page))

        assert {*re.findall(r"</?(\w+)", page)} <= {"pre", "span", "a"}, kind
        assert text.split() == str(answer).split(), kind
        assert "script>" in text, kind
