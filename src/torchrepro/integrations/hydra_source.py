"""Hydra's config source for the group `repro`, and the profile that a composed config requests.

These are steps 2 and 3 in the docstring of the module `hydra`. The source notes in `chosen` which
configs Hydra requested, and the callback gets the profile from `resolved_profile`. If a composed
profile would never be applied, a job of a sweep stops, and any other run reports this at exit.

An app may use the word `repro` for itself. A config is a profile if ``+repro=`` names it, if its
name is on our search path, or if it is a file of the app that inherits one of our profiles. All
other configs belong to the app.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.singleton import Singleton
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrepro.application.applier import applied_names
from torchrepro.ground.callers import frames
from torchrepro.ground.console import say
from torchrepro.ground.errors import DriftError, ExitStatus, ProfileError, TorchreproError
from torchrepro.ground.messages import Problem, near, shown
from torchrepro.profile.document import LOADER
from torchrepro.profile.load import (
    REFUSED,
    SECTION,
    compose,
    from_mapping,
    key_of,
    parsed,
    validate,
)
from torchrepro.profile.resolved import (
    EXTRA,
    NOT_INHERITED,
    Composition,
    ValueOrigin,
    flatten,
    plain,
)
from torchrepro.profile.search_path import (
    PIECES,
    ProfileFolder,
    UnknownProfileError,
    find,
    folders_for,
    is_name,
    is_piece,
    package_folders,
    piece_named,
    piece_short_name,
    search_path,
)
from torchrepro.reporting.process_state import (
    changed_files,
    inherited,
    original_meaning,
    original_profile,
)

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile


GROUP = SECTION
APP_PREFIX = "main="  # prefix of the app's own config folder, from Hydra's provider "main"
APP = "this app's config"  # the origin of values that the app sets
CALLBACK = "torchrepro"  # the name of our callback, also in the defaults list
SCHEME = "torchrepro"
SEPARATOR = "|"
REFUSED_STATUS = 3


def values_in(path: Path) -> Any:
    """Return the contents of the YAML file `path` of an app, or None if it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8-sig"), Loader=LOADER)  # noqa: S506 - safe
    except (OSError, UnicodeError, ValueError, yaml.YAMLError, RecursionError):
        return None


def files_named(name: str, folders: Iterable[ProfileFolder]) -> list[Path]:
    """Return the app's own files in `folders` that Hydra would compose as the config `name`."""
    app_folders = [folder.path for folder in folders if folder.origin.startswith(APP_PREFIX)]
    paths = [path / f"{name.removesuffix('.yaml')}.yaml" for path in app_folders]
    return [path for path in paths if path.is_file()]


def close_name(word: str, folders: Iterable[ProfileFolder] = ()) -> str:
    """Return the profile name closest to `word`, in `folders` or on the search path."""
    return near(word, [name for folder in (*folders, *search_path()) for name in folder.names()])


def inherits_a_profile(
    path: Path, folders: Sequence[ProfileFolder], above: tuple[Path, ...] = ()
) -> bool:
    """Return whether the app's file `path` inherits a profile, maybe through files in `folders`.

    A misspelled name of a profile counts as well. Then torchrepro reports the line in the file, and
    Hydra never composes the file. `above` are the files that inherit `path`.
    """
    values = values_in(path)
    defaults = values.get("defaults") if isinstance(values, Mapping) else None
    if not isinstance(defaults, list):
        return False
    for name in defaults:
        if not isinstance(name, str) or name == "_self_":
            continue
        if not is_name(name):
            if name.startswith("pkg://"):
                return True
            continue
        files = [*files_named(name, folders), *files_named(piece_named(name), folders)]
        inherited_files = [file for file in files if file not in (*above, path)]
        if inherited_files:
            if inherits_a_profile(inherited_files[0], folders, (*above, path)):
                return True
        elif any(folder.file(name) for folder in folders_for(name)) or close_name(name):
            return True
    return False


@dataclass
class Choice:
    """The profiles and pieces that a config chooses, in the order in which they are merged."""

    profiles: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    folders: tuple[ProfileFolder, ...] = ()  # searched before the search path
    changed: list[str] = field(default_factory=list)  # lines about files changed since the original

    def add(self, name: str, folders: tuple[ProfileFolder, ...]) -> None:
        """Insert `name` first, because Hydra loads the last entry of a defaults list first."""
        names = self.pieces if is_piece(name) else self.profiles
        if name not in names:
            names.insert(0, name)
        self.folders = folders

    def compose(self) -> Composition:
        """Compose the profile with its pieces, or the pieces alone; raises `ProfileError`."""
        if self.profiles:
            return compose(self.profiles[0], as_override(self.pieces), self.folders)
        if not self.pieces:
            return Composition()
        composition = compose(self.pieces[0], as_override(self.pieces[1:]), self.folders)
        composition.name_it(", ".join(self.pieces), ValueOrigin(f"+{GROUP}/{PIECES}"))
        return composition


def as_override(pieces: Sequence[str]) -> list[str]:
    return [f"{PIECES}=[{','.join(pieces)}]"] if pieces else []


chosen = Choice()  # the profiles and pieces that Hydra requested in this composition
_profiles: dict[str, DictConfig] = {}  # the composed profiles of this composition
_sources: list[ReproConfigSource] = []  # the source of this composition
_last_config: list[str] = []  # the last requested config that is not Hydra's own


class ReproConfigSource(ConfigSource):
    """Hydra config source that reads the profiles of the group `repro` as data."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source's paths."""
        return SCHEME

    def available(self) -> bool:
        """Return True: the shipped profiles are always available."""
        return True

    def is_group(self, config_path: str) -> bool:
        group = config_path.strip("/")
        if group == GROUP and not requesting_words() and self._app_has_a_plain_value():
            return False  # `repro=false` overrides the app's own value
        if group == GROUP:
            refuse_null()
        if group in ("", GROUP):
            return True
        inner = group.removeprefix(f"{GROUP}/")
        if inner == group:
            return False
        try:
            folders = (*self._folders(), *folders_for(f"{inner}/"))
        except ProfileError:
            return True  # a damaged pack: `load_config` reports it
        return any(folder.has_group(inner) for folder in folders)

    def _app_has_a_plain_value(self) -> bool:
        # Hydra calls `is_group` for an override right after it has requested its config.
        names = [f"{name.removesuffix('.yaml')}.yaml" for name in _last_config]
        files = [root / name for name in names for root, _ in self._roots()]
        configs: Any = [values_in(path) for path in files if path.is_file()]
        store = ConfigStore.instance()
        configs += [store.load(n).node for n in names if store.get_type(n) is ObjectType.CONFIG]
        sections = [config.get(GROUP) for config in configs if hasattr(config, "get")]
        return any(section is not None and not isinstance(section, Mapping) for section in sections)

    def is_config(self, config_path: str) -> bool:
        """Return whether `load_config` loads or refuses `config_path`; Hydra handles any other."""
        # Hydra copies its sources for every composition and calls the first one for every config,
        # so another copy means another composition.
        if _sources[-1:] != [self]:
            chosen.profiles.clear()
            chosen.pieces.clear()
            chosen.changed.clear()
            _profiles.clear()
            _sources[:] = [self]
        if not config_path.startswith("hydra/"):
            _last_config[:] = [config_path]
        name = _profile_name(config_path)
        if name is None or self._is_config_of_app(name):
            return False
        try:
            if original_meaning(name) is None:
                find(name, self._folders())
        except UnknownProfileError:
            # Hydra may find a file of this name, and would run its code. We refuse a name that is
            # close to a profile's, since Hydra silently skips an optional config. We also refuse a
            # name on the command line, since Hydra's message does not list the profiles of packs.
            word = piece_short_name(name) if is_piece(name) else name
            is_requested = word in requested_names()
            return is_requested or not is_name(name) or bool(close_name(name, self._folders()))
        except ProfileError:
            return True  # `load_config` reports the error
        return True

    def _is_config_of_app(self, name: str) -> bool:
        """Return whether `name` is a config in the app's own group `repro`, and not a profile.

        Hydra itself composes such a config. Pieces, and files outside of the app such as the files
        of a pack, are always read as data.
        """
        if ".." in name or is_piece(name):
            return False
        try:
            if is_name(name) and any(folder.file(name) for folder in folders_for(name)):
                return False
        except ProfileError:
            return False  # a damaged pack: `load_config` reports it
        if files := files_named(name, self._folders()):
            inherits = inherits_a_profile(files[0], self._folders())
            return name not in requested_names() and not inherits
        stored = ConfigStore.instance().get_type(f"{GROUP}/{name.removesuffix('.yaml')}.yaml")
        return stored is ObjectType.CONFIG

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the composed profile, or the reason why it is refused.

        After an exception Hydra would print its own traceback and choose the exit status. So the
        reason is passed in the config to the callback, which stops the run.
        """
        name = _profile_name(config_path)
        if name is None:
            raise ConfigLoadError(f"Config not found: {config_path}")
        # Hydra loads even a default that `~repro/with` deletes, and deletes it afterwards.
        is_deleted = is_piece(name) and any(map(_DELETES_PIECES.fullmatch, words_of_group()))
        if not is_deleted:
            chosen.add(name, self._folders())
        config = OmegaConf.create({GROUP: self._values(name)})
        # Not a struct, so that every key can be overridden. The schema refuses a wrong key, with a
        # better message than Hydra's.
        OmegaConf.set_struct(config[GROUP], value=False)
        if not is_piece(name):
            _profiles[name] = config
            note_composed(name, str(config[GROUP].get("name", name)))
        elif not is_deleted:
            # A piece overrides the profile at any position in a defaults list. Hydra loads all
            # configs of a composition, the last one first, before it merges them.
            for profile, composed in _profiles.items():
                for key, value in self._values(profile).items():
                    composed[GROUP][key] = value
        header: dict[str, str | None] = {"package": "_global_"}
        return ConfigResult(
            provider=self.provider, path=f"{SCHEME}://", config=config, header=header
        )

    def _values(self, name: str) -> dict[str, Any]:
        if not is_piece(name):
            repeated = values_repeated(name, self._folders())
            if repeated is not None:
                return repeated
        try:
            pieces = [] if is_piece(name) else as_override(chosen.pieces)
            values = compose(name, pieces, self._folders()).values
        except ProfileError as error:
            refuse_if_shown(error)
            return {REFUSED: quote(str(error))}
        # A piece does not rename the profile that it is merged into.
        return {k: v for k, v in values.items() if not is_piece(name) or k not in NOT_INHERITED}

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the profiles in the group, for Hydra's help and completion."""
        group = config_path.strip("/")
        if group == "":
            return [GROUP] if results_filter is not ObjectType.CONFIG else []
        if group.partition("/")[0] != GROUP or results_filter is ObjectType.GROUP:
            return []
        names = {name for folder in (*self._folders(), *search_path()) for name in folder.names()}
        if group == GROUP:
            return sorted(name for name in names if not is_piece(name))
        if group == f"{GROUP}/{PIECES}":
            return sorted(piece_short_name(name) for name in names if is_piece(name))
        inner = f"{group.removeprefix(f'{GROUP}/')}/"
        return sorted(name.removeprefix(inner) for name in names if name.startswith(inner))

    def _folders(self) -> tuple[ProfileFolder, ...]:
        folders = [ProfileFolder(root / GROUP, entry) for root, entry in self._roots()]
        return tuple(folder for folder in folders if folder.path.is_dir())

    def _roots(self) -> Iterator[tuple[Path, str]]:
        for entry in self.path.split(SEPARATOR):
            scheme, _, rest = entry.removeprefix(APP_PREFIX).rpartition("://")
            if scheme == "pkg":
                name, _, inner = rest.partition("/")
                roots = [root / inner for root in package_folders(name)[0]]
            else:
                roots = [Path(rest)] if scheme in ("", "file") and rest else []
            yield from ((root, entry) for root in roots)


def _profile_name(config_path: str) -> str | None:
    """Return the text after ``repro/``: a profile's name, path or ``pkg://`` address.

    ``repro/with/NAME`` is a piece, possibly of a pack: ``repro/with/team/zero``.
    """
    name = config_path.removeprefix(f"{GROUP}/")
    if name == config_path or not name:
        return None
    piece = name.removeprefix(f"{PIECES}/")
    return name if piece == name else piece_named(piece)


_REQUEST = re.compile(rf"\+{GROUP}(/\w+)?(@[^=]*)?=.")
_DELETES_PIECES = re.compile(rf"~{GROUP}/{PIECES}(@[^=]*)?(=.*)?")
_SEPARATORS = re.compile(r"[\s,()\[\]'\"]+")
_TODO = {
    "compose": f"call torchrepro.apply(config.{GROUP}) before the program's first random number",
    "main": "keep torchrepro's callback (this app, or the command line with "
    f"~hydra.callbacks.{CALLBACK}, removes it)",
}


@dataclass
class _Unapplied:
    """The profiles that were composed in this process and not applied yet."""

    names: dict[str, str] = field(default_factory=dict)  # name in Hydra -> name in the profile
    composer: str = ""  # as in `_TODO`
    sweeping: bool = False  # whether our callback was called at the start of this sweep
    sweep_words: list[str] | None = None  # in a launcher's process: the sweep's words on `repro`
    reporter: int = 0  # the id of the process that reports `names` at its end


unapplied = _Unapplied()


def note_composed(name: str, profile_name: str) -> None:
    """Note that Hydra has composed the profile `name`, for a job or for a caller of `compose`.

    Ends the process if the job belongs to a sweep in which our callback is not called.
    """
    # A source gets only the name of a config. The public functions on the stack show its purpose:
    # hydra.compose, or ConfigLoader.load_sweep_config, by which launchers compose each job.
    composer = "main"
    for frame in frames():
        if frame.f_globals.get("__name__") == "hydra.compose":
            composer = "compose"
        elif frame.f_code.co_name == "load_sweep_config":
            composer = "sweep"
        if composer != "main":
            break
    if composer == "sweep":
        if not unapplied.sweeping and inherited() is None:
            say(_unprotected([name], "main"))
            raise SystemExit(REFUSED_STATUS)
        return  # its job may run in another process, where the callback applies the profile
    if composer == "main":  # a new program starts; `compose` may run inside a sweep
        unapplied.sweeping = False
    unapplied.composer = composer
    unapplied.names[name] = profile_name
    if unapplied.reporter != os.getpid():
        unapplied.reporter = os.getpid()
        atexit.register(_report_unapplied, os.getpid(), ExitStatus())


def words_of_group() -> list[str]:
    """Return the words of the command line that concern the group `repro`."""
    if unapplied.sweep_words is not None:
        return unapplied.sweep_words
    return [word for word in sys.argv[1:] if word.lstrip("+~").startswith(GROUP)]


def requesting_words() -> list[str]:
    """Return the words of the command line that request a profile."""
    return [word for word in words_of_group() if _REQUEST.match(word)]


def requested_names() -> frozenset[str]:
    """Return the names after ``+repro=`` and ``+repro/with=``, including all names of a sweep."""
    values = (word.partition("=")[2] for word in requesting_words())
    return frozenset(name for value in values for name in _SEPARATORS.split(value) if name)


def _report_unapplied(process: int, status: ExitStatus) -> None:
    if os.getpid() != process or inherited() is not None:
        return
    applied = applied_names()
    names = [name for name, profile in unapplied.names.items() if profile not in applied]
    if not names or (applied and unapplied.composer == "main"):
        return
    if unapplied.composer == "main":
        # Hydra sets its HydraConfig for a job and unsets it afterwards. After a command that only
        # shows a config it is still set; after an error before the job it does not exist.
        exists = HydraConfig in Singleton.get_state()["instances"]
        if not exists or HydraConfig.initialized():
            return
    say(_unprotected(names, unapplied.composer))
    if requesting_words() and not applied:
        status.value = REFUSED_STATUS


_NULL = re.compile(rf"\+*{GROUP}(@[^=]*)?=(.*,)?(null)?(,.*)?")
_SHOWING = re.compile(r"-c|-i|--cfg(=.*)?|--info(=.*)?")


def refuse_null() -> None:
    """End the process if the command line sets the group to null, which Hydra does not allow."""
    word = next((word for word in sys.argv[1:] if _NULL.fullmatch(word)), "")
    if word:
        say(
            f"{word}: null is not a profile, and Hydra allows no null for a group\n"
            f"    to do: remove this word, or delete the app's own profile with ~{GROUP}"
        )
        raise SystemExit(REFUSED_STATUS)


def refuse_if_shown(error: TorchreproError) -> None:
    """End the process with `error` if Hydra only shows the config, and so calls no callback."""
    if any(map(_SHOWING.fullmatch, sys.argv[1:])):
        with exit_on_error():
            raise error


def refuse_switched_off(variable: str) -> None:
    """End the process if the command line requests a profile, but `variable` disables profiles."""
    for name in requested_names():
        for profile in (name, piece_named(name)):
            with suppress(ProfileError):
                find(profile)
                say(
                    f"{variable}=0 disables profiles in this app, and the command line requests "
                    f"{name}\n    to do: unset {variable}, or start with "
                    "`torchrepro run PROFILE -- COMMAND`"
                )
                raise SystemExit(REFUSED_STATUS)


def _unprotected(names: list[str], composer: str) -> str:
    return (
        f"{GROUP}={', '.join(names)} was composed by Hydra but never applied: the program runs "
        f"without it\n    to do: {_TODO[composer]}, or start with "
        f"`torchrepro run {names[0]} -- COMMAND`"
    )


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Report any error of the block, also an internal error, and exit with status 3.

    If the profile has drifted by the end of the job, the exit status is 1.
    """
    try:
        yield
    except TorchreproError as error:
        say(error)
        drifted = isinstance(error, DriftError)  # the job has run already
        raise SystemExit(error.exit_status if drifted else REFUSED_STATUS) from None
    except Exception as error:  # noqa: BLE001 - Hydra would warn and run the task
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(REFUSED_STATUS) from None


def resolved_profile(config: DictConfig) -> ResolvedProfile | None:
    """Return the profile that `config` requests, or None if it requests none.

    Raises `ProfileError` if the profile is refused, or if the request has no effect.
    """
    # Unresolved: messages show an override as written, not the output of a resolver.
    task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    overrides: list[str] = list(task)  # of equal keys the last one counts
    keys = {text: key_of(text) for text in overrides}
    for text, key in keys.items():
        if text.startswith("~") and key == GROUP:
            chosen.profiles.clear()
    names = chosen.profiles
    if len(names) > 1:
        raise ProfileError.about(
            "two profiles at once",
            found=f"{GROUP}: [{', '.join(names)}]",
            todo="write a profile that inherits both: defaults: [one, two, _self_]",
        )

    # Without a chosen profile, the section is ours only if the command line added all of it by `+`.
    added = [text for text in keys if text.startswith("+")]
    typed = [text.partition("=")[2] for text in added if keys[text] == GROUP]
    plain_section = _plain_section(config)
    is_added = isinstance(plain_section, dict) and all(
        any(_sets(text, key) for text in added) for key in plain_section
    )
    if not (names or chosen.pieces or typed or (plain_section and is_added)):
        if isinstance(plain_section, str) and (close := close_name(plain_section)):
            raise ProfileError(_plain_value(plain_section, close))
        return None

    # `repro.with=` chooses pieces and overrides no value.
    texts = [text for text in overrides if keys[text].startswith(f"{GROUP}.")]
    texts = [text for text in texts if keys[text] != f"{GROUP}.{PIECES}"]
    words = [text.lstrip("+").replace(f"{GROUP}.", "", 1) for text in texts]
    asked = ((names or [""])[0], *as_override(chosen.pieces), *words)
    if repeated := original_profile(asked[0], asked[1:]):
        return repeated
    section = config.get(GROUP)
    if section is None:
        if names:
            raise ProfileError.about(
                f"the profile was placed in another package than `{GROUP}`, so it is not applied",
                found=", ".join(names),
                todo=f"choose it without a package: +{GROUP}={names[0]}",
            )
        return None
    if not isinstance(section, DictConfig):
        raise ProfileError(_plain_value(section, ""))
    try:
        composition = from_mapping(section, where=APP)
        from_files = chosen.compose()
    except ProfileError as error:
        problems = [_at_override(problem, overrides) for problem in error.problems]
        raise ProfileError(problems) from None
    _set_origins(composition, from_files, overrides)
    if EXTRA in composition.values:
        composition.typed |= _typed(composition, overrides)
    if not names and not chosen.pieces and typed:  # `+repro={seed: 7}`
        composition.name_it(typed[0], ValueOrigin(APP))
    composition.asked = asked if asked[0] else ()
    try:
        return validate(composition).resolved
    except ProfileError as error:
        raise ProfileError([_with_remedy(problem) for problem in error.problems]) from None


def note_on_app_section(config: DictConfig) -> str:
    """Return a line if the app's own value of `repro` is also a profile's name, or ''."""
    words = _SEPARATORS.split(str(_plain_section(config)))
    named = [name for folder in search_path() for name in folder.names() if name in words]
    if not named:
        return ""
    return (
        f"`{GROUP}` in this app's config belongs to the app and requests no profile "
        f"(to run under one: torchrepro run {named[0]} -- COMMAND)"
    )


def values_repeated(name: str, folders: tuple[ProfileFolder, ...]) -> dict[str, Any] | None:
    """In a rerun, return the values of the profile `name` in the original run; else None.

    Adds a line to `chosen.changed` if the files now define other values or no profile `name`.
    """
    original = original_meaning(name)
    if original is None:
        return None
    # Values from the config of the app cannot be compared, because it is not composed yet.
    of_app = any(origin.set_by == APP for origin in original.origins.values())
    of_files_alone = not of_app and not any("${" in text for text in original.asked)
    if original.asked[:1] == (name,) and of_files_alone:
        try:
            present = validate(compose(name, original.asked[1:], folders)).resolved.digest
        except ProfileError as error:
            present = error.problem.what
        if present != original.digest:
            chosen.changed.append(changed_files(name, present))
    values: dict[str, Any] = plain(original.values)
    return values


def _plain_section(config: DictConfig) -> Any:
    """Return the section `repro` as plain data, or None. Calls no resolver of OmegaConf."""
    try:
        if OmegaConf.is_missing(config, GROUP) or GROUP not in config:
            return None
        copy: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, GROUP), resolve=False)
        if OmegaConf.is_interpolation(config, GROUP) and ":" not in copy[GROUP]:  # no resolver
            value: Any = config[GROUP]
            return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        return copy[GROUP]
    except OmegaConfBaseException:
        return None


def _plain_value(value: Any, close: str) -> Problem:
    name = close or "NAME"
    return Problem(
        f"`{GROUP}` is a plain value in this app's config, so no profile is applied",
        key=GROUP,
        found=shown(value),
        near=close if close != value else "",
        todo=f"choose the profile in the defaults list, `- {GROUP}: {name}`, "
        f"or on the command line, +{GROUP}={name}; if the value belongs to the app, "
        f"disable torchrepro with ~hydra.callbacks.{CALLBACK}",
    )


def _with_remedy(problem: Problem) -> Problem:
    """Add advice for an app that uses the section `repro`, or the file, for itself."""
    if problem.todo or not chosen.profiles:
        return problem
    name, todo = chosen.profiles[0], ""
    files = files_named(name, chosen.folders)
    if problem.where == APP:
        todo = f"if `{GROUP}` belongs to the app: torchrepro run {name} -- COMMAND"
    elif files and not inherits_a_profile(files[0], chosen.folders):
        todo = (
            f"if {name} belongs to the app, choose it in the app's defaults list, "
            f"`- {GROUP}: {name}`: +{GROUP}= always chooses a profile"
        )
    return problem._replace(todo=todo)


def _set_origins(
    composition: Composition, from_files: Composition, overrides: Sequence[str]
) -> None:
    for key in NOT_INHERITED:
        if key in from_files.values:  # pieces alone keep their names
            composition.values.setdefault(key, from_files.values[key])
    for key, value in flatten(composition.values).items():
        file = from_files.origins.get(key)
        text = _override_of(key, overrides)
        if text is not None:
            composition.origins[key] = ValueOrigin(f"override {text}", "", value, file)
        elif file is not None and file.value == value:
            composition.origins[key] = file
        else:
            composition.origins[key] = ValueOrigin(APP, "", value, file)


def _typed(composition: Composition, overrides: Sequence[str]) -> set[str]:
    """Return the keys whose values come from `overrides`."""
    overridden: dict[str, Any] = {}
    for text in overrides:
        with suppress(ProfileError):  # we cannot parse every override of the app's own config
            overridden |= flatten(parsed(text))
    values = flatten(composition.values)
    return {key for key, value in values.items() if overridden.get(f"{GROUP}.{key}") == value}


def _at_override(problem: Problem, overrides: Sequence[str]) -> Problem:
    key = problem.key.removeprefix(f"{GROUP}.")
    text = _override_of(key, overrides) if key else None
    return problem._replace(where=f"override {text}") if text else problem


def _override_of(key: str, overrides: Sequence[str]) -> str | None:
    return next((text for text in reversed(overrides) if _sets(text, key)), None)


def _sets(override: str, key: str) -> bool:
    """Return whether `override` sets `key`, a part of `key`, or a section that contains `key`."""
    name, value = key_of(override), override.partition("=")[2]
    if name == GROUP:  # `+repro=NAME` or `+repro={seed: 7}`
        return value.startswith("{") and key.rpartition(".")[2] in value
    inside = f"{GROUP}.{key}."
    return inside.startswith(f"{name}.") or f"{name}.".startswith(inside)
