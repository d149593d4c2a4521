"""The keys of every JSON answer, read off real answers.

Each command is asked, or what it prints is made of real values, and the keys are collected. What
they mean is said by the attributes of the classes that are behind them.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from reference_commands import registered_commands
from reference_markdown import attribute_docs, code, prose

import torchrepro
from torchrepro.checking.check_runs import LockedRun
from torchrepro.checking.locked_command import Dependencies
from torchrepro.cli import main
from torchrepro.cli.app import ROWS
from torchrepro.lock.locked_results import numbers_of_training
from torchrepro.selftest import PROMISES, Result, Row, SelfTest, machine_facts
from torchrepro.verification.result import (
    ControlledRun,
    Run,
    StressResult,
    Verification,
    verification_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_KINDS = {str: "text", bool: "true or false", int: "number", float: "number", type(None): "null"}
_REPORT = {
    "": "torchrepro.reporting.report:Report",
    "guarantee": "torchrepro.reporting.outcomes:Guarantee",
    "guarantee.lowered[]": "torchrepro.reporting.outcomes:Lowered",
    "knobs[]": "torchrepro.reporting.outcomes:KnobRow",
    "drift[]": "torchrepro.reporting.outcomes:KnobChange",
    "as_good[]": "torchrepro.reporting.outcomes:KnobChange",
    "switches[]": "torchrepro.reporting.outcomes:Writer",
}
_VERDICT = {
    "": "torchrepro.verdict.value:Verdict",
    "first": "torchrepro.verdict.value:Divergence",
    "advice": "torchrepro.verdict.value:Advice",
    "first.left": "torchrepro.verdict.value:RunAtDivergence",
    "first.right": "torchrepro.verdict.value:RunAtDivergence",
    "first.elements[]": "torchrepro.verdict.value:Element",
    "first.distances[]": "torchrepro.verdict.value:Distance",
}
_CLASSES: Mapping[str, Mapping[str, str]] = {
    "list": {"[]": "torchrepro.profile.load:ProfileEntry"},
    "plan": _REPORT,
    "rerun": {"": "torchrepro.start.rerun:Rerun"},
    "compare": _VERDICT,
    "digest": {
        "checkpoints[]": "torchrepro.checkpoint_digest:CheckpointDigest",
        "checkpoints[].entries[]": "torchrepro.checkpoint_digest:EntryDigest",
        "differences[]": "torchrepro.checkpoint_digest:EntryDifference",
    },
    "selftest": {
        "": "torchrepro.selftest:SelfTest",
        "rows[]": "torchrepro.selftest:Row",
    },
    "verify": {
        **_VERDICT,
        "": "torchrepro.verification.result:Verification",
        "runs[]": "torchrepro.verification.result:Run",
    },
}
"""Where the keys of an answer come from, by the path of the mapping that has them."""

_DATA = (
    "counts",
    "promises",
    "software",
    "variables",
    "data",
    "listed",
    "values",
    "origins",
    "backends",
    "versions",
    "env",
)
"""Mappings whose keys are names of things rather than parts of the format."""

_LIKE = {"verify": "compare"}
"""Answers that have all keys of another one."""

_WITHOUT_FORMAT = {
    "demo": "`folder`, if the files are kept; `verified`, a list of the commands, each with its "
    "`answer`, which has the keys of `torchrepro verify`; and `next`, the commands to run next",
    "show": "the resolved profile, by its keys; with `--origin` a list of keys with their origin",
    "env": "the variables of the profile: name and text",
}
"""Answers whose keys are those of a profile, or of another answer."""


LOCK = "repro.lock"
RUNS = ("one", "other", "same", "loose")


@dataclass(frozen=True)
class Asked:
    """The folder in which commands are asked, and the commands without what they share."""

    folder: Path

    def words(self) -> dict[str, list[str]]:
        """Return the arguments of each command that is asked."""
        runs = [str(self.folder / name) for name in RUNS[:2]]
        return {
            "list": [],
            "plan": ["debug-strict"],
            "explain": ["backends.cudnn.benchmark"],
            "doctor": ["npu-align"],
            "compare": runs,
            "rerun": [str(self.folder / "run")],
            "check": [str(self.folder / LOCK)],
            "diff": ["debug-strict", "train-fast"],
            "digest": [str(self.folder / f"{name}.pt") for name in RUNS[:2]],
            "quickstart": [str(self.folder / "first-try")],
            "new-pack": [str(self.folder / "acme")],
        }


def answers() -> str:
    """Return the keys of the answer of each command that has `--json`."""
    registered = registered_commands()
    able = [
        name for name in ROWS if any("--json" in param.opts for param in registered[name].params)
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = _documents(Path(folder))
    lines = []
    for name in (*able, LOCK):
        lines.append(f"## {name}" if name == LOCK else f"## torchrepro {name}")
        if name in _WITHOUT_FORMAT:
            lines.append(f"Prints {_WITHOUT_FORMAT[name]}.")
        else:
            more = found.keys() & {_LIKE.get(name)}
            lines += [
                f"All keys of [`torchrepro {each}`](#torchrepro-{each}), and:" for each in more
            ]
            known = {key for each in more for key in _kinds(found[each])}
            lines.append("\n".join(_keys(name, found[name], known)))
    return "\n\n".join(lines)


def _documents(folder: Path) -> dict[str, list[Any]]:
    """Return several answers of each command, so that every key has a value in one of them."""
    _record_runs(folder)
    _log_run(folder)
    for number, name in enumerate(RUNS[:2]):
        torch.save({"weight": torch.full((2,), float(number))}, folder / f"{name}.pt")
    _printed(["lock", "debug-strict", "-o", str(folder / LOCK)])
    with patch.dict(os.environ, {"OMP_DYNAMIC": "FALSE"}):  # something that differs from the lock
        found = {name: [_asked(name, words)] for name, words in Asked(folder).words().items()}
    left, _, same, loose = (str(folder / name) for name in RUNS)
    found["compare"] += [
        _asked("compare", [left, same]),
        _asked("compare", [left, loose, "--rtol", "1", "--atol", "1"]),
    ]
    found["explain"] += [_asked("explain", ["clock"])]
    found["lock"] = _locks(folder)
    found["verify"] = [_verification(folder, bare=True), _verification(folder, bare=False)]
    tried = (Row(PROMISES[0].name, "cpu", "", Result.HELD),)
    tested = SelfTest("", "", machine_facts(), tried, 1.0)
    found["selftest"] = [json.loads(json.dumps(tested.to_json()))]
    found[LOCK] = [json.loads((folder / LOCK).read_text(encoding="utf-8"))]
    return found


def _asked(name: str, words: list[str]) -> Any:
    return json.loads(_printed([name, *words, "--json"]))


def _printed(words: list[str]) -> str:
    """Return what a command prints on standard output; a status other than 0 is an answer too."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()), suppress(SystemExit):
        main(words)
    return out.getvalue()


def _record_runs(folder: Path) -> None:
    """Record runs of one step: the second has other data, the last one statistics as well."""
    for name in RUNS:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torchrepro.isolated_rng(), torchrepro.record(folder / name, statistics=True):
            model(torch.full((1, 2), 2.0 if name == "other" else 1.0)).sum().backward()
            optimizer.step()


def _log_run(folder: Path) -> None:
    """Leave the manifest of a run whose profile has changed since."""
    profile = folder / "ours.yaml"
    profile.write_text("defaults: [seed-only, _self_]\nseed: 1\n", encoding="utf-8")
    with torchrepro.isolated_rng(), torchrepro.apply(profile):
        torchrepro.log_to(folder / "run")
    profile.write_text("defaults: [seed-only, _self_]\nseed: 2\n", encoding="utf-8")
    path = folder / "run" / "repro.json"
    contents = json.loads(path.read_text(encoding="utf-8"))
    command = ["python", "-c", "0"]
    contents["started"] |= {"folder": str(folder), "command": command, "launcher": ""}
    path.write_text(json.dumps(contents), encoding="utf-8")


def _locks(folder: Path) -> list[Any]:
    """Return the answers of locks without a command, of numbers, and of numbers that differed."""
    asked = _asked("lock", ["seed-only", "-o", str(folder / "seeded.lock")])
    with torchrepro.isolated_rng(), torchrepro.apply("seed-only") as applied:
        report = applied.report
    verdict = torchrepro.compare(folder / RUNS[0], folder / RUNS[1])
    depends = Dependencies({"a": "b"}, {"a": "b"}, {"A": "set"}, "1,000 files")
    made = LockedRun(LOCK, report, numbers_of_training([1.0]), verdict, "cpu", depends)
    both = (made.to_json(), replace(made, numbers=None).to_json())
    return [asked, *(json.loads(json.dumps(each)) for each in both)]


def _verification(folder: Path, *, bare: bool) -> Any:
    runs = tuple(Run(name, str(folder), str(folder), 0, 1.0, 1, recorded=True) for name in RUNS[:2])
    verdict = torchrepro.compare(folder / RUNS[0], folder / RUNS[1])
    made = Verification("bits", "python train.py", None, None, runs, (verdict,), "")
    if not bare:
        made = replace(
            made,
            profile="debug-strict",
            own_profile="debug-strict",
            folder=str(folder),
            stressed=StressResult(("time",), (("threads", "a reason"),), ("time",), "a sentence"),
            tried=(
                ControlledRun("seed-only", "torchrepro", same=True, runs=3, answer="a sentence"),
            ),
        )
    return json.loads(json.dumps(verification_json(made)))


def _kinds(documents: list[Any]) -> dict[str, list[str]]:
    """Return the path of every key, with the kinds of its values."""
    kinds: dict[str, list[str]] = {}
    for document in documents:
        for path, kind in _walk("", document):
            known = kinds.setdefault(path, [])
            if kind not in known:
                known.append(kind)
    return kinds


def _keys(command: str, documents: list[Any], known: set[str]) -> Iterator[str]:
    docs = {path: _docs(name) for path, name in _CLASSES.get(command, {}).items()}
    for path, kinds in _kinds(documents).items():
        owner, _, key = path.rpartition(".")
        text = docs.get(owner, {}).get(key, "")
        if path not in known:
            yield f"- {code(path)} ({' or '.join(kinds)})" + (f": {prose(text)}" if text else "")


def _docs(name: str) -> dict[str, str]:
    module, _, owner = name.partition(":")
    return {key: text for (cls, key), text in attribute_docs(module).items() if cls == owner}


def _walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the path and the kind of everything in a document; of lists, of all their entries."""
    names = path.rpartition(".")[2] in _DATA
    if isinstance(value, dict):
        if path and not path.endswith("[]"):
            yield path, "mapping of names" if names else "mapping"
        for key, inner in () if names else value.items():
            yield from _walk(f"{path}.{key}".lstrip("."), inner)
    elif isinstance(value, list):
        if path and not path.endswith("[]"):
            yield path, "list"
        for inner in value:
            if isinstance(inner, dict | list):
                yield from _walk(f"{path}[]", inner)
    else:
        yield path, _KINDS[type(value)]
