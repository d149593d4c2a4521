"""What answers look like where a notebook shows them."""

from html.parser import HTMLParser

import pytest
import torch

import torchrepro

MARKUP = "[red]a[/red] <script>alert</script> & more"


class Tags(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


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
        page = Tags(answer._repr_html_())

        assert page.tags <= {"pre", "span", "a"}, kind
        assert page.text.split() == str(answer).split(), kind
        assert "script>" in page.text, kind
