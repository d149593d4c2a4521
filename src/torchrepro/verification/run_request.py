"""What a user asks of the runs of a command: one value for `verify` and for its relations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.redaction import (
    HIDDEN,
    shareable,
    shell_line,
    sounds_secret,
    without_secrets,
)
from torchrepro.manifest.contents import known_secrets
from torchrepro.profile.load import resolve
from torchrepro.trace.request import RecordingRequest
from torchrepro.verdict.comparison import refuse_malformed_lines, tolerance_of
from torchrepro.verification.runner import Runner, output_directory

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A command, and how its runs are started, recorded, compared and reported.

    The caller of `verify` or the command line makes it once. Nothing changes it. Its creation
    raises `ProfileError` or `TraceError` if a value is invalid.
    """

    command: Sequence[str]
    _: KW_ONLY
    profile: Any = None  # as the user named it; None starts the command without a profile
    overrides: Sequence[str] = ()
    folder: str = ""  # a new or empty folder; without a name, a temporary folder
    recording: RecordingRequest = field(default_factory=partial(RecordingRequest, ""))
    rtol: float | None = None
    atol: float | None = None
    ignore: Sequence[str] = ()  # program lines whose results are ignored
    say: Callable[[str], object] = lambda text: None  # receives the progress as text
    meanwhile: Callable[[str], object] | None = None  # receives the state of the running command
    resolved: ResolvedProfile | None = field(init=False, default=None)
    tolerance: tuple[float, float] | None = field(init=False)  # rtol and atol; None compares bits

    def __post_init__(self) -> None:
        if self.profile is not None:
            object.__setattr__(self, "resolved", resolve(self.profile, self.overrides))
        elif self.overrides:
            problem = "overrides without a profile that they could change"
            todo, overrides = "name the profile before them", " ".join(self.overrides)
            raise ProfileError.about(problem, found=overrides, todo=todo)
        object.__setattr__(self, "tolerance", tolerance_of(self.rtol, self.atol))
        refuse_malformed_lines(self.ignore)

    @property
    def command_line(self) -> str:
        return command_line(self.profile, self.resolved, self.overrides, self.command)

    @contextmanager
    def runner(
        self, tolerance: tuple[float, float] | None, *, loading: bool = True
    ) -> Iterator[Runner]:
        """Yield the runner of the command. A tolerance needs statistics of the recorded tensors."""
        recording = replace(self.recording, statistics=tolerance is not None, loading=loading)
        with output_directory(self.folder, self.say) as output:
            criteria = tolerance, self.say, self.meanwhile, self.ignore
            yield Runner(tuple(self.command), output, recording, *criteria)


def command_line(
    profile: Any, resolved: ResolvedProfile | None, overrides: Sequence[str], command: Sequence[str]
) -> str:
    """Return the verified command line as shell input, with possible secrets hidden."""
    secrets = known_secrets(*([resolved] if resolved else []))
    words = shareable(command, secrets)
    if resolved is not None:
        is_named = isinstance(profile, str | os.PathLike)
        launcher = ["torchrepro", "run", os.fspath(profile) if is_named else resolved.name]
        for text in overrides:
            key, equals, _ = text.partition("=")
            secret = equals and sounds_secret(key)
            launcher.append(f"{key}={HIDDEN}" if secret else without_secrets(text, secrets))
        words = [*launcher, "--", *words]
    return shell_line(words)
