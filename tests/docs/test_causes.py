"""Each cause that a verdict can name has a page, whose program gets that cause from `verify`.

The programs run in forks of Pythons that have torch. Those differ in their hash seeds and
addresses, as processes do, and take turns. `blocks.py` says how a page marks what a program needs.
"""

import os
import shlex
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch

from torchrepro.cli import main, run_commands
from torchrepro.ground.console import as_text
from torchrepro.seeding.nondeterministic_calls import (
    EVERY_SOURCE,
    FILE_IF_THERE,
    FORKED_DRAWS,
    SUSPECTS,
    UNINITIALIZED_MEMORY,
    WORKER,
)
from torchrepro.verdict.cause_pages import cause_pages
from torchrepro.verdict.diagnosis import PAGES, RULES
from torchrepro.verification import runner
from torchrepro.verification.perturbations import EVERYTHING

from .blocks import REPO, blocks
from .test_blocks import shows, without_gaps

FOLDER = REPO / "docs" / "causes"
NAMES = sorted({*(rule.page for rule in RULES), *PAGES.values()})
HAS = {
    "another machine": torch.cpu._is_avx2_supported(),  # one whose torch has no vector extension
    "a process to kill": True,  # not a fork, of which a test would wait for the status
    "bfloat16 instructions": torch.cpu._is_avx512_bf16_supported(),
    "a CUDA device": torch.cuda.is_available(),
    "an Ascend device": hasattr(torch, "npu"),
}
"""What a page can say that its program needs -> whether it is here."""


def _blocks(name):
    """Return the program and the dialogue of a page."""
    program, dialogue = (
        block for block in blocks(FOLDER / f"{name}.md") if block.marks.get("cause") == name
    )
    return program, dialogue


@pytest.fixture(scope="module")
def two_pythons(forks):
    """Two Pythons that have torch, with other hash seeds: each forks to run a program."""
    with forks(PYTHONHASHSEED="1") as one, forks(PYTHONHASHSEED="2") as two:
        yield one, two


@pytest.fixture(scope="module")
def pythons_of_two_machines(forks, tmp_path_factory):
    """A Python whose torch computes with AVX2, and one whose torch has no vector extension."""
    program = tmp_path_factory.mktemp("machine") / "look.py"
    program.write_text("import torch\ntorch.backends.cpu.get_cpu_capability()\n", encoding="utf-8")
    with (
        forks(program, ATEN_CPU_CAPABILITY="avx2") as wide,
        forks(program, ATEN_CPU_CAPABILITY="default") as plain,
    ):
        yield wide, plain


@pytest.fixture
def verified(fork, two_pythons, request, monkeypatch, tmp_path, clean_process, capsys):
    """Run the dialogue of a page; return its exit status, output, and answer as JSON."""
    answers = []
    answered = run_commands._verified

    def kept(*arguments):
        answers.append(answered(*arguments))
        return answers[-1]

    def verified(program, dialogue):
        Path("train.py").write_text(f"{program.text}\n", encoding="utf-8")
        needs = program.marks.get("needs", "")
        turns = cycle(two_pythons)
        if needs == "another machine":
            turns = cycle(request.getfixturevalue("pythons_of_two_machines"))

        def run(found, command, environment, log, limit, look):
            log.write_bytes(b"")
            # Profiles and pins that fix the hash seed fix it at 0, as that of `fork` is.
            python = fork if "PYTHONHASHSEED" in environment else next(turns)
            return python(command[1:], environment, Path.cwd(), (os.devnull, log, log))

        if needs != "a process to kill":
            monkeypatch.setattr(runner, "run_to_end", run)
        command = dialogue.text.partition("\n")[0].removeprefix("$ torchrepro ")
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command))
        (_, document, *_), said = answers[0], capsys.readouterr().out
        return ended.value.code, said, document

    monkeypatch.setattr(run_commands, "_verified", kept)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # a name of this machine is not looked up
    monkeypatch.chdir(tmp_path)
    return verified


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_program_of_a_page_gets_the_verdict_of_the_page(name, verified):
    """`verify` names the cause of the page, in JSON too, and prints what the page shows."""
    program, dialogue = _blocks(name)
    needs = program.marks.get("needs")
    if needs and not HAS[needs]:
        pytest.skip(f"needs {needs}")
    status, said, document = verified(program, dialogue)

    assert (status, document["advice"]["cause_id"]) == (1, name), said
    expected = without_gaps(dialogue.text.splitlines()[1:])
    assert shows(expected, without_gaps(said.splitlines())), said


def test_every_cause_that_a_verdict_can_name_has_a_page():
    """Each rule, source, perturbation and kind of lost state names a page, and no page is left."""
    sources = {row.what for row in (*EVERY_SOURCE, *FORKED_DRAWS, FILE_IF_THERE)}
    sources |= {*SUSPECTS, UNINITIALIZED_MEMORY, WORKER}

    assert {*sources, *EVERYTHING} - PAGES.keys() == set()
    assert [*cause_pages()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_what_a_reader_looks_for(name):
    """Each has a program of few lines, a verdict that ends with its name, a fix and a source."""
    program, dialogue = _blocks(name)
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")

    assert (program.language, dialogue.language) == ("python", "console")
    assert program.text.count("\n") < 25
    assert f"[{name}]" in dialogue.text
    assert "## Fix" in text
    assert "](https://" in text.partition("## Why")[2]
    assert set(program.marks) <= {"cause", "needs"}
    assert program.marks.get("needs", "a CUDA device") in HAS


def test_the_index_leads_to_every_page():
    """A row of its table links each page, beside what a reader sees."""
    text = (FOLDER / "index.md").read_text(encoding="utf-8")

    assert [name for name in NAMES if f"]({name}.md) |" not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_explain_prints_the_page(name, command, answer):
    """`torchrepro explain NAME` prints the page without its comments, and `--json` has it too."""
    status, out, err = command("explain", name)
    page = cause_pages()[name]

    assert (status, out.rstrip("\n"), err) == (0, as_text(page.text).rstrip("\n"), "")
    assert "<!--" not in out
    assert answer("explain", name) == (0, [page._asdict()])


def test_explain_without_a_name_lists_every_cause(command):
    """Each row has a cause and the title of its page."""
    _, out, _ = command("explain")

    assert [line.split()[0] for line in out.splitlines()[1:]] == NAMES


def test_a_wrong_name_gets_the_nearest_cause(command):
    """An unknown name is a user's mistake: one sentence, and the name that may be meant."""
    status, out, err = command("explain", "set-ordr")

    assert (status, out) == (2, "")
    assert "set-order" in err
    assert "Traceback" not in err
