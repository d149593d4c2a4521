"""Hydra's config source for the group `repro`, and the profile that a composed config requests.

These are steps 2 and 3 in the docstring of the module `hydra`. Hydra makes a new source for each
composition, and the source makes a `RequestedProfile`. It loads the profiles and pieces that Hydra
asks for, and the callback gets the resolved profile from it. If a composed profile would never be
applied, a job of a sweep stops, and any other run reports this at exit.

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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import MISSING, DictConfig, OmegaConf

from torchrepro.application.planner import profiles as applied_profiles
from torchrepro.ground.callers import frames
from torchrepro.ground.console import say
from torchrepro.ground.errors import ExitStatus, Problem, ProfileError, near, shown
from torchrepro.profile.document import LOADER
from torchrepro.profile.load import REFUSED, SECTION, compose, from_mapping, validate
from torchrepro.profile.resolved import (
    NOT_INHERITED,
    Composition,
    ResolvedProfile,
    ValueOrigin,
    flatten,
    plain,
)
from torchrepro.profile.search_path import (
    PACKAGE,
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

GROUP = SECTION
APP_PREFIX = "main="  # prefix of the app's own config folder, from Hydra's provider "main"
APP = "this app's config"  # the origin of values that the app sets
CALLBACK = "torchrepro"  # the name of our callback, also in the defaults list
SCHEME = "torchrepro"
SEPARATOR = "|"
REFUSED_STATUS = 3
_SHOWING = re.compile(r"-c|-i|--cfg(=.*)?|--info(=.*)?")


@dataclass(frozen=True)
class ReproOverride:
    """An override of the group or the section `repro`, read by Hydra's parser."""

    text: str
    key: str  # dotted, with `repro`
    requests: frozenset[str]  # the names after ``+repro=`` and ``+repro/with=``, also of a sweep
    leaves: Mapping[str, Any]  # dotted key -> the value that the override sets

    def sets(self, key: str) -> bool:
        """Return whether the override sets `key`, a part of `key`, or a section around it."""
        inside = f"{GROUP}.{key}."
        names = self.leaves.keys() - {GROUP} if self.key == GROUP else {self.key}
        return any(inside.startswith(f"{n}.") or f"{n}.".startswith(inside) for n in names)


def read_overrides(texts: Iterable[str]) -> list[ReproOverride]:
    """Return the overrides of `repro` among `texts`; ignores words that are no overrides."""
    parser, overrides = OverridesParser.create(), []
    for text in texts:
        if not text.lstrip("+~").startswith(GROUP):
            continue
        with suppress(HydraException):  # a program that calls `compose` may take any words
            override = parser.parse_override(text)
            key = override.get_key_element().lstrip("+~").replace("/", ".")
            is_request = override.is_add() and override.key_or_group.partition("/")[0] == GROUP
            requests = names_in(override.get_value_string()) if is_request else frozenset()
            leaves = flatten({key: plain(override.value())})
            overrides.append(ReproOverride(text, key, requests, leaves))
    return overrides


def names_in(text: str) -> frozenset[str]:
    """Return the words of a value, a list or a sweep, each of which may name a profile."""
    return frozenset(filter(None, re.split(r"[\s,()\[\]'\"]+", text)))


def last_setter(overrides: Sequence[ReproOverride], key: str) -> str:
    """Return the origin of `key` if one of the `overrides` sets it, or an empty string."""
    return next((f"override {o.text}" for o in reversed(overrides) if o.sets(key)), "")


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
    for name in defaults if isinstance(defaults, list) else []:
        if not isinstance(name, str) or not is_name(name):  # a group, or `_self_`
            if str(name).startswith(PACKAGE):
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


def with_pieces(pieces: Sequence[str]) -> list[str]:
    """Return the override that adds `pieces` to a profile, if there are any."""
    return [f"{PIECES}=[{','.join(pieces)}]"] if pieces else []


@dataclass
class RequestedProfile:
    """The profile that one composition of Hydra requests, until the job has it.

    A config source makes this object and loads profiles through it. The callback gets the result.
    """

    folders: tuple[ProfileFolder, ...] = ()  # searched before the search path
    typed: Sequence[ReproOverride] = ()  # the overrides on the command line
    profiles: list[str] = field(default_factory=list)  # in the order in which they are merged
    pieces: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # lines about files changed since the original
    _configs: dict[str, DictConfig] = field(default_factory=dict)  # of `profiles` and `pieces`

    @property
    def typed_names(self) -> frozenset[str]:
        """The profiles and pieces that the command line requests, for all jobs of a sweep."""
        return frozenset().union(*(override.requests for override in self.typed))

    def load(self, name: str) -> DictConfig:
        """Return the config of the profile or piece `name`, or of the reason why it is refused."""
        names = self.pieces if is_piece(name) else self.profiles
        # Hydra loads even a default that `~repro/with` deletes, and deletes it afterwards.
        deletes_pieces = any(o.text.startswith(f"~{GROUP}/{PIECES}") for o in self.typed)
        if name not in names and not (is_piece(name) and deletes_pieces):
            names.insert(0, name)  # Hydra loads the last entry of a defaults list first
        self._configs[name] = OmegaConf.create({})
        # A piece overrides the profile at any position in a defaults list. Hydra loads all configs
        # of a composition before it merges them, so a loaded config can still change. It is not a
        # struct: every key can be overridden, and the schema explains a wrong key.
        for loaded, config in self._configs.items():
            config[GROUP] = OmegaConf.create(self._values(loaded), flags={"struct": False})
        return self._configs[name]

    def _values(self, name: str) -> dict[str, Any]:
        try:
            if is_piece(name):  # does not rename the profile that it is merged into
                values = self._compose(name).values
                return {key: value for key, value in values.items() if key not in NOT_INHERITED}
            original = original_meaning(name)
            if original is None:
                return self._compose(name, *self.pieces).values
        except ProfileError as error:
            if any(map(_SHOWING.fullmatch, sys.argv[1:])):  # Hydra will call no callback
                refuse(error)
            return {REFUSED: quote(str(error))}
        # Values from the config of the app cannot be compared, because it is not composed yet.
        of_app = any(origin.set_by == APP for origin in original.origins.values())
        of_files_alone = not of_app and not any("${" in text for text in original.asked)
        if original.asked[:1] == (name,) and of_files_alone:
            try:
                present = validate(compose(name, original.asked[1:], self.folders)).resolved.digest
            except ProfileError as error:
                present = error.problem.what
            if present != original.digest:
                self.changed.append(changed_files(name, present))
        return {**plain(original.values)}

    def _compose(self, *names: str) -> Composition:
        """Compose a profile or a piece with further pieces; raises `ProfileError`."""
        return compose(names[0], with_pieces(names[1:]), self.folders)

    def resolved(self, config: DictConfig) -> ResolvedProfile | None:
        """Return the profile that `config` requests, or None if it requests none.

        Raises `ProfileError` if the profile is refused, or if the request has no effect.
        """
        # Unresolved: messages show an override as written, not the output of a resolver.
        task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        section, overrides = plain_section(config), read_overrides(task)
        is_deleted = any(o.key == GROUP and o.text.startswith("~") for o in overrides)
        profiles = [] if is_deleted else self.profiles
        if len(profiles) > 1:
            raise ProfileError.about(
                "two profiles at once",
                found=f"{GROUP}: [{', '.join(profiles)}]",
                todo="write a profile that inherits both: defaults: [one, two, _self_]",
            )
        # Without a chosen profile, the section is ours only if the command line added it by `+`.
        added = [override for override in overrides if override.text.startswith("+")]
        typed = [override.text.partition("=")[2] for override in added if override.key == GROUP]
        is_added = isinstance(section, dict) and all(last_setter(added, key) for key in section)
        names = (*profiles, *self.pieces)
        if not (names or typed or (section and is_added)):
            if isinstance(section, str) and (close := close_name(section)):
                raise _plain_value(section, close)
            return None
        # `repro.with=` chooses pieces and overrides no value.
        words = [
            override.text.lstrip("+").replace(f"{GROUP}.", "", 1)
            for override in overrides  # of equal keys the last one counts
            if override.key.startswith(f"{GROUP}.") and override.key != f"{GROUP}.{PIECES}"
        ]
        asked = (*(profiles or [""]), *with_pieces(self.pieces), *words)
        if repeated := original_profile(asked[0], asked[1:]):
            return repeated
        value = config.get(GROUP)
        if value is None:
            if not profiles:
                return None
            raise ProfileError.about(
                f"the profile was placed in another package than `{GROUP}`, so it is not applied",
                found=", ".join(profiles),
                todo=f"choose it without a package: +{GROUP}={profiles[0]}",
            )
        if not isinstance(value, DictConfig):
            raise _plain_value(value, "")
        try:
            composition = from_mapping(value, where=APP)
            files = self._compose(*names) if names else Composition()
        except ProfileError as error:
            problems = []
            for problem in error.problems:
                setter = last_setter(overrides, problem.key.removeprefix(f"{GROUP}."))
                problems.append(problem._replace(where=setter or problem.where))
            raise ProfileError(problems) from None
        _set_origins(composition, files, overrides)
        if profiles:
            composition.asked = asked
        elif self.pieces:
            composition.name_it(", ".join(self.pieces), ValueOrigin(f"+{GROUP}/{PIECES}"))
        elif typed:  # `+repro={seed: 7}`
            composition.name_it(typed[0], ValueOrigin(APP))
        try:
            return validate(composition).resolved
        except ProfileError as error:
            if not profiles:
                raise
            problems = [self._with_remedy(problem, profiles[0]) for problem in error.problems]
            raise ProfileError(problems) from None

    def _with_remedy(self, problem: Problem, name: str) -> Problem:
        """Add advice for an app that uses the section `repro`, or the file, for itself."""
        todo, files = problem.todo, files_named(name, self.folders)
        if not todo and problem.where == APP:
            todo = f"if `{GROUP}` belongs to the app: torchrepro run {name} -- COMMAND"
        elif not todo and files and not inherits_a_profile(files[0], self.folders):
            todo = (
                f"if {name} belongs to the app, choose it in the app's defaults list, "
                f"`- {GROUP}: {name}`: +{GROUP}= always chooses a profile"
            )
        return problem._replace(todo=todo)


def _set_origins(
    composition: Composition, files: Composition, overrides: Sequence[ReproOverride]
) -> None:
    """Set the origins of the values that Hydra has merged: an override, a file, or the app."""
    for key in NOT_INHERITED:
        if key in files.values:  # pieces alone keep their names
            composition.values.setdefault(key, files.values[key])
    overridden = {key: value for o in overrides for key, value in o.leaves.items()}
    for key, value in flatten(composition.values).items():
        origin, setter = files.origins.get(key), last_setter(overrides, key)
        if origin is None or origin.value != value or setter:
            origin = ValueOrigin(setter or APP, "", value, origin)
        composition.origins[key] = origin
        if overridden.get(f"{GROUP}.{key}") == value:
            composition.typed.add(key)


def plain_section(config: DictConfig) -> Any:
    """Return the section `repro` as plain data, or None. Calls no resolver of OmegaConf."""
    whole: Any = OmegaConf.to_container(config, resolve=False)
    section = whole.get(GROUP)
    if section is None or section == MISSING:
        return None
    if not OmegaConf.is_interpolation(config, GROUP) or ":" in section:  # `:` calls a resolver
        return section
    value = OmegaConf.select(config, GROUP, throw_on_resolution_failure=False)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _plain_value(value: Any, close: str) -> ProfileError:
    name = close or "NAME"
    return ProfileError.about(
        f"`{GROUP}` is a plain value in this app's config, so no profile is applied",
        key=GROUP,
        found=shown(value),
        near=close if close != value else "",
        todo=f"choose the profile in the defaults list, `- {GROUP}: {name}`, "
        f"or on the command line, +{GROUP}={name}; if the value belongs to the app, "
        f"disable torchrepro with ~hydra.callbacks.{CALLBACK}",
    )


@dataclass
class HydraProcess:
    """What Hydra composes in this process, from the import of this module until the exit.

    A callback gets no source, so it finds the `RequestedProfile` of the current composition here.
    """

    request: RequestedProfile = field(default_factory=RequestedProfile)
    last_config: str = ""  # that Hydra requested, other than Hydra's own
    unapplied: dict[str, str] = field(default_factory=dict)  # name in Hydra -> name in the profile
    composer: str = ""  # of `unapplied`, as in `_TODO`
    is_sweeping: bool = False  # whether our callback was called at the start of this sweep
    sweep_words: list[str] | None = None  # in a launcher's process: the sweep's words on `repro`
    reporter: int = 0  # the id of the process that reports `unapplied` at its end

    def typed(self) -> list[ReproOverride]:
        """Return the overrides of `repro` on the command line of the program, or of the sweep."""
        return read_overrides(sys.argv[1:] if self.sweep_words is None else self.sweep_words)

    def begin(self, *, is_sweeping: bool) -> None:
        """Note that our callback is called, so it applies the profiles composed so far."""
        self.unapplied.clear()
        self.is_sweeping = is_sweeping

    def note_composed(self, name: str, profile_name: str) -> None:
        """Note that Hydra has composed the profile `name`, for a job or for a caller of `compose`.

        Ends the process if the job belongs to a sweep in which our callback is not called.
        """
        # A source gets only the name of a config. The public functions on the stack show its use:
        # hydra.compose, or ConfigLoader.load_sweep_config, by which launchers compose each job.
        composers = (
            "compose" if frame.f_globals.get("__name__") == "hydra.compose" else "sweep"
            for frame in frames()
            if frame.f_globals.get("__name__") == "hydra.compose"
            or frame.f_code.co_name == "load_sweep_config"
        )
        composer = next(composers, "main")
        if composer == "sweep":
            if not self.is_sweeping and inherited() is None:
                refuse(_unprotected([name], "main"))
            return  # its job may run in another process, where the callback applies the profile
        if composer == "main":  # a new program starts; `compose` may run inside a sweep
            self.is_sweeping = False
        self.composer = composer
        self.unapplied[name] = profile_name
        if self.reporter != os.getpid():
            self.reporter = os.getpid()
            atexit.register(self._report_unapplied, os.getpid(), ExitStatus())

    def _report_unapplied(self, reporter: int, status: ExitStatus) -> None:
        if os.getpid() != reporter or inherited() is not None:
            return
        applied = applied_profiles.names
        names = [name for name, profile in self.unapplied.items() if profile not in applied]
        if self.composer == "main":
            # Hydra sets its HydraConfig for a job and unsets it afterwards. After a command that
            # only shows a config it is still set; after an error before the job it does not exist.
            exists = HydraConfig in Singleton.get_state()["instances"]
            if applied or not exists or HydraConfig.initialized():
                return
        if names:
            say(_unprotected(names, self.composer))
            if self.request.typed_names and not applied:
                status.value = REFUSED_STATUS


process = HydraProcess()


class ReproConfigSource(ConfigSource):
    """Hydra config source that reads the profiles of the group `repro` as data."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._roots = [*self._existing_roots()]
        folders = [ProfileFolder(root / GROUP, entry) for root, entry in self._roots]
        self._folders = tuple(folder for folder in folders if folder.path.is_dir())
        self._request = RequestedProfile(self._folders, process.typed())

    def __reduce__(self) -> tuple[Any, ...]:
        """Hydra copies its sources for every composition, so a copy has its own request."""
        return type(self), (self.provider, self.full_path())

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source's paths."""
        return SCHEME

    def available(self) -> bool:
        """Return True: the shipped profiles are always available."""
        return True

    def is_group(self, config_path: str) -> bool:
        top, _, inner = config_path.strip("/").partition("/")
        if top == GROUP and not inner:
            if not self._request.typed_names and self._app_has_a_plain_value():
                return False  # `repro=false` overrides the app's own value
            self._refuse_null()
        if top != GROUP or not inner:
            return top in ("", GROUP)
        try:
            folders = (*self._folders, *folders_for(f"{inner}/"))
        except ProfileError:
            return True  # a damaged pack: `load_config` reports it
        return any(folder.has_group(inner) for folder in folders)

    def _app_has_a_plain_value(self) -> bool:
        # Hydra calls `is_group` for an override right after it has requested its config.
        name = f"{process.last_config.removesuffix('.yaml')}.yaml"
        configs: Any = [values_in(root / name) for root, _ in self._roots]
        store = ConfigStore.instance()
        if store.get_type(name) is ObjectType.CONFIG:
            configs.append(store.load(name).node)
        sections = [config.get(GROUP) for config in configs if hasattr(config, "get")]
        return any(section is not None and not isinstance(section, Mapping) for section in sections)

    def _refuse_null(self) -> None:
        """End the process if the command line sets the group to null, which Hydra forbids."""
        for override in self._request.typed:
            values = override.text.partition("=")[2].split(",")
            is_set = override.key.partition("@")[0] == GROUP and not override.text.startswith("~")
            if is_set and not {"", "null"}.isdisjoint(values):
                refuse(
                    f"{override.text}: null is not a profile, and Hydra allows no null for a group"
                    f"\n    to do: remove this word, or delete the app's own profile with ~{GROUP}"
                )

    def is_config(self, config_path: str) -> bool:
        """Return whether `load_config` loads or refuses `config_path`; Hydra handles any other."""
        process.request = self._request  # Hydra calls its first source for every config
        if not config_path.startswith("hydra/"):
            process.last_config = config_path
        name = _profile_name(config_path)
        if name is None:
            return False
        word = piece_short_name(name) if is_piece(name) else name
        is_requested = word in self._request.typed_names
        try:
            is_ours = is_name(name) and any(folder.file(name) for folder in folders_for(name))
            # Pieces, and files outside of the app such as the files of a pack, are read as data.
            if not is_ours and not is_piece(name) and ".." not in name:
                if files := files_named(name, self._folders):
                    return is_requested or inherits_a_profile(files[0], self._folders)
                path = f"{GROUP}/{name.removesuffix('.yaml')}.yaml"
                if ConfigStore.instance().get_type(path) is ObjectType.CONFIG:
                    return False
            if original_meaning(name) is None:
                find(name, self._folders)
        except UnknownProfileError:
            # Hydra may find a file of this name, and would run its code. We refuse a name that is
            # close to a profile's, since Hydra silently skips an optional config. We also refuse a
            # name on the command line, since Hydra's message does not list the profiles of packs.
            return is_requested or not is_name(name) or bool(close_name(name, self._folders))
        except ProfileError:
            return True  # such as a damaged pack: `load_config` reports it
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the composed profile, or the reason why it is refused.

        After an exception Hydra would print its own traceback and choose the exit status. So the
        reason is passed in the config to the callback, which stops the run.
        """
        name = _profile_name(config_path)
        if name is None:
            raise ConfigLoadError(f"Config not found: {config_path}")
        config = self._request.load(name)
        if not is_piece(name):
            process.note_composed(name, str(config[GROUP].get("name", name)))
        return ConfigResult(self.provider, f"{SCHEME}://", config, {"package": "_global_"})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the profiles in the group, for Hydra's help and completion."""
        group = config_path.strip("/")
        if group == "":
            return [GROUP] if results_filter is not ObjectType.CONFIG else []
        if group.partition("/")[0] != GROUP or results_filter is ObjectType.GROUP:
            return []
        names = {name for folder in (*self._folders, *search_path()) for name in folder.names()}
        if group == GROUP:
            return sorted(name for name in names if not is_piece(name))
        if group == f"{GROUP}/{PIECES}":
            return sorted(piece_short_name(name) for name in names if is_piece(name))
        inner = f"{group.removeprefix(f'{GROUP}/')}/"
        return sorted(name.removeprefix(inner) for name in names if name.startswith(inner))

    def _existing_roots(self) -> Iterator[tuple[Path, str]]:
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


_TODO = {
    "compose": f"call torchrepro.apply(config.{GROUP}) before the program's first random number",
    "main": "keep torchrepro's callback (this app, or the command line with "
    f"~hydra.callbacks.{CALLBACK}, removes it)",
}


def _unprotected(names: list[str], composer: str) -> str:
    return (
        f"{GROUP}={', '.join(names)} was composed by Hydra but never applied: the program runs "
        f"without it\n    to do: {_TODO[composer]}, or start with "
        f"`torchrepro run {names[0]} -- COMMAND`"
    )


def refuse(reason: object) -> NoReturn:
    """Report `reason` and end the process: Hydra would handle an exception in its own way."""
    say(reason)
    raise SystemExit(REFUSED_STATUS)
