"""Laws of the terminal's answer and of the JSON: short, plain, complete."""

import json
import math
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.ground.console import as_text
from torchrepro.trace.format import UNINITIALIZED_INPUT
from torchrepro.verdict.diagnosis import advice
from torchrepro.verdict.page import page
from torchrepro.verdict.render import (
    LINES,
    headline,
    source_line,
    verdict_parts,
)
from torchrepro.verdict.value import (
    Compared,
    Distance,
    Divergence,
    Edit,
    Element,
    Kind,
    Setting,
    Verdict,
)
from torchrepro.verification.perturbations import PERTURBATIONS
from torchrepro.verification.result import (
    ControlledRun,
    Run,
    StressResult,
    Verification,
    verification_parts,
)

from .test_diagnosis import CASES
from .verdicts import divergence, equal, side, unequal


def text_of(verdict: Verdict) -> str:
    """Return the output for a verdict without a terminal: short, and then in full."""
    with pytest.MonkeyPatch.context() as patched:
        short = as_text(*verdict_parts(verdict))
        patched.setenv("TORCHREPRO_VERBOSE", "1")
        return f"{short}\n-- in full\n{as_text(*verdict_parts(verdict))}"


LEFT, RIGHT = (f"({', '.join(['0.25'] * 90)}, lr={number}, fused=False)" for number in (1, 2))
VERDICTS = {
    "two equal runs": equal(),
    "equal within a tolerance": equal(tolerance=(1e-3, 1e-5)),
    "equal, recorded at level step": equal(compared=Compared(1, 1, 40, 1500, "step")),
    "equal under other settings": equal(
        settings=(Setting("version of torch", None, "2.13.0"),), notes=("B was killed.",)
    ),
    "two runs that diverge": unequal(),
    "no values are known": unequal(divergence()),
    "on a rank other than the first": unequal(divergence(rank=3)),
    "two long texts": unequal(
        divergence(
            *("aten::mul", Kind.ARGUMENT),
            what=f"{LEFT} and {RIGHT}",
            left=side(argument=LEFT),
            right=side(argument=RIGHT),
        )
    ),
    "an op that one run lacks": unequal(divergence(kind=Kind.ONLY_ONE, left=None)),
    "a run that ended earlier": unequal(
        divergence("", Kind.ENDED, what="B has 7 steps, A 12.", left=None, right=None)
    ),
    "one record passes it on": unequal(propagated=1),
    "memory that nothing wrote": unequal(
        divergence(left=side(input_fingerprints=(UNINITIALIZED_INPUT.hex(),)))
    ),
}


def test_a_verdict_is_shown_in_plain_words(golden: Any) -> None:
    """Short, and with what a reader acts on; fingerprints only if no values are known."""
    golden("terminal.txt", {name: text_of(verdict) for name, verdict in VERDICTS.items()})


LONG = "/home/somebody/projects/a-model/src/package/training/loop.py"
SETTINGS = tuple(Setting(f"backends.of.some.length{n}", "true", "false") for n in range(9))


def crowded(first: Divergence, settings: tuple[Setting, ...], meta: dict[str, object]) -> Verdict:
    """Return a verdict with all its fields, and with long names everywhere."""
    sides = (
        one
        and replace(
            one,
            run=f"/tmp/torchrepro-verify-b31d_lx9/{name}",
            argument=one.argument or f"([128, 1024], {name}, device=device(type='cpu'))" * 9,
            outputs=", ".join([one.outputs] * 9),
            input_fingerprints=tuple(f"{name}{number:014x}" for number in range(9)),
        )
        for one, name in ((first.left, "run-1"), (first.right, "run-2"))
    )
    names = ("left", "right")
    where = {"source": f"{LONG}:412", "what": first.what or "input 0 of this op is " * 9}
    more = replace(
        first,
        **where,
        **dict(zip(names, sides, strict=True)),
        elements=(Element("output 0", (0, 3, 17), "0.12345678", "0.12345679"),) * 9,
        distances=(Distance("output 0", 1.2e-7, 3.1e-6, 0.99999999),) * 9,
    )
    verdict = unequal(
        more,
        left="/tmp/torchrepro-verify-b31d_lx9/run-1",
        right="/tmp/torchrepro-verify-b31d_lx9/run-2",
        settings=(*settings, *SETTINGS),
        notes=("the states of torch, numpy differ from the end of step 7 on, " * 3,) * 9,
        by_module=tuple((f"encoder.layers.{n}.self_attention", 9000 + n) for n in range(90)),
        independent=77,
        across_ranks=("A: the parameters of ranks 0 and 1 agree at step 1",),
    )
    command = "python src/train.py --config configs/large.yaml --data /data/imagenet --lr 0.1"
    return replace(verdict, advice=advice(verdict, meta, command))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("equal", [True, False])
def test_an_answer_fits_15_lines(case: str, *, equal: bool) -> None:
    """For every divergence and re-run: 15 lines of 100 columns, with commands on one line."""
    first, settings, meta, *_ = CASES[case]
    verdict = crowded(first, settings, meta)
    assert verdict.advice is not None
    command = f"torchrepro verify seed-only {' '.join(['env.A=1'] * 30)} -- python train.py"
    edit = Edit(f"{LONG}:412", "loss = net(empty(3))", "loss = net(zeros(3))")
    advised = replace(verdict.advice, edit=edit, command=command * equal, tried="tried: the same")
    trials = [ControlledRun("seed-only", command, same=equal, runs=3, answer=headline(verdict))] * 4
    found = Verification(
        asked="bits",
        command="torchrepro run debug-strict -- python train.py --lr 0.1 --data /data/imagenet",
        profile="debug-strict",
        own_profile=None,
        runs=tuple(Run(f"run-{n}", "out", "log", 0, 1.0, 12, recorded=True) for n in (1, 2)),
        verdicts=(replace(verdict, advice=advised),),
        folder="/tmp/torchrepro-verify-b31d_lx9",
        stressed=StressResult(
            tuple(row.name for row in PERTURBATIONS),
            (("hash seed", "the profile sets PYTHONHASHSEED"), ("affinity", "there is one CPU")),
        ),
        tried=tuple(trials),
    )
    lines = as_text(*verification_parts(found)).splitlines()

    assert len(lines) <= LINES
    assert all(len(line) <= 100 for line in lines if command not in line and "  edit  " not in line)
    assert headline(verdict) in lines
    assert (f"    {command}" in lines) == equal


def test_uninitialized_memory_is_not_shown_as_a_fingerprint() -> None:
    """Its placeholder in a recording means nothing to a reader."""
    text = page(VERDICTS["memory that nothing wrote"])

    assert "(uninitialized)" in text
    assert UNINITIALIZED_INPUT.hex() not in text


@given(text=st.text(alphabet=st.characters(min_codepoint=0, max_codepoint=0x2FFF)))
def test_no_name_from_a_recording_controls_the_terminal(text: str) -> None:
    """Control characters and marks of text direction are escaped, whatever their source."""
    first = divergence(
        text, module=text, source=text, what=text, thread=text, left=side(outputs=text)
    )
    shown = text_of(unequal(first, settings=(Setting(text, text, None),), notes=(text,), left=text))

    assert all(line.isprintable() for line in shown.split("\n"))


def test_the_line_of_the_source_is_shown_if_it_can_be_read() -> None:
    """A line of this file is found, a line of a missing file is not."""
    assert source_line(f"{__file__}:1").startswith('"""Laws of the terminal')
    assert [source_line(each) for each in ("gone.py:3", "gone.py", "", ":1", "a:x")] == [""] * 5


def test_an_unpickled_verdict_is_shown_like_the_original() -> None:
    """A process that only unpickles a verdict shows it like the process that made it."""
    verdict = unequal()
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(verdict), capture_output=True, check=True
    )

    assert done.stdout.decode().rstrip("\n") == str(verdict).rstrip("\n")


def test_the_json_is_valid_and_has_the_documented_keys() -> None:
    """A verdict survives JSON; its map has only differing cells."""
    verdict = unequal()
    found = json.loads(json.dumps(verdict.to_json()))

    assert found["same"] is False
    keys = {"rank", "step", "phase", "module", "op", "source", "kind", "left", "right", "elements"}
    assert keys <= set(found["first"])
    assert found["first"]["kind"] == "equal inputs, unequal outputs"
    assert found["compared"]["ops"] == 11436
    assert found["advice"]["edit"]["after"] == "loss = net(zeros(3))"
    assert found["first"]["left"]["output_fingerprints"] == ["3f1c0000aaaabbbb3f1c0000aaaabbbb"]
    assert found["map"]
    assert all(cell["differing"] for cell in found["map"])
    assert equal().to_json()["first"] is None


@given(losses=st.lists(st.tuples(st.integers(0, 9), st.floats(), st.none() | st.floats())))
def test_no_number_breaks_the_json(losses: list[tuple[int, float, float | None]]) -> None:
    """NaN and infinities, which JSON lacks, become text; all other numbers stay."""
    text = json.dumps(equal(losses=tuple(losses)).to_json(), allow_nan=False)

    for (_, left, _), (_, again, _) in zip(losses, json.loads(text)["losses"], strict=True):
        assert again == (left if math.isfinite(left) else str(left))
