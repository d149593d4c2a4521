"""Starts the command of an earlier run again, under the profile in the manifest of that run.

First, the differences from the original run are reported. The new run writes into a new folder.
The folder of the original run stays unchanged.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NoReturn

from torchrepro.application.launch import is_python, program_of, replace_process, start
from torchrepro.ground.console import Part, parts
from torchrepro.ground.errors import ProfileError, some
from torchrepro.ground.redaction import HIDDEN, secret_values, shareable, shell_line
from torchrepro.lock.diff import (
    Difference,
    Impact,
    SnapshotDiff,
    change,
    compare,
    difference_parts,
    gap_lines,
    of_contents,
    shared_impact,
)
from torchrepro.lock.lock_file import HERE, plan_of_a_run, refuse_lost_file
from torchrepro.manifest.contents import (
    FILE,
    HYDRA,
    LOG_TO,
    RUN,
    DamagedError,
    Started,
    common_contents,
    manifest_in,
    read_complete,
    started_in,
)
from torchrepro.manifest.environment import repository, source_folder
from torchrepro.profile.document import Document
from torchrepro.profile.load import (
    SECTION,
    compose_document,
    in_hydras_grammar,
    key_of,
    resolve,
    validate,
)
from torchrepro.profile.resolved import ResolvedProfile, ValueOrigin
from torchrepro.reporting.outcomes import Outcome
from torchrepro.reporting.process_state import REPEATED, changed_files, interpreter_line, same_file
from torchrepro.trace.request import VARIABLE as RECORD
from torchrepro.trace.request import RecordingRequest

RUN_DIR = "hydra.run.dir"
_NOT_FOR_ONE_JOB = (RUN_DIR, "hydra.mode", "hydra.sweep", "hydra.sweeper", "hydra.launcher")
"""Keys of Hydra's config that describe a sweep. A rerun of a single job omits these keys."""

_OPTIONS_WITH_VALUE = (
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--package", "-p"),
)
"""https://hydra.cc/docs/advanced/hydra-command-line-flags"""

_RERUN = re.compile(r"-rerun-\d+$")
_FORBIDDEN = (Impact.CHANGES, Impact.MAY, Impact.PROGRAM)


@dataclass(frozen=True, slots=True)
class Rerun:
    """A command to start again, and its differences from the original run."""

    run: Path  #: The folder of the original run.
    into: Path  #: The folder of the new run.
    resolved: ResolvedProfile
    started: Started
    command: tuple[str, ...]
    comparison: SnapshotDiff  # the original run on the left, this machine on the right
    changed: str = ""  # if the profile files have changed: their digest or an error
    strict: bool = False  # refuse to start with a difference that may change results

    @property
    def refused(self) -> bool:
        """True if the command must not be started."""
        return self.strict and bool(self.differences)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences that may change results, including a changed program."""
        return self.comparison.having(*_FORBIDDEN)

    def to_json(self) -> dict[str, Any]:
        """Return the rerun as plain JSON values."""
        profile = {"name": self.resolved.name, "digest": self.resolved.digest}
        if self.changed:
            profile["files_now"] = self.changed
        harmless = self.comparison.having(Impact.SHOULD_NOT)
        return {
            "run": str(self.run),
            "into": str(self.into),
            "profile": profile,
            "folder": self.started.folder,
            "command": self.shown_command(),
            "same": not self.differences,
            "differences": [row.to_json("then", "here") for row in self.differences],
            "should_not_matter": [row.to_json("then", "here") for row in harmless],
            "not_compared": [gap.to_json() for gap in self.comparison.gaps],
        }

    def shown_command(self) -> list[str]:
        """Return the command with secrets hidden."""
        return shareable(self.command, secret_values(os.environ))

    def start(self) -> NoReturn:
        """Replace this process by the command. Raises the same errors as `launch.start`."""
        os.chdir(self.started.folder)
        job, profile = self.started.hydra, self.resolved.to_json()
        words = job.task if job else self.started.command
        selected = [word.partition("=")[2] for word in words if key_of(word) == SECTION]
        chosen = [job.choice] if job and job.choice else []
        repeated = {
            "profile": profile,
            "asked": profile["asked"],
            "named": [*self.started.asked[:1], *selected, *chosen],  # all names of the profile
            "folder": str(self.run),
            "into": str(self.into),
        }
        variables = {REPEATED: json.dumps(repeated)}
        if self.started.by != RUN:
            replace_process(program_of(self.command), self.command, {**os.environ, **variables})
        # The new run writes the same logs and recordings as the original, into its own folder.
        if not self.started.hydra:
            variables[LOG_TO] = str(self.into)
        recording = self.started.recording
        request = RecordingRequest.inherited({RECORD: json.dumps(recording)} if recording else {})
        if request is not None:
            before = Path(request.folder)
            folder = self.into if same_file(before, self.run) else beside(before)
            request = replace(request, folder=str(folder))
            request.prepare_folder()
            variables[RECORD] = request.to_variable()
        start(self.resolved, self.command, variables)


def prepare(
    name: str, command: Sequence[str] = (), into: str = "", *, strict: bool = False
) -> Rerun:
    """Return the `Rerun` of the run whose folder or manifest is `name`.

    `command` replaces the command of the manifest. `into` is the folder of the new run. By default
    it is next to the folder of the original run. With `strict`, a difference that may change
    results forbids the start. Imports torch. Raises `ProfileError` if the manifest is missing or
    damaged or hides arguments, or if the working directory or the program no longer exists.
    """
    path = Path(name)
    if not os.path.exists(path):  # noqa: PTH110 - never raises
        todo = "name the folder of a run, such as the output folder of a Hydra job"
        raise ProfileError.about("there is no such folder or file", found=name, todo=todo)
    if path.is_dir():
        manifest = manifest_in(name, path)
        if manifest is None:
            todo = "name the output folder of a Hydra job under +repro=, the folder of "
            todo += "`torchrepro run --record` or `--log-to`, or the folder of torchrepro.log_to"
            raise ProfileError.about("contains no manifest", found=name, todo=todo)
        path = manifest
    try:
        kind, contents = read_complete(path)
    except DamagedError:
        damage = ": it is truncated or damaged" if path.suffix == Path(FILE).suffix else ""
        todo = "name the folder of another run" if damage else "name the folder of a run"
        problem = f"not the manifest of a run{damage}"
        raise ProfileError.about(problem, str(path), todo=todo) from None
    if kind != "manifest":
        todo = f"to check a run against it: torchrepro run --lock {name} -- COMMAND"
        raise ProfileError.about("a lock, not the manifest of a run", str(path), todo=todo)
    resolved = _original_profile(path, contents)
    started = started_in(path, contents)
    if command and not Path(started.folder).is_dir():  # as on another machine
        started = replace(started, folder=str(Path.cwd()))
    folder = Path(started.folder)
    if not folder.is_dir():
        todo = f"give the command with the new path: torchrepro rerun {name} -- COMMAND"
        problem = "the working directory of the run no longer exists"
        raise ProfileError.about(problem, str(path), "started.folder", started.folder, todo=todo)
    run = path.absolute().parent
    if started.hydra is not None and run.name == started.hydra.subdir:
        run = run.parent
    new = Path(into).absolute() if into else beside(run)
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        todo = "name a new or an empty folder"
        raise ProfileError.about("exists already", key="--output", found=into, todo=todo)
    with chdir(folder):
        words = tuple(command) or _original_command(name, path, started)
        # A Hydra job gets the new output folder. An explicit command is changed only if it starts
        # Python or already has an override of that folder.
        kept = tuple(word for word in words if key_of(word) != RUN_DIR)
        of_hydra = started.hydra is not None and (not command or is_python(words[0]))
        if of_hydra or len(kept) < len(words):
            output = str(new if started.hydra is not None else new / "hydra")
            words = (*kept, f"{RUN_DIR}=" + in_hydras_grammar(output.replace("${", "\\${")))
        script = _script(path, words, is_explicit=bool(command))
        comparison = _differences(path, contents, resolved, started, script)
        changed = _changed_profile(resolved, started)
    return Rerun(run, new, resolved, started, words, comparison, changed, strict)


def _original_profile(path: Path, contents: Mapping[str, Any]) -> ResolvedProfile:
    if HIDDEN in json.dumps(contents["profile"]):
        raise ProfileError.about("a value of the profile is hidden", str(path), "profile")
    if ResolvedProfile.of(contents["profile"]).digest != contents.get("digest"):
        problem = "damaged: the values of the profile do not match its digest"
        raise ProfileError.about(problem, str(path), "digest", str(contents.get("digest"))[:80])
    document = Document(str(path), contents["profile"], ("_self_",), typed=False)
    valid = validate(compose_document(document)).resolved
    try:
        origins = {str(k): ValueOrigin.from_json(it) for k, it in contents["origins"].items()}
        asked = tuple(map(str, contents["started"]["asked"]))
    except (TypeError, KeyError, AttributeError):
        problem = "damaged: not as torchrepro writes it"
        raise ProfileError.about(problem, str(path), "origins or started") from None
    return ResolvedProfile(valid.values, origins, asked)


def beside(run: Path) -> Path:
    """Return a new path next to the folder of a run, such as `RUN-rerun-1`."""
    first = _RERUN.sub("", run.name)
    paths = (run.with_name(f"{first}-rerun-{number}") for number in count(1))
    return next(path for path in paths if not path.exists())


def _original_command(name: str, path: Path, started: Started) -> tuple[str, ...]:
    again = f"torchrepro rerun {name} --"
    if not started.command:
        todo = f"give a command: {again} COMMAND"
        raise ProfileError.about("the run was interactive", str(path), todo=todo)
    if started.launcher:
        line = shell_line(("torchrun", "...", *_program(started.command)[1]))
        problem = (
            f"{started.launcher} had started this process as one of several; its command line "
            "alone would start one process"
        )
        todo = f"give the command of the launcher: {again} {line}"
        raise ProfileError.about(problem, str(path), todo=todo)
    words, job = started.command, started.hydra
    if job is not None and job.sweep:  # repeat only this job
        python, program = _program(words)
        number = 2 if program[:1] == ("-m",) else 1
        options = [
            word
            for before, word in pairwise(("", *program[number:]))
            if (word.startswith("-") and word not in ("-m", "--multirun"))
            or before in _OPTIONS_WITH_VALUE
        ]
        sweep_keys = tuple(f"{section}." for section in _NOT_FOR_ONE_JOB)
        overrides = [text for text in job.own if not f"{key_of(text)}.".startswith(sweep_keys)]
        numbered = [] if job.number is None else [f"hydra.job.num={job.number}"]
        app = (*python, *program[:number], *options)
        words = (*app, *job.task, *overrides, *numbered, "hydra.mode=RUN")
    hidden = [
        f"{words[at - 1]} {word}" if word == HIDDEN and words[at - 1].startswith("-") else word
        for at, word in enumerate(words)
        if HIDDEN in word
    ]
    if hidden:
        line = shell_line([word.replace(HIDDEN, "VALUE") for word in words])
        problem = f"the manifest hides {len(hidden)} of the arguments, which may be secret"
        todo = f"give the command with each VALUE: {again} {line}"
        raise ProfileError.about(problem, str(path), found=", ".join(hidden), todo=todo)
    if is_python(words[0]):
        if _program(words)[1][:1] in ((), ("-",)):
            todo = f"give the command: {again} COMMAND"
            problem = "the program came from standard input"
            raise ProfileError.about(problem, str(path), todo=todo)
        return (sys.executable, *words[1:])  # differences are reported for this Python
    return words


def _program(command: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a Python command line into interpreter with options, and program with arguments."""
    _, program = interpreter_line(command[1:])
    number = len(command) - len(program)
    return tuple(command[:number]), tuple(command[number:])


def _script(path: Path, words: Sequence[str], *, is_explicit: bool) -> Path | None:
    """Return the script of a command, if any. Raises `ProfileError` if the program is missing."""
    program_of(words)
    program = _program(words)[1] if is_python(words[0]) else ()
    if not program or program[0] in ("-c", "-m"):
        return None
    script = Path(program[0]).absolute()
    if not script.exists():
        problem = f"there is no {script.name} in {script.parent}"
        if is_explicit:
            raise ProfileError.about(problem, todo="give the command of an existing program")
        todo = "restore the file, or give a command after `--`"
        raise ProfileError.about(problem, str(path), todo=todo)
    return script


_COMPARED = ("knobs", "environment", "versions", "hardware", "source")
"""Sections that can differ under the same profile and are known before the run."""


def _differences(
    path: Path,
    contents: Mapping[str, Any],
    resolved: ResolvedProfile,
    started: Started,
    script: Path | None,
) -> SnapshotDiff:
    original = of_contents(str(path), "manifest", contents)
    report = plan_of_a_run(resolved).report
    today = {**common_contents(resolved, report), "repository": repository(source_folder(script))}
    comparison = compare(original, of_contents(HERE, "manifest", today))
    rows = []
    for row in comparison.differences:
        # A knob that was set too late will be too late again: the command starts in the same way.
        if row.section not in _COMPARED or row.left == Outcome.TOO_LATE:
            continue
        # A launcher sets such variables and the number of threads in each process.
        exported = row.section == "environment" and row.right is None
        threads = (row.section, row.key) == ("hardware", "threads")
        if not (started.ranked and (exported or threads)):
            rows.append(row)
    gaps = tuple(gap for gap in comparison.gaps if gap.section in _COMPARED)
    return replace(comparison, differences=tuple(rows), gaps=gaps)


def _changed_profile(resolved: ResolvedProfile, started: Started) -> str:
    """Return the current digest if the profile files have changed, else an empty string.

    If the files cannot be read, return the error instead of a digest.
    """
    # Under Hydra the files may belong to the app, so only Hydra's config source can read them.
    asked = resolved.asked
    if started.by == HYDRA or not asked or any(HIDDEN in word for word in asked):
        return ""
    try:
        refuse_lost_file(asked[0])
        now = resolve(asked[0], asked[1:]).digest
    except ProfileError as error:
        now = error.problem.what
    return now if now != resolved.digest else ""


@parts.register(Rerun)
def _rerun_parts(rerun: Rerun) -> tuple[Part, ...]:
    rows = rerun.differences
    lines: list[Part] = [*difference_parts(rows, "then", "here")]
    if shared := shared_impact(rows):
        lines.append(f"each of these: {shared}")
    if rerun.changed:
        lines.append(changed_files(rerun.resolved.asked[0], rerun.changed))
    if harmless := rerun.comparison.having(Impact.SHOULD_NOT):
        lines.append(f"should not change numbers: {some(map(change, harmless))}")
    lines += gap_lines(rerun.comparison.gaps)
    if not rows:
        lines.append("nothing that may change numbers differs from the original run")
    return (
        *lines,
        f"in {rerun.started.folder}: {shell_line(rerun.shown_command())}",
        "not started: --strict" if rerun.refused else f"into {rerun.into}",
    )
