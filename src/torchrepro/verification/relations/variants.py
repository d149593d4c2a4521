"""Provides the base class of all relations, and presents the comparison with variants."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torchrepro.ground.console import Displayed, listing, parts
from torchrepro.ground.errors import printable
from torchrepro.verdict.page import Answer, PageSection, RunRow, page_of
from torchrepro.verdict.render import counted, headline, verdict_parts
from torchrepro.verification.at_start import OBSERVED
from torchrepro.verification.perturbations import NO_CHANGE, RunEnvironment

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from torchrepro.ground.console import Part
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.result import Run
    from torchrepro.verification.runner import Runner

AGREE, DIFFER, UNKNOWN = 0, 1, 4


@dataclass
class Relation:
    """A program, and variants of it that should compute the same results."""

    agreement: ClassVar[str]  # the sentence to show if all variants agree
    takes: ClassVar[frozenset[str]]  # the options that the relation supports; it rejects others
    loading: ClassVar[bool] = True
    """True if ops are recorded while the main process loads a batch."""

    runner: Runner
    resolved: ResolvedProfile | None
    open: ExitStack  # removes copies at the end, also after a signal
    checkpoint: str = ""
    """A pattern for checkpoint files; empty if they are recognized by their contents."""
    resume_command: str = ""  # resumes from a checkpoint; empty if the command itself resumes
    copies: dict[str, str] = field(default_factory=dict)
    """The folders of copies -> the user's folders."""
    strayed: str = ""  # a use of files outside a copy, in words; else empty

    def plain(self, name: str) -> Run:
        return self.run(name)

    def variants(self, plain: Run) -> Iterator[Variant]:
        """Run the variants of the program, and compare each variant with the run `plain`."""
        raise NotImplementedError

    def run(
        self,
        name: str,
        environment: RunEnvironment = NO_CHANGE,
        observers: Mapping[str, Any] | None = None,
        resolved: ResolvedProfile | None = None,
        runner: Runner | None = None,
    ) -> Run:
        """Run the command once. Its processes start the `observers` (see `at_start.OBSERVED`)."""
        self.runner.say(f"{name.replace('-', ' ')} ...")
        if observers is not None:
            folder = self._notes(name)
            folder.mkdir()
            arguments = {path: {"folder": str(folder), **args} for path, args in observers.items()}
            environment |= RunEnvironment(in_process={OBSERVED: arguments})
        return (runner or self.runner).run(resolved or self.resolved, name, environment)

    def notes_of(self, run: Run) -> list[list[dict[str, Any]]]:
        """Return the notes of a run, as one list for each process, in the order of the ranks."""
        files = sorted(self._notes(run.name).glob("*.jsonl"))
        texts = (file.read_text(encoding="utf-8").splitlines() for file in files)
        # The last line is incomplete if the process was killed.
        return [[json.loads(line) for line in lines if line.endswith("}")] for lines in texts]

    def _notes(self, name: str) -> Path:
        return self.runner.folder / f"{name}.observed"

    def with_users_paths(self, value: Any) -> Any:
        """Return `value` with each path into a removed copy replaced by the original path."""
        if type(value) is str:
            for copy, original in self.copies.items():
                value = value.replace(copy, original)
            return value
        if isinstance(value, tuple):
            make = getattr(type(value), "_make", tuple)
            return make(map(self.with_users_paths, value))
        if is_dataclass(value) and not isinstance(value, type):
            before = {field.name: getattr(value, field.name) for field in fields(value)}
            return replace(
                value, **{name: self.with_users_paths(part) for name, part in before.items()}
            )
        return value


@dataclass(frozen=True, slots=True)
class NotRestored:
    """A part of the program's state that the resumed run did not restore."""

    kind: str
    """``parameter``, ``gradient``, ``buffer``, ``optimizer``, ``scheduler``, ``scaler``,
    ``generator``, ``loader`` or ``sampler``."""
    name: str
    what: str = ""  # details, if there are any
    restored: str = ""  # the line that restored it, if a later line changed it again

    def __str__(self) -> str:
        if self.restored:
            return f"{self.kind} {self.name} at {self.restored}, {self.what}"
        return f"{self.kind} {self.name}{f': {self.what}' if self.what else ''}"


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the program, and the result of comparing its run with the plain run."""

    name: str  # such as ``2 workers``
    run: Run | None  # None if it was not run
    verdict: Verdict | None = None  # None if the runs cannot be compared
    unknown: str = ""  # why the verdict is missing, and what to do; else empty
    not_restored: tuple[NotRestored, ...] = ()
    note: str = ""  # a condition of the verdict, such as the tolerance

    @property
    def status(self) -> int:
        if self.verdict is None:
            return UNKNOWN
        return AGREE if self.verdict.same else DIFFER


@dataclass(frozen=True, slots=True)
class Related(Displayed):
    """The answer of `relate`: whether a program agrees with all its variants."""

    relation: str
    agreement: str
    command: str
    plain: tuple[Run, ...]
    plain_verdict: Verdict  # of the plain program compared with itself
    variants: tuple[Variant, ...]
    folder: str  # the folder of recordings and logs; empty if they were removed

    @property
    def status(self) -> int:
        """The exit status: 0 if all variants agree, 1 if one differs, and 4 if this is unknown."""
        if not self.plain_verdict.same:
            return UNKNOWN
        statuses = {variant.status for variant in self.variants}
        return next((status for status in (DIFFER, UNKNOWN) if status in statuses), AGREE)

    @property
    def unknown(self) -> str:
        if self.status != UNKNOWN:
            return ""
        if not self.plain_verdict.same:
            return "the plain program, run twice, does not agree with itself"
        return next(variant.unknown for variant in self.variants if variant.unknown)

    @property
    def deciding(self) -> Variant | None:
        return next((variant for variant in self.variants if variant.status == DIFFER), None)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the first variant that differs, or else of the two plain runs."""
        variant = self.deciding
        return variant.verdict if variant and variant.verdict else self.plain_verdict

    def to_page(self) -> str:
        runs = [(variant.name, variant.run) for variant in self.variants if variant.run]
        rows = [
            RunRow(name, {"Steps": f"{run.steps:,}", "Seconds": f"{run.seconds:.1f}"})
            for name, run in [("plain program", self.plain[0]), *runs]
        ]
        lines = [f"{label}: {text}" for label, text in _rows(self)]
        compared = [PageSection(self.verdict)]
        return page_of(Answer(self.status == AGREE, _headline(self), lines, rows, compared))

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values, including the fields of its verdict."""
        deciding, variants = self.deciding, []
        for variant in self.variants:
            verdict = variant.verdict and variant.verdict.to_json()
            variants.append(
                {
                    "name": variant.name,
                    "same": verdict and verdict["same"],
                    "first": verdict and verdict["first"],
                    "unknown": variant.unknown or None,
                    "said": variant.note or None,
                    "not_restored": [asdict(lost) for lost in variant.not_restored],
                }
            )
        runs = [*self.plain, *(variant.run for variant in self.variants)]
        return {
            **self.verdict.to_json(),
            "same": None if self.unknown else self.status == AGREE,
            "relation": self.relation,
            "unknown": self.unknown or None,
            "not_restored": [asdict(lost) for lost in deciding.not_restored] if deciding else [],
            "sides": variants,
            "command": self.command,
            "runs": [asdict(run) for run in runs if run],
            "folder": self.folder or None,
        }


def _headline(related: Related) -> str:
    if related.unknown:
        return f"cannot tell: {related.unknown}"
    variant = related.deciding
    if variant is None:
        return f"agree: {related.agreement}"
    return f"{variant.name}: {headline(related.verdict)}"


@parts.register(Related)
def _related_parts(related: Related) -> tuple[Part, ...]:
    verdict = verdict_parts(related.verdict)[1:] if not related.verdict.same else ()
    rows = [(f"  {label:<10}", printable(text)) for label, text in _rows(related)]
    return (_headline(related), *verdict, listing(rows, style="bold"))


def _rows(related: Related) -> Iterator[tuple[str, str]]:
    if related.deciding:
        for lost in related.deciding.not_restored:
            yield "restored" if lost.restored else "not restored", str(lost)
    yield "relation", related.relation
    for variant in related.variants:
        verdict = variant.verdict
        if verdict is not None:
            steps = counted(verdict.compared.steps, "step")
            agrees = f"agrees, {steps} compared" if verdict.same else headline(verdict)
            yield "compared", "; ".join(filter(None, (f"{variant.name}: {agrees}", variant.note)))
        elif not related.unknown:
            yield "cannot tell", f"{variant.name}: {variant.unknown}"
    yield "command", related.command
    if related.folder:
        yield "recordings", related.folder
