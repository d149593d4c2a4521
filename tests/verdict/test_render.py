"""Laws of the terminal's answer and of the JSON: short, plain, complete."""

import json
import math
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.console import as_text
from torchrepro.trace.format import UNINITIALISED
from torchrepro.verdict.diagnosis import next_level
from torchrepro.verdict.page import page
from torchrepro.verdict.render import size, source_line, verdict_json, verdict_parts
from torchrepro.verdict.value import Compared, Divergence, Kind, Setting, Verdict

from .verdicts import divergence, equal, parted, side

LONGEST = 25


def told(verdict: Verdict) -> str:
    """Return a verdict as a pipe shows it, with the level that comes next."""
    level = next_level({}, verdict.first) if verdict.first else None
    return as_text(*verdict_parts(verdict, level))


def test_the_same_is_one_line_that_says_how_much_was_compared() -> None:
    """Nothing is to be read where nothing differs."""
    assert told(equal()) == (
        "the same: 2 ranks, 100 steps, 95,300 ops, 118 GB of tensors read, bit for bit"
    )


def test_the_certainty_is_that_of_the_comparison() -> None:
    """A tolerance and a coarser recording are said."""
    tolerant = told(equal(tolerance=(1e-3, 1e-5)))
    coarse = told(equal(compared=Compared(1, 1, 40, 1500, "step")))

    assert "within rtol=0.001, atol=1e-05" in tolerant
    assert "bit for bit" not in tolerant
    assert coarse == (
        "the same: 1 step, 40 records, 1.5 kB of tensors read (recorded at level step), bit for bit"
    )


def test_what_differs_though_the_runs_are_the_same_is_said() -> None:
    """Settings that made no difference, and notes, come below the answer."""
    text = told(
        equal(settings=(Setting("version of torch", None, "2.13.0"),), notes=("B was killed.",))
    )

    assert "version of torch: A not set   B 2.13.0" in text
    assert "B was killed." in text
    assert "digest" not in text


def test_all_that_is_known_of_a_divergence_is_told_in_a_screen() -> None:
    """Place, op, source, shapes, fingerprints, elements, spread, cause, knob, level, command."""
    verdict = parted()
    text = told(verdict)

    first = verdict.first
    assert first is not None
    assert first.left is not None
    assert first.right is not None
    assert verdict.advice is not None
    for word in (
        *("step 7", "forward", first.module, first.op, first.kind, first.what, first.source),
        *(first.left.outputs, *first.left.output_fingerprints, *first.right.output_fingerprints),
        *("0.12345678", "0.12345679", "[0, 3, 17]", "1.2e-07", "cosine", "1,204", "head (12)"),
        *(verdict.advice.cause, verdict.advice.setting, verdict.advice.closer, "seeds: seed=1234"),
        *(verdict.left, verdict.right, "env.OMP_NUM_THREADS", "11,436 ops", "B was killed"),
    ):
        assert word in text
    assert len(text.splitlines()) <= LONGEST


def test_much_of_everything_still_fits_on_a_screen() -> None:
    """Long lists are cut, and what is left out is counted."""
    verdict = parted()
    first = verdict.first
    assert first is not None
    many = tuple(f"{number:032x}" for number in range(90))
    crowded = replace(
        verdict,
        first=replace(
            first,
            elements=first.elements * 9,
            left=side(output_fingerprints=many, argument="x" * 900),
            right=side(output_fingerprints=many[::-1], argument="y" * 900),
        ),
        by_module=tuple((f"layers.{n}", n) for n in range(90)),
        settings=tuple(Setting(f"package{n}", "1", "2") for n in range(90)),
        notes=verdict.notes * 90,
    )
    lines = told(crowded).splitlines()

    assert len(lines) <= LONGEST + 10
    assert any("86 more" in line for line in lines)
    assert max(map(len, lines)) <= 240


def test_an_op_that_one_run_lacks_is_told_with_the_run_that_has_it() -> None:
    """Nothing is compared with what is not there."""
    text = told(parted(divergence(kind=Kind.ONLY_ONE, left=None)))

    assert "only in       B" in text
    assert "wrote" not in text


def test_a_run_that_ended_earlier_is_told_as_such() -> None:
    """No op is blamed where one run has no more of them."""
    first = divergence("", Kind.ENDED, what="B has 7 steps, A 12.", left=None, right=None)
    text = told(parted(first))

    assert text.splitlines()[0].startswith("not the same: one run ended earlier, at step 7")
    assert "B has 7 steps" in text
    assert "afterwards" not in text


def test_memory_that_nothing_wrote_is_not_shown_as_a_fingerprint() -> None:
    """What stands for it in a recording means nothing to a reader."""
    empty = UNINITIALISED.hex()
    first = divergence(left=side(input_fingerprints=(empty,)))
    text = told(parted(first)) + page(parted(first))

    assert text.count("(never written)") == 2
    assert empty not in text


@given(text=st.text(alphabet=st.characters(min_codepoint=0, max_codepoint=0x2FFF)))
def test_no_name_from_a_recording_steers_the_terminal(text: str) -> None:
    """Control characters and marks of direction are written out, wherever they come from."""
    first = divergence(
        text, module=text, source=text, what=text, thread=text, left=side(outputs=text)
    )
    shown = told(parted(first, settings=(Setting(text, text, None),), notes=(text,), left=text))

    assert all(line.isprintable() for line in shown.split("\n"))


def test_the_line_of_the_source_is_shown_if_it_can_be_read() -> None:
    """A line of this very file is found, one of a file that is gone is not."""
    assert source_line(f"{__file__}:1").startswith('"""Laws of the terminal')
    assert [source_line(each) for each in ("gone.py:3", "gone.py", "", ":1", "a:x")] == [""] * 5


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2 * 10**12, "2 TB")]
)
def test_sizes_are_readable(number: int, text: str) -> None:
    """Bytes are told in the unit that leaves few digits."""
    assert size(number) == text


def test_a_verdict_is_shown_the_same_wherever_it_comes_from() -> None:
    """A process that only unpickles a verdict shows it as the one that made it does."""
    verdict = parted()
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(verdict), capture_output=True, check=True
    )

    assert done.stdout.decode().rstrip("\n") == str(verdict).rstrip("\n")


def test_the_json_is_valid_and_has_the_documented_keys() -> None:
    """A verdict goes through JSON; of the map it keeps what differs."""
    verdict = parted()
    found = json.loads(json.dumps(verdict_json(verdict, next_level({}, verdict.first))))

    assert found["same"] is False
    keys = {"rank", "step", "phase", "module", "op", "source", "kind", "left", "right", "elements"}
    assert keys <= set(found["first"])
    assert found["first"]["kind"] == "equal inputs, unequal outputs"
    assert found["compared"]["ops"] == 11436
    assert found["advice"]["setting"] == "backends.cpu.num_threads=1"
    assert found["next_rung"]["name"] == "seeds"
    assert found["map"]
    assert all(cell["differing"] for cell in found["map"])
    assert verdict_json(equal())["first"] is None


@given(losses=st.lists(st.tuples(st.integers(0, 9), st.floats(), st.none() | st.floats())))
def test_no_number_breaks_the_json(losses: list[tuple[int, float, float | None]]) -> None:
    """NaN and infinities, which JSON does not have, are text; every other number is itself."""
    verdict = equal(losses=tuple(losses))
    text = json.dumps(verdict.to_json(), allow_nan=False)

    assert verdict_json(verdict) == {**verdict.to_json(), "next_rung": None}
    for (_, left, _), (_, again, _) in zip(losses, json.loads(text)["losses"], strict=True):
        assert again == (left if math.isfinite(left) else str(left))


def test_a_place_names_its_rank_only_where_it_is_not_the_first() -> None:
    """One process needs no rank."""
    places: list[Divergence] = [divergence(), divergence(rank=3)]
    first, other = (told(parted(each)).splitlines()[0] for each in places)

    assert "rank" not in first
    assert "on rank 3" in other
