"""`+repro=NAME` on any Hydra app, with no change to its code.

What becomes of a job:

1. Hydra starts and loads its plugins. `ReproSearchPath`, here, puts a config source of our own
   before all others and adds one callback to Hydra's own config.
2. Hydra composes the job's config. `ReproConfigSource`, here, answers for the group `repro` alone
   and leaves the app's own files there to Hydra. It reads every profile as data, because a file
   that Hydra composes by itself can place callbacks and run code. It notes what was chosen
   (`hydra_profile.chosen`).
3. Hydra calls the callback (`hydra_callback`). It gets the profile that the composed config
   requests (`hydra_profile.resolved_profile`), applies it and writes the manifest. After the job it
   restores the state. Without a profile it does nothing.
4. The process ends. The callback's module reports a profile that was composed and never applied.

See https://hydra.cc/docs/advanced/plugins/develop and
https://hydra.cc/docs/experimental/callbacks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from torchrepro.errors import ProfileError
from torchrepro.integrations.hydra_callback import (
    ReproCallback,
    note_composed,
    refuse_if_shown,
    refuse_null,
    requested_names,
    requesting_words,
)
from torchrepro.integrations.hydra_profile import (
    APPS_OWN,
    CALLBACK,
    GROUP,
    as_override,
    chosen,
    close_name,
    files_named,
    inherits_a_profile,
    values_in,
    values_repeated,
)
from torchrepro.process_state import original_meaning
from torchrepro.profile.load import REFUSED, compose
from torchrepro.profile.resolved import NOT_INHERITED
from torchrepro.profile.search_path import (
    PIECES,
    Folder,
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

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath

SCHEME = "torchrepro"
_SEPARATOR = "|"

_profiles: dict[str, DictConfig] = {}  # those of the present composition
_sources: list[ReproConfigSource] = []  # the source of the present composition
_last_config: list[str] = []  # the one outside of Hydra's own that was asked for last


class ReproSearchPath(SearchPathPlugin):
    """Puts our config source before every other place that Hydra looks in."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the source and the callback; called by Hydra at every start."""
        elements: list[Any] = search_path.get_path()  # type: ignore[assignment]
        elements.insert(0, _ProfilesElement(search_path))
        _add_callback()


def _add_callback() -> None:
    """Make the callback the first entry in the defaults list of Hydra's own config.

    As the first entry it starts before every other callback and ends after it. The entry is a
    structured config, which Hydra turns into the callback itself: a `_target_` would have to be
    on the execution whitelist of every app.
    """
    store = ConfigStore.instance()
    own = store.load("hydra/config.yaml")
    defaults = own.node.get("defaults") or []
    if CALLBACK in defaults:
        return
    with open_dict(own.node):
        own.node.defaults = [CALLBACK, *defaults]
    # Hydra 1.4 warns of an entry that is replaced by accident; 1.3 has no such argument.
    replace = {"replace": True} if "replace" in signature(store.store).parameters else {}
    store.store("config", own.node, "hydra", own.package, own.provider, **replace)
    place = f"hydra.callbacks.{CALLBACK}"
    store.store(CALLBACK, ReproCallback, "hydra", place, SCHEME, **replace)


@dataclass
class _ProfilesElement:
    """An element of Hydra's search path whose `path` names all the other elements.

    Hydra makes a source from an element's `provider` and `path` each time the search path has
    changed. `path` is worked out at that moment, so that it includes `hydra.searchpath` and
    `--config-dir`, which come later than this plugin.
    """

    owner: ConfigSearchPath
    provider: str = SCHEME

    @property
    def path(self) -> str:
        others = [
            (APPS_OWN if each.provider == "main" else "") + each.path
            for each in self.owner.get_path()
            if not isinstance(each, _ProfilesElement) and each.path
        ]
        return f"{SCHEME}://{_SEPARATOR.join(others)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> _ProfilesElement:
        return _ProfilesElement(copy.deepcopy(self.owner, memo))


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
            _profiles.clear()
            _sources[:] = [self]
        if not config_path.startswith("hydra/"):
            _last_config[:] = [config_path]
        name = _profile_name(config_path)
        if name is None or self._is_the_apps_own(name):
            return False
        if original_meaning(name) is not None:
            return True
        try:
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
        chosen.add(name, self._folders())
        config = OmegaConf.create({GROUP: self._values(name)})
        # An open section: every key can be overridden, set or not. The schema refuses a wrong
        # one, with a message that says what was meant.
        OmegaConf.set_struct(config[GROUP], value=False)
        if is_piece(name):
            # It lies on top of the profile, wherever it stands in a defaults list: Hydra loads
            # every config of a composition, the last one first, before it merges them.
            for profile, composed in _profiles.items():
                for key, value in self._values(profile).items():
                    composed[GROUP][key] = value
        else:
            _profiles[name] = config
            note_composed(name, str(config[GROUP].get("name", name)))
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

    def _folders(self) -> tuple[Folder, ...]:
        folders = [Folder(root / GROUP, entry) for root, entry in self._roots()]
        return tuple(folder for folder in folders if folder.path.is_dir())

    def _roots(self) -> Iterator[tuple[Path, str]]:
        for entry in self.path.split(_SEPARATOR):
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
