"""Start the command of an earlier run again, from its manifest, under its profile.

What differs from the original run is found and said first. That run is left as it is: what is
started writes into a new folder beside it.
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
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.messages import some
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
"""Keys of Hydra's own config that say how a sweep is run; the rest is kept for one of its jobs."""

_OPTIONS_WITH_VALUE = (
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--package", "-p"),
)
"""https://hydra.cc/docs/advanced/hydra-command-line-flags"""

_RERUN = re.compile(r"-rerun-\d+$")
_FORBIDDEN = (Impact.CHANGES, Impact.MAY, Impact.PROGRAM)


@dataclass(frozen=True, slots=True)
class Rerun:
    """What would be started, and what differs from the run that it repeats."""

    run: Path  #: The folder of the original run.
    into: Path  #: The folder of the new one.
    resolved: ResolvedProfile
    started: Started
    command: tuple[str, ...]
    comparison: SnapshotDiff  # the original run on the left, this machine on the right
    changed: str = ""  # what the files of the profile give now, where that is something else
    strict: bool = False  # whether a difference that may change numbers forbids the start

    @property
    def refused(self) -> bool:
        """Whether it is not to be started."""
        return self.strict and bool(self.differences)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences that may change numbers, a changed program included."""
        return self.comparison.having(*_FORBIDDEN)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "run": str(self.run),
            "into": str(self.into),
            "profile": {"name": self.resolved.name, "digest": self.resolved.digest}
            | ({"files_now": self.changed} if self.changed else {}),
            "folder": self.started.folder,
            "command": self.shown_command(),
            "same": not self.differences,
            "differences": [each.to_json("then", "here") for each in self.differences],
            "should_not_matter": [
                each.to_json("then", "here") for each in self.comparison.having(Impact.SHOULD_NOT)
            ],
            "not_compared": [each.to_json() for each in self.comparison.gaps],
        }

    def shown_command(self) -> list[str]:
        """Return the command as it may be shown."""
        return shareable(self.command, secret_values(os.environ))

    def start(self) -> NoReturn:
        """Replace this process by the command; raises as `application.launch.start` does."""
        os.chdir(self.started.folder)
        job, profile = self.started.hydra, self.resolved.to_json()
        words = job.task if job else self.started.command
        given = [word.partition("=")[2] for word in words if key_of(word) == SECTION]
        chosen = [job.choice] if job and job.choice else []
        repeated = {
            "profile": profile,
            "asked": profile["asked"],
            "named": [*self.started.asked[:1], *given, *chosen],  # the names that it was given
            "folder": str(self.run),
            "into": str(self.into),
        }
        more = {REPEATED: json.dumps(repeated)}
        if self.started.by != RUN:
            replace_process(program_of(self.command), self.command, {**os.environ, **more})
        # What the original run has written is written again, elsewhere.
        if not self.started.hydra:
            more[LOG_TO] = str(self.into)
        recording = self.started.recording
        request = RecordingRequest.inherited({RECORD: json.dumps(recording)} if recording else {})
        if request is not None:
            before = Path(request.folder)
            folder = self.into if same_file(before, self.run) else beside(before)
            request = replace(request, folder=str(folder))
            request.prepare_folder()
            more[RECORD] = request.to_variable()
        start(self.resolved, self.command, more)


def prepare(
    name: str, command: Sequence[str] = (), into: str = "", *, strict: bool = False
) -> Rerun:
    """Return what repeats the run in the folder `name`, or of the manifest `name`.

    `command` takes the place of the one in the manifest, and `into` that of a new folder beside
    the run. With `strict` a difference that may change numbers forbids the start. Imports torch.
    Raises `ProfileError` for what holds no manifest or a damaged one, for hidden arguments, and
    for a folder or a program that is gone.
    """
    path = Path(name)
    if not os.path.exists(path):  # noqa: PTH110 - never raises
        todo = "name the folder of a run, such as the output folder of a Hydra job"
        raise ProfileError.about("there is no such folder or file", found=name, todo=todo)
    if path.is_dir():
        manifest = manifest_in(name, path)
        if manifest is None:
            todo = "name the output folder of a Hydra job under +repro=, the folder of "
            todo += "`torchrepro run --record` or `--log-to`, or that of torchrepro.log_to"
            raise ProfileError.about("holds no manifest", found=name, todo=todo)
        path = manifest
    try:
        kind, contents = read_complete(path)
    except DamagedError:
        damage = ": it is cut or damaged" if path.suffix == Path(FILE).suffix else ""
        todo = "name the folder of another run" if damage else "name the folder of a run"
        what = f"not the manifest of a run{damage}"
        raise ProfileError.about(what, str(path), todo=todo) from None
    if kind != "manifest":
        todo = f"`torchrepro run --lock {name} -- COMMAND` holds a run to it"
        raise ProfileError.about("a lock, which no run has left", str(path), todo=todo)
    resolved = _original_profile(path, contents)
    started = started_in(path, contents)
    if command and not Path(started.folder).is_dir():  # as on another machine
        started = replace(started, folder=str(Path.cwd()))
    folder = Path(started.folder)
    if not folder.is_dir():
        todo = f"give the command, where the program is now: torchrepro rerun {name} -- COMMAND"
        what = "the folder in which it was started is gone"
        raise ProfileError.about(what, str(path), "started.folder", started.folder, todo=todo)
    run = path.absolute().parent
    if started.hydra is not None and run.name == started.hydra.subdir:
        run = run.parent
    new = Path(into).absolute() if into else beside(run)
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        todo = "name a new or an empty folder"
        raise ProfileError.about("exists already", key="--output", found=into, todo=todo)
    with chdir(folder):
        words = tuple(command) or _original_command(name, path, started)
        # The output folder of a Hydra job is replaced by the new one. A command that is given anew
        # is changed only where it is a Python or names that folder.
        kept = tuple(word for word in words if key_of(word) != RUN_DIR)
        of_hydra = started.hydra is not None and (not command or is_python(words[0]))
        if of_hydra or len(kept) < len(words):
            place = str(new if started.hydra is not None else new / "hydra")
            words = (*kept, f"{RUN_DIR}=" + in_hydras_grammar(place.replace("${", "\\${")))
        script = _script(path, words, given=bool(command))
        found = _differences(path, contents, resolved, started, script)
        changed = _changed_profile(resolved, started)
    return Rerun(run, new, resolved, started, words, found, changed, strict)


def _original_profile(path: Path, contents: Mapping[str, Any]) -> ResolvedProfile:
    if HIDDEN in json.dumps(contents["profile"]):
        raise ProfileError.about("a value of the profile is hidden", str(path), "profile")
    if ResolvedProfile.of(contents["profile"]).digest != contents.get("digest"):
        what = "damaged: the values of the profile are not those of its digest"
        found = str(contents.get("digest"))[:80]
        raise ProfileError.about(what, str(path), "digest", found)
    document = Document(str(path), contents["profile"], ("_self_",), typed=False)
    valid = validate(compose_document(document)).resolved
    try:
        origins = {str(k): ValueOrigin.from_json(each) for k, each in contents["origins"].items()}
        asked = tuple(map(str, contents["started"]["asked"]))
    except (TypeError, KeyError, AttributeError):
        what = "damaged: not what is written there"
        raise ProfileError.about(what, str(path), "origins or started") from None
    return ResolvedProfile(valid.values, origins, asked)


def beside(run: Path) -> Path:
    """Return a folder that is not there yet, next to that of a run and named after it."""
    first = _RERUN.sub("", run.name)
    names = (run.with_name(f"{first}-rerun-{number}") for number in count(1))
    return next(each for each in names if not each.exists())


def _original_command(name: str, path: Path, started: Started) -> tuple[str, ...]:
    again = f"torchrepro rerun {name} --"
    if not started.command:
        todo = f"give a command: {again} COMMAND"
        raise ProfileError.about("the run was interactive", str(path), todo=todo)
    if started.launcher:
        line = shell_line(("torchrun", "...", *_program(started.command)[1]))
        what = (
            f"{started.launcher} had started this process as one of several; its command line "
            "alone would start one process"
        )
        todo = f"give the command of the launcher: {again} {line}"
        raise ProfileError.about(what, str(path), todo=todo)
    words, job = started.command, started.hydra
    if job is not None and job.sweep:  # this job alone
        python, program = _program(words)
        number = 2 if program[:1] == ("-m",) else 1
        options = [
            word
            for before, word in pairwise(("", *program[number:]))
            if (word.startswith("-") and word not in ("-m", "--multirun"))
            or before in _OPTIONS_WITH_VALUE
        ]
        left_out = tuple(f"{section}." for section in _NOT_FOR_ONE_JOB)
        own = [text for text in job.own if not f"{key_of(text)}.".startswith(left_out)]
        numbered = [] if job.number is None else [f"hydra.job.num={job.number}"]
        app = (*python, *program[:number], *options)
        words = (*app, *job.task, *own, *numbered, "hydra.mode=RUN")
    hidden = [
        f"{words[at - 1]} {word}" if word == HIDDEN and words[at - 1].startswith("-") else word
        for at, word in enumerate(words)
        if HIDDEN in word
    ]
    if hidden:
        line = shell_line([word.replace(HIDDEN, "VALUE") for word in words])
        what = f"the manifest hides {len(hidden)} of the arguments, which may be secret"
        todo = f"give the command with each VALUE: {again} {line}"
        raise ProfileError.about(what, str(path), found=", ".join(hidden), todo=todo)
    if is_python(words[0]):
        if _program(words)[1][:1] in ((), ("-",)):
            todo = f"give the command: {again} COMMAND"
            what = "the program came on standard input"
            raise ProfileError.about(what, str(path), todo=todo)
        return (sys.executable, *words[1:])  # what differs is said of this Python
    return words


def _program(command: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    # The words before the program of a Python's command line, and those from it on.
    _, program = interpreter_line(command[1:])
    number = len(command) - len(program)
    return tuple(command[:number]), tuple(command[number:])


def _script(path: Path, words: Sequence[str], *, given: bool) -> Path | None:
    program_of(words)
    program = _program(words)[1] if is_python(words[0]) else ()
    if not program or program[0] in ("-c", "-m"):
        return None
    script = Path(program[0]).absolute()
    if not script.exists():
        what = f"there is no {script.name} in {script.parent}"
        todo = (
            "give the command of a program that is there"
            if given
            else "put it there again, or give the command after `--`"
        )
        raise ProfileError.about(what, "" if given else str(path), todo=todo)
    return script


_COMPARED = ("knobs", "environment", "versions", "hardware", "source")
"""What can differ although the profile is the same; what the program did comes with its end."""


def _differences(
    path: Path,
    contents: Mapping[str, Any],
    resolved: ResolvedProfile,
    started: Started,
    script: Path | None,
) -> SnapshotDiff:
    original = of_contents(str(path), "manifest", contents)
    report = plan_of_a_run(resolved).report
    here = {**common_contents(resolved, report), "repository": repository(source_folder(script))}
    found = compare(original, of_contents(HERE, "manifest", here))
    rows = []
    for each in found.differences:
        # What was late is late again: the command is started in the same way.
        if each.section not in _COMPARED or each.left == Outcome.TOO_LATE:
            continue
        # A launcher gives each of its processes values that have no meaning here.
        exported = each.section == "environment" and each.right is None
        threads = (each.section, each.key) == ("hardware", "threads")
        if not (started.ranked and (exported or threads)):
            rows.append(each)
    gaps = tuple(each for each in found.gaps if each.section in _COMPARED)
    return replace(found, differences=tuple(rows), gaps=gaps)


def _changed_profile(resolved: ResolvedProfile, started: Started) -> str:
    # What the files of the profile give now, if that is not what is run. Under Hydra they may be
    # the app's own: its config source reads them.
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
def _rerun_parts(found: Rerun) -> tuple[Part, ...]:
    rows, others = found.differences, found.comparison.having(Impact.SHOULD_NOT)
    changed = [changed_files(found.resolved.asked[0], found.changed)] if found.changed else []
    return (
        *difference_parts(rows, "then", "here"),
        *([f"each of these: {shared}"] if (shared := shared_impact(rows)) else []),
        *changed,
        *([f"should not change numbers: {some(map(change, others))}"] * bool(others)),
        *gap_lines(found.comparison.gaps),
        *([] if rows else ["nothing that may change numbers differs from then"]),
        f"in {found.started.folder}: {shell_line(found.shown_command())}",
        "not started: --strict" if found.refused else f"into {found.into}",
    )
