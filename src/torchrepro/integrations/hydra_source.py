"""Hydra's config source for the group `repro`, and the profile that a composed config requests.

Steps 2 and 3 of those that `hydra` describes. The source notes in `chosen` what Hydra asked it for,
and the callback gets the profile from `resolved_profile`. What was composed and never applied is
refused before a job of a sweep, or reported at exit.

Nobody reserved the word `repro` for torchrepro. A profile is what ``+repro=`` names, a name on our
search path, or a file of the app that inherits one of ours. Anything else is the app's own.
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
APPS_OWN = "main="  # begins the origin of the app's own config folder, Hydra's provider "main"
APP = "this app's config"  # the place of values that it sets
CALLBACK = "torchrepro"  # its name among the callbacks of an app, and in its defaults list
SCHEME = "torchrepro"
SEPARATOR = "|"
REFUSED_STATUS = 3


def values_in(path: Path) -> Any:
    """Return what the YAML file `path` of an app holds, or None if it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8-sig"), Loader=LOADER)  # noqa: S506 - safe
    except (OSError, UnicodeError, ValueError, yaml.YAMLError, RecursionError):
        return None


def files_named(name: str, folders: Iterable[ProfileFolder]) -> list[Path]:
    """Return the app's own files, in its `folders`, that Hydra would compose as `name`."""
    own = [folder.path for folder in folders if folder.origin.startswith(APPS_OWN)]
    paths = [path / f"{name.removesuffix('.yaml')}.yaml" for path in own]
    return [path for path in paths if path.is_file()]


def close_name(word: str, folders: Iterable[ProfileFolder] = ()) -> str:
    """Return the profile, in `folders` or on the search path, whose name is closest to `word`."""
    return near(word, [name for each in (*folders, *search_path()) for name in each.names()])


def inherits_a_profile(
    path: Path, folders: Sequence[ProfileFolder], above: tuple[Path, ...] = ()
) -> bool:
    """Whether the app's file `path` inherits a profile of ours, by the app's own `folders`.

    A name that is nearly one of ours counts: the file is then refused at its line, and Hydra never
    composes it. `above` are the files that inherit `path`.
    """
    values = values_in(path)
    entries = values.get("defaults") if isinstance(values, Mapping) else None
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, str) or entry == "_self_":
            continue
        if not is_name(entry):
            if entry.startswith("pkg://"):
                return True
            continue
        files = [*files_named(entry, folders), *files_named(piece_named(entry), folders)]
        others = [file for file in files if file not in (*above, path)]
        if others:
            if inherits_a_profile(others[0], folders, (*above, path)):
                return True
        elif any(folder.file(entry) for folder in folders_for(entry)) or close_name(entry):
            return True
    return False


@dataclass
class Choice:
    """The profiles and pieces that a config chooses, in the order in which they are merged."""

    profiles: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    folders: tuple[ProfileFolder, ...] = ()  # where they are searched for first
    changed: list[str] = field(default_factory=list)  # lines on files, since the original run

    def add(self, name: str, folders: tuple[ProfileFolder, ...]) -> None:
        """Note that `name` was chosen; Hydra asks for the last entry of a defaults list first."""
        names = self.pieces if is_piece(name) else self.profiles
        if name not in names:
            names.insert(0, name)
        self.folders = folders

    def compose(self) -> Composition:
        """Return the profile with its pieces, or the pieces alone; raises `ProfileError`."""
        if self.profiles:
            return compose(self.profiles[0], as_override(self.pieces), self.folders)
        if not self.pieces:
            return Composition()
        composition = compose(self.pieces[0], as_override(self.pieces[1:]), self.folders)
        composition.name_it(", ".join(self.pieces), ValueOrigin(f"+{GROUP}/{PIECES}"))
        return composition


def as_override(pieces: Sequence[str]) -> list[str]:
    return [f"{PIECES}=[{','.join(pieces)}]"] if pieces else []


chosen = Choice()  # what the source was asked for while Hydra composed
_profiles: dict[str, DictConfig] = {}  # those of the present composition
_sources: list[ReproConfigSource] = []  # the source of the present composition
_last_config: list[str] = []  # the one outside of Hydra's own that was asked for last


class ReproConfigSource(ConfigSource):
    """Reads the profiles of the group `repro` as data, for Hydra to compose."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source's paths."""
        return SCHEME

    def available(self) -> bool:
        """Return True: the shipped profiles are always there."""
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
            return True  # a damaged pack: `load_config` says so
        return any(folder.has_group(inner) for folder in folders)

    def _app_has_a_plain_value(self) -> bool:
        # Hydra asks whether an override names a group right after it has asked for that config.
        names = [f"{name.removesuffix('.yaml')}.yaml" for name in _last_config]
        files = [root / name for name in names for root, _ in self._roots()]
        held: Any = [values_in(path) for path in files if path.is_file()]
        store = ConfigStore.instance()
        held += [store.load(n).node for n in names if store.get_type(n) is ObjectType.CONFIG]
        own = [each.get(GROUP) for each in held if hasattr(each, "get")]
        return any(value is not None and not isinstance(value, Mapping) for value in own)

    def is_config(self, config_path: str) -> bool:
        """Return whether `config_path` names a profile that can be read, well-formed or not."""
        # Hydra copies its sources for every composition and asks the first one for every config,
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
        if name is None or self._is_the_apps_own(name):
            return False
        try:
            if original_meaning(name) is None:
                find(name, self._folders())
        except UnknownProfileError:
            # Hydra may find a file of this name, and would run its code. A name that is nearly a
            # profile's is ours to refuse: Hydra skips an optional one without a word. So is one
            # that the command line asks for: Hydra lists its search path and no profile of a pack.
            word = piece_short_name(name) if is_piece(name) else name
            asked_for = word in requested_names()
            return asked_for or not is_name(name) or bool(close_name(name, self._folders()))
        except ProfileError:
            return True  # there is something, and `load_config` says what is wrong with it
        return True

    def _is_the_apps_own(self, name: str) -> bool:
        """Whether the app has a config of this name in its group `repro` that is not a profile.

        Hydra composes it like any other config of the app. A file elsewhere, as in a pack, is read
        as data all the same, and so is a piece, whose folder is ours.
        """
        if ".." in name or is_piece(name):
            return False
        try:
            if is_name(name) and any(folder.file(name) for folder in folders_for(name)):
                return False
        except ProfileError:
            return False  # a damaged pack: `load_config` says so
        if files := files_named(name, self._folders()):
            inherits = inherits_a_profile(files[0], self._folders())
            return name not in requested_names() and not inherits
        stored = ConfigStore.instance().get_type(f"{GROUP}/{name.removesuffix('.yaml')}.yaml")
        return stored is ObjectType.CONFIG

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the composed profile, or the reason why it is refused.

        An exception here would end in Hydra's own traceback and exit status. So the reason
        travels in the config to the callback, which stops the run.
        """
        name = _profile_name(config_path)
        if name is None:
            raise ConfigLoadError(f"Config not found: {config_path}")
        # Hydra reads a default that `~repro/with` deletes, and deletes it afterwards.
        is_deleted = is_piece(name) and any(map(_DELETES_PIECES.fullmatch, words_of_group()))
        if not is_deleted:
            chosen.add(name, self._folders())
        config = OmegaConf.create({GROUP: self._values(name)})
        # An open section: every key can be overridden, set or not. The schema refuses a wrong
        # one, with a message that says what was meant.
        OmegaConf.set_struct(config[GROUP], value=False)
        if not is_piece(name):
            _profiles[name] = config
            note_composed(name, str(config[GROUP].get("name", name)))
        elif not is_deleted:
            # It lies on top of the profile, wherever it stands in a defaults list: Hydra loads
            # every config of a composition, the last one first, before it merges them.
            for profile, composed in _profiles.items():
                for key, value in self._values(profile).items():
                    composed[GROUP][key] = value
        header: dict[str, str | None] = {"package": "_global_"}
        return ConfigResult(
            provider=self.provider, path=f"{SCHEME}://", config=config, header=header
        )

    def _values(self, name: str) -> dict[str, Any]:
        a_piece = is_piece(name)
        repeated = None if a_piece else values_repeated(name, self._folders())
        if repeated is not None:
            return repeated
        try:
            pieces = [] if a_piece else as_override(chosen.pieces)
            values = compose(name, pieces, self._folders()).values
        except ProfileError as error:
            refuse_if_shown(error)
            return {REFUSED: quote(str(error))}
        # A piece does not rename the profile that it is merged into.
        return {k: v for k, v in values.items() if not a_piece or k not in NOT_INHERITED}

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
            scheme, _, rest = entry.removeprefix(APPS_OWN).rpartition("://")
            if scheme == "pkg":
                name, _, inner = rest.partition("/")
                roots = [root / inner for root in package_folders(name)[0]]
            else:
                roots = [Path(rest)] if scheme in ("", "file") and rest else []
            yield from ((root, entry) for root in roots)


def _profile_name(config_path: str) -> str | None:
    """Return what follows ``repro/``: the name of a profile, or a path or ``pkg://`` one.

    What follows ``repro/with/`` is a piece, also one of a pack: ``repro/with/team/zero``.
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
    "main": f"let Hydra call torchrepro's callback: this app, or a ~hydra.callbacks.{CALLBACK} on "
    "the command line, takes it away",
}


@dataclass
class _Unapplied:
    """What was composed in this process and not applied yet."""

    names: dict[str, str] = field(default_factory=dict)  # Hydra's name: what it calls itself
    composer: str = ""
    sweeping: bool = False  # whether our callback has seen the start of the present sweep
    sweep_words: list[str] | None = None  # in a launcher's process: those of the sweep's group
    reporter: int = 0  # the process that reports at its end what is left


unapplied = _Unapplied()


def note_composed(name: str, own_name: str) -> None:
    """Note that Hydra has composed the profile `name`, for a job or for a caller of `compose`.

    Ends the process before a job of a sweep that our callback cannot protect.
    """
    # Hydra gives a source only the name of a config, so its public callers tell for whom it is:
    # hydra.compose, and ConfigLoader.load_sweep_config, by which launchers compose each job.
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
        return  # its job may run in another process, where the callback takes it
    if composer == "main":  # another program begins; a job of a sweep may compose for itself
        unapplied.sweeping = False
    unapplied.composer = composer
    unapplied.names[name] = own_name
    if unapplied.reporter != os.getpid():
        unapplied.reporter = os.getpid()
        atexit.register(_report_unapplied, os.getpid(), ExitStatus())


def words_of_group() -> list[str]:
    """Return the words of the command line that are about the group `repro`."""
    if unapplied.sweep_words is not None:
        return unapplied.sweep_words
    return [word for word in sys.argv[1:] if word.lstrip("+~").startswith(GROUP)]


def requesting_words() -> list[str]:
    """Return the words of the command line that request a profile."""
    return [word for word in words_of_group() if _REQUEST.match(word)]


def requested_names() -> frozenset[str]:
    """Return the names after ``+repro=`` and ``+repro/with=``, those of a sweep included."""
    values = (word.partition("=")[2] for word in requesting_words())
    return frozenset(name for value in values for name in _SEPARATORS.split(value) if name)


def _report_unapplied(process: int, status: ExitStatus) -> None:
    if os.getpid() != process or inherited() is not None:
        return
    applied = applied_names()
    names = [name for name, own in unapplied.names.items() if own not in applied]
    if not names or (applied and unapplied.composer == "main"):
        return
    if unapplied.composer == "main":
        # Hydra sets its HydraConfig for a job and unsets it afterwards. A command that only shows
        # a config leaves it set, and one that ends with an error before never makes it.
        made = HydraConfig in Singleton.get_state()["instances"]
        if not made or HydraConfig.initialized():
            return
    say(_unprotected(names, unapplied.composer))
    if requesting_words() and not applied:
        status.value = REFUSED_STATUS


_NULL = re.compile(rf"\+*{GROUP}(@[^=]*)?=(.*,)?(null)?(,.*)?")
_SHOWING = re.compile(r"-c|-i|--cfg(=.*)?|--info(=.*)?")


def refuse_null() -> None:
    """End the process where the command line gives the group no profile: Hydra takes no null."""
    word = next((each for each in sys.argv[1:] if _NULL.fullmatch(each)), "")
    if word:
        say(
            f"{word}: null is no profile, and Hydra takes it for no group\n"
            f"    to do: leave the profile out, or take out the one of the app: ~{GROUP}"
        )
        raise SystemExit(REFUSED_STATUS)


def refuse_if_shown(error: TorchreproError) -> None:
    """End the process if Hydra is only to show the config: it calls no callback then."""
    if any(map(_SHOWING.fullmatch, sys.argv[1:])):
        with exit_on_error():
            raise error


def refuse_switched_off(variable: str) -> None:
    """End the process where the command line requests a profile that Hydra is not to know."""
    for name in requested_names():
        for meant in (name, piece_named(name)):
            with suppress(ProfileError):
                find(meant)
                say(
                    f"{variable}=0 keeps profiles out of this app, and the command line asks for "
                    f"{name}\n    to do: unset {variable}, or start with "
                    "`torchrepro run PROFILE -- COMMAND`"
                )
                raise SystemExit(REFUSED_STATUS)


def _unprotected(names: list[str], composer: str) -> str:
    return (
        f"{GROUP}={', '.join(names)} was composed by Hydra, and nothing put it in force: the "
        f"program is not protected\n    to do: {_TODO[composer]}, or start with "
        f"`torchrepro run {names[0]} -- COMMAND`"
    )


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn whatever torchrepro refuses, and any error of its own, into exit status 3.

    A profile that has drifted by the end of the job is status 1.
    """
    try:
        yield
    except TorchreproError as error:
        say(error)
        drifted = isinstance(error, DriftError)  # the job has run: nothing was refused
        raise SystemExit(error.exit_status if drifted else REFUSED_STATUS) from None
    except Exception as error:  # noqa: BLE001 - Hydra would warn and run the task
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(REFUSED_STATUS) from None


def resolved_profile(config: DictConfig) -> ResolvedProfile | None:
    """Return the profile that `config` asks for, or None if it asks for none.

    Raises `ProfileError` for one that is refused, or chosen in a way that leaves it without effect.
    """
    # Unresolved: an override shows what was written, never what a resolver makes of it.
    task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    overrides: list[str] = list(task)  # one may be written twice, and the last one counts
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

    # Whether a profile was chosen, or the command line added all that is there by a `+`.
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

    # The pieces are chosen as well, and so no overrides of values.
    own = [text for text in overrides if keys[text].startswith(f"{GROUP}.")]
    own = [text for text in own if keys[text] != f"{GROUP}.{PIECES}"]
    words = [text.lstrip("+").replace(f"{GROUP}.", "", 1) for text in own]
    asked = ((names or [""])[0], *as_override(chosen.pieces), *words)
    if repeated := original_profile(asked[0], asked[1:]):
        return repeated
    section = config.get(GROUP)
    if section is None:
        if names:
            raise ProfileError.about(
                f"the profile was placed in another package than `{GROUP}`, so it is not in force",
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
        raise ProfileError([_at_override(each, overrides) for each in error.problems]) from None
    _set_origins(composition, from_files, overrides)
    if EXTRA in composition.values:
        composition.typed |= _typed(composition, overrides)
    if not names and not chosen.pieces and typed:  # `+repro={seed: 7}`
        composition.name_it(typed[0], ValueOrigin(APP))
    composition.asked = asked if asked[0] else ()
    try:
        return validate(composition).resolved
    except ProfileError as error:
        raise ProfileError([_with_way_out(problem) for problem in error.problems]) from None


def note_on_the_apps_own(config: DictConfig) -> str:
    """Return a line where the app's own `repro` names a profile, which it does not ask for."""
    words = _SEPARATORS.split(str(_plain_section(config)))
    named = [name for folder in search_path() for name in folder.names() if name in words]
    if not named:
        return ""
    return (
        f"`{GROUP}` in this app's config is the app's own and asks for no profile "
        f"(to run under one: torchrepro run {named[0]} -- COMMAND)"
    )


def values_repeated(name: str, folders: tuple[ProfileFolder, ...]) -> dict[str, Any] | None:
    """Return the values of the profile `name` in the run that is repeated here, or None.

    Notes a line where the files give another profile now, or none.
    """
    original = original_meaning(name)
    if original is None:
        return None
    # Values that depend on the config of the app cannot be compared: it is not composed yet.
    of_app = any(origin.set_by == APP for origin in original.origins.values())
    of_files_alone = not of_app and not any("${" in text for text in original.asked)
    if original.asked[:1] == (name,) and of_files_alone:
        try:
            now = validate(compose(name, original.asked[1:], folders)).resolved.digest
        except ProfileError as error:
            now = error.problem.what
        if now != original.digest:
            chosen.changed.append(changed_files(name, now))
    values: dict[str, Any] = plain(original.values)
    return values


def _plain_section(config: DictConfig) -> Any:
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
        f"`{GROUP}` is a plain value in this app's config, so no profile is in force",
        key=GROUP,
        found=shown(value),
        near=close if close != value else "",
        todo=f"choose the profile in the defaults list, `- {GROUP}: {name}`, "
        f"or on the command line, +{GROUP}={name}; if it is the app's own and no profile, "
        f"~hydra.callbacks.{CALLBACK} leaves it alone",
    )


def _with_way_out(problem: Problem) -> Problem:
    if problem.todo or not chosen.profiles:
        return problem
    name, todo = chosen.profiles[0], ""
    files = files_named(name, chosen.folders)
    if problem.where == APP:
        todo = f"if `{GROUP}` is the app's own: torchrepro run {name} -- COMMAND"
    elif files and not inherits_a_profile(files[0], chosen.folders):
        todo = (
            f"if {name} is the app's own and no profile, choose it in the app's defaults list, "
            f"`- {GROUP}: {name}`: what +{GROUP}= names is a profile"
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
    given: dict[str, Any] = {}
    for text in overrides:
        with suppress(ProfileError):  # an override of the app's own config may be anything
            given |= flatten(parsed(text))
    values = flatten(composition.values)
    return {key for key, value in values.items() if given.get(f"{GROUP}.{key}") == value}


def _at_override(problem: Problem, overrides: Sequence[str]) -> Problem:
    key = problem.key.removeprefix(f"{GROUP}.")
    text = _override_of(key, overrides) if key else None
    return problem._replace(where=f"override {text}") if text else problem


def _override_of(key: str, overrides: Sequence[str]) -> str | None:
    return next((text for text in reversed(overrides) if _sets(text, key)), None)


def _sets(override: str, key: str) -> bool:
    name, value = key_of(override), override.partition("=")[2]
    if name == GROUP:  # a profile that is chosen, or values that are written in its place
        return value.startswith("{") and key.rpartition(".")[2] in value
    inside = f"{GROUP}.{key}."
    return inside.startswith(f"{name}.") or f"{name}.".startswith(inside)
