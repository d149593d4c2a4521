"""The schema of a profile: frozen pydantic models, with sections from the rows of the catalogue.

Validation also checks installed versions, and the consent to environment variables. A profile may
set the variables of the catalogue and of the allow list, because these cannot choose code or
hosts. Since a profile may come from a stranger, any other variable needs the consent of the user
who starts the run. The user consents by naming the variable or by setting it in an override.
Dangerous variables are always refused.

Editors use the JSON Schema of a profile's file for completion and hints. To support as many
editors as possible, it is draft 7 without references, since draft 7 ignores a description next to
a `$ref`. `markdownDescription` is the formatted hint in editors with VS Code's YAML language
server: https://github.com/redhat-developer/vscode-yaml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PrivateAttr,
    StrictStr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from torchrepro.ground.errors import Problem, ProfileError, near, shown, some
from torchrepro.ground.imports import installed_version
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name, other_names, rows_for_key
from torchrepro.knobs.knob import (
    SCHEMA_VERSION,
    SEED,
    Legal,
    OneOf,
    Text,
    acts_only_on_refusal,
)
from torchrepro.knobs.variables import KINDS, allowed, refusal
from torchrepro.profile.document import LONGEST_NUMBER
from torchrepro.profile.needs import NEEDS, folded
from torchrepro.profile.resolved import EXTRA, STRICT, ResolvedProfile, ValueOrigin, flatten, plain
from torchrepro.profile.search_path import PIECES, SHIPPED, ProfileFolder

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from torchrepro.profile.resolved import Composition

SECTIONS = ("torch", "cuda", "cudnn", "cpu", "npu", "distributed")
VARIABLE = "TORCHREPRO_ALLOW_ENV"
"""Environment variable with the user's consent: the names of variables, separated by commas.

A profile cannot set this variable, nor any other variable of torchrepro.
"""

OPTION = "--allow-env"

_REQUIREMENTS = 'a mapping such as {torch: ">=2.6"}'
_NO_SECTION = ("model_type", "model_attributes_type", "dict_type", "mapping_type")
_REWORDED = dict.fromkeys(_NO_SECTION, "not a section of keys")
_REWORDED["string_type"] = "not text"
"""Type of a pydantic error -> the message for the author of a profile."""

_HOW_TO_LAY_PIECES = (
    "choose them with +repro/with=[dropout-zero] under Hydra, with=[dropout-zero] among overrides, "
    "or name them in `defaults`: [debug-strict, with/dropout-zero, _self_]"
)
_RANGE = re.compile(r"[\w.,<>=!~*+\- ]{0,200}", re.ASCII)  # of versions

CONFIG = ConfigDict(extra="forbid", frozen=True)

# When the first model is created, pydantic reads the entry points of every installed distribution,
# and raises ValueError if they are not UTF-8 or have a line without `=`. Later models do not read
# them again. `torchrepro list` names the broken distribution.
with suppress(ValueError):
    create_model("First")


def legal_values(legal_or_knob: str | Legal) -> GetPydanticSchema:
    """Return a pydantic annotation that accepts null and legal values.

    `legal_or_knob` is a description of the legal values, or the name of a knob.
    """
    legal = legal_or_knob
    if isinstance(legal, str):
        legal = knobs_by_name()[legal].legal

    def check(value: Any) -> Any:
        inside, complaint = ((), "") if value is None else legal.first_illegal_part(value)
        if complaint:
            raise _illegal(complaint, inside=inside, legal=legal)
        return value

    return GetPydanticSchema(
        lambda source, handler: core_schema.no_info_after_validator_function(
            check, handler(source)
        ),
        lambda _schema, _handler: {"anyOf": [legal.json_schema(), NULL]},
    )


def _illegal(complaint: str, **details: Any) -> PydanticCustomError:
    """Return an error with `details`: keys `inside` the value, `legal` values, what `todo`."""
    return PydanticCustomError("illegal", "{complaint}", {"complaint": complaint, **details})


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        todo = f'write "{str(value).lower()}" in quotes, or the digit that the variable expects'
        raise _illegal("a variable is text, and YAML reads this word as a boolean", todo=todo)
    if isinstance(value, int) and abs(value) < 10**LONGEST_NUMBER:
        return str(value)
    return value


def _extra_variables(values: Mapping[str, str]) -> Mapping[str, str]:
    known = {knob.variable for knob in CATALOGUE if knob.variable}
    for name in values:
        why = refusal(name)
        if name in known:
            why = "the catalogue knows this variable: set it in `env`"
        if why:
            raise _illegal(why, inside=(name,))
    return MappingProxyType(dict(values))


def _frozen(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return MappingProxyType({k: _frozen(inner) for k, inner in value.items() if inner is not None})


PROFILE_NAME = Text(
    r"[^\x00-\x20\x7f-\xa0()\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
    r"[^\x00-\x1f\x7f-\xa0()\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]{0,254}",
    "one line of printable characters without parentheses",
    "reports write a profile's name into lines and parentheses",
    variable=False,
)

AS_TEXT = BeforeValidator(_as_text)
NULL_IS_EMPTY = BeforeValidator(lambda value: {} if value is None else value)
FROZEN = (AfterValidator(_frozen), PlainSerializer(plain))


class Section(BaseModel):
    """A section of a profile, with values as attributes and items. Null means an empty section."""

    model_config = CONFIG

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields and self[str(key)] is not None

    if TYPE_CHECKING:  # every knob of the section is an attribute

        def __getattr__(self, knob: str) -> Any: ...


def _section(name: str, prefix: str, doc: str, **extra_fields: Any) -> Any:
    rows = {knob.name: knob for knob in CATALOGUE}
    rows |= {alias: knobs[0] for alias, knobs in other_names().items()}
    fields: dict[str, Any] = {
        key.removeprefix(prefix): (
            Annotated[
                Any, *([AS_TEXT] if knob.variable else []), legal_values(knob.legal), *FROZEN
            ],
            Field(None, description=f"{knob.summary} Cost: {knob.cost}."),
        )
        for key, knob in rows.items()
        if key.startswith(prefix)
    }
    return create_model(name, __base__=Section, __doc__=doc, **fields | extra_fields)


if TYPE_CHECKING:
    # The models are created from the catalogue, so a type checker cannot know their fields.
    Backends: TypeAlias = Section
    Environment: TypeAlias = Section
    Device: TypeAlias = Section
    Dataloader: TypeAlias = Section
else:
    _BACKENDS = {
        name: _section(f"{name.title()}Backend", f"backends.{name}.", f"Knobs of {name}.")
        for name in SECTIONS
    }
    Backends = create_model(
        "Backends",
        __base__=Section,
        __doc__="Flags of torch and its back ends.",
        **{
            name: (
                Annotated[model, NULL_IS_EMPTY],
                Field(default_factory=model, description=model.__doc__),
            )
            for name, model in _BACKENDS.items()
        },
    )
    Environment = _section("Environment", "env.", "Environment variables of the catalogue.")
    Device = _section(
        "Device",
        "device.",
        "The devices that compute.",
        modules=(  # never null
            Annotated[Any, NULL_IS_EMPTY, legal_values("device.modules"), *FROZEN],
            Field(
                default_factory=lambda: MappingProxyType({}),
                description="Pattern of module names -> the device that runs these modules.",
            ),
        ),
    )
    Dataloader = _section("Dataloader", "dataloader.", "Loading of data.")

TextByName: TypeAlias = Annotated[
    Mapping[str, StrictStr | None], NULL_IS_EMPTY, AfterValidator(_frozen), PlainSerializer(dict)
]
ExtraVariables: TypeAlias = Annotated[
    Mapping[str, Annotated[Any, AS_TEXT, legal_values(KINDS["any"])]],
    NULL_IS_EMPTY,
    AfterValidator(_extra_variables),
    PlainSerializer(dict),
]


def contradictions(resolved: ResolvedProfile) -> list[tuple[str, str, str]]:
    """Return (key, value, reason) for values that contradict the guarantee or each other."""
    leaves = flatten(resolved.values)
    found = []
    for row in NEEDS:
        if resolved.guarantee not in row.guarantees:
            continue
        for key, value in leaves.items():
            names = {key, *(knob.name for knob in other_names().get(key, ()))}
            if row.knob in names and folded(value) in row.broken_by:
                why = f"contradicts guarantee: {resolved.guarantee}; {row.because}"
                found.append((key, shown(value), why))
    for key in leaves:
        knob = knobs_by_name().get(key)
        for alias in knob.aliases if knob else ():
            twice_listed = alias in knobs_by_name() and key < alias
            if alias in leaves and (twice_listed or alias not in knobs_by_name()):
                found.append((alias, shown(leaves[alias]), f"is another name of `{key}`; set one"))
    algorithms = leaves.get("backends.torch.deterministic_algorithms")
    level = leaves.get("backends.npu.deterministic_level")
    is_set = level is not None and algorithms is not None
    if is_set and bool(level) != (algorithms != "none"):
        why = (
            f"and deterministic_algorithms: {algorithms} undo each other: the level also sets "
            "torch's own flag"
        )
        found.append(("backends.npu.deterministic_level", shown(level), why))
    fallback = leaves.get("device.fallback")
    never_refuses = algorithms in ("none", "warn")
    if never_refuses and fallback is not None and acts_only_on_refusal(fallback):
        why = f"with deterministic_algorithms: {algorithms} no op raises, so none falls back"
        found.append(("device.fallback", shown(fallback), why))
    return found


class Profile(BaseModel):
    """The settings that a run requests. A setting that is null stays unchanged."""

    model_config = ConfigDict(**CONFIG, title="torchrepro profile")

    schema_version: Annotated[Any, legal_values(SCHEMA_VERSION)] = Field(
        None, alias="schema", description="Version of the schema that the file was written for."
    )
    name: Annotated[StrictStr | None, legal_values(PROFILE_NAME)] = Field(
        None, description="The profile's name in reports; by default the file's name."
    )
    description: StrictStr | None = Field(None, description="One sentence for `torchrepro list`.")
    guarantee: Annotated[Any, legal_values(OneOf(("seeded", *STRICT)))] = Field(
        None,
        description="The promise: same random numbers; bitwise repeatable on one machine; equal "
        "across devices within tolerance. The last two are strict: the run stops if a knob cannot "
        "be set.",
    )
    seed: Annotated[Any, legal_values(SEED)] = Field(
        None, description="Seed of every generator: Python, numpy, torch, all devices."
    )
    streams: Annotated[Any, NULL_IS_EMPTY, legal_values("streams"), *FROZEN] = Field(
        default_factory=lambda: MappingProxyType({}),
        description="Stream -> its own seed, to vary one source of random numbers alone.",
    )
    ranks: Annotated[Any, legal_values("ranks"), *FROZEN] = Field(
        None,
        description="Selects whether the ranks of a distributed run draw the same or different "
        "random numbers: one word, or one per dimension of a device mesh.",
    )
    backends: Annotated[Backends, NULL_IS_EMPTY] = Field(
        default_factory=Backends, description="Flags of torch and its back ends."
    )
    env: Annotated[Environment, NULL_IS_EMPTY] = Field(
        default_factory=Environment,
        description="Environment variables that the catalogue knows.",
    )
    env_extra: ExtraVariables = Field(
        default_factory=lambda: MappingProxyType({}),
        description="Other environment variables. Without consent only variables of an allow list; "
        "all others need the consent of the user who starts the run (--allow-env NAME, or "
        "TORCHREPRO_ALLOW_ENV). Dangerous variables are always refused.",
    )
    dropout: Annotated[Any, legal_values("dropout")] = Field(
        None, description="zero: dropout passes everything through."
    )
    device: Annotated[Device, NULL_IS_EMPTY] = Field(
        default_factory=Device, description="The devices that compute."
    )
    dataloader: Annotated[Dataloader, NULL_IS_EMPTY] = Field(
        default_factory=Dataloader, description="Loading of data."
    )
    on_late: Annotated[
        Any, legal_values(OneOf(("relaunch", "relaunch_or_warn", "error", "warn")))
    ] = Field(
        None,
        description="The reaction to a knob past its phase. relaunch_or_warn: a Hydra run starts "
        "its command line again if that is safe; any other run continues, and its report lowers "
        "the guarantee.",
    )
    guard: Annotated[Any, legal_values("guard")] = Field(
        None, description="Selects whether knobs are read again during the run."
    )
    requires: TextByName = Field(
        default_factory=lambda: MappingProxyType({}),
        description='Package -> versions that the profile needs, as in ``torch: ">=2.6"``.',
    )

    _origins: Mapping[str, ValueOrigin] = PrivateAttr(default_factory=dict)
    _asked: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Profile:
        if found := contradictions(self.resolved):
            raise PydanticCustomError("contradiction", "contradiction", {"found": found})
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        values = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        return _unpickled, (type(self), values, self._origins, self._asked)

    def __deepcopy__(self, memo: Any = None) -> Profile:
        return self  # the profile and its values are frozen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and self.resolved == other.resolved

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def resolved(self) -> ResolvedProfile:
        """The plain values that the profile sets."""
        values = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        return ResolvedProfile.of(values, self._origins, self._asked)

    def remember(self, origins: Mapping[str, ValueOrigin], asked: tuple[str, ...]) -> None:
        """Store the origin of each value, and the user's request. Comparisons ignore both."""
        self._origins, self._asked = origins, asked

    @property
    def digest(self) -> str:
        """SHA-256 of the values that the profile requests, without name and description."""
        return self.resolved.digest


def _unpickled(model: type[Profile], values: Any, origins: Any, asked: Any) -> Profile:
    profile = model.model_validate(values)
    profile.remember(origins, asked)
    return profile


def validated(composition: Composition) -> Profile:
    """Validate composed values, or raise `ProfileError` with the origin of each wrong value."""
    try:
        profile = Profile.model_validate(composition.values)
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        for details in error.errors():
            for problem in _problems(details, composition):
                problems.setdefault(problem.key, problem)
        raise ProfileError(list(problems.values())) from None
    profile.remember(composition.origins, composition.asked)
    if unmet := _without_consent(composition) or _unmet(profile.requires, composition):
        raise ProfileError(unmet)
    return profile


def _problems(details: ErrorDetails, composition: Composition) -> list[Problem]:
    context: Mapping[str, Any] = details.get("ctx", {})
    if details["type"] == "contradiction":
        return [
            Problem(reason, composition.origin_of(key), key, value)
            for key, value, reason in context["found"]
        ]
    inside = context.get("inside", ())
    path = [*map(str, details["loc"]), *inside]
    key = ".".join(part for part in path if part != "[key]")  # pydantic's mark for a key itself
    value = details["input"]
    for part in inside:
        value = value[part]
    text = shown(value)
    if isinstance(value, dict | list):
        text = "a section" if isinstance(value, dict) else "a list"
    origin = composition.origin_of(key)
    if details["type"] == "extra_forbidden":
        return [_unknown_key(path, text, origin)]
    message = _REWORDED.get(details["type"], details["msg"])
    words, close = _REQUIREMENTS if key.startswith("requires") else "", ""
    if legal := context.get("legal"):
        if inside and origin.startswith("override ") and key not in origin:
            message = f"{key}: {message}"  # the override sets several keys
        words, close = legal.words, near(text, legal.choices())
    return [Problem(message, origin, key, text, words, close, context.get("todo", ""))]


def _unknown_key(path: list[str], text: str, origin: str) -> Problem:
    *sections, word = path
    key = ".".join(path)
    model: Any = Profile
    for section in sections:
        model = model.model_fields[section].annotation
    legal = sorted(field.alias or name for name, field in model.model_fields.items())
    if sections == ["env"]:
        if why := refusal(word):
            return Problem(why, origin, key, text)
        todo, meant = f"to set it anyway, move it to `env_extra: {{{word}: ...}}`", ""
        if word not in allowed():
            todo += ", which needs the consent of the user who starts the run"
            meant = near(word, legal)
        message = "the catalogue does not know this variable"
        return Problem(message, origin, key, text, near=meant, todo=todo)
    if key == PIECES:
        message = "unknown key: pieces are not values of a profile"
        meant = near(word, legal)
        return Problem(message, origin, key, text, some(legal), meant, _HOW_TO_LAY_PIECES)
    known = other_names().get(key) or other_names().get(f"torch.{key}") or other_names().get(word)
    # The user may have omitted the sections of a key.
    keys = [knob.profile_key for knob in reversed(CATALOGUE)]
    by_last_part = {key.rpartition(".")[2]: key for key in keys}
    meant = known[0].profile_key if known else by_last_part.get(word) or near(word, legal)
    message = "unknown key"
    if known:
        message = "unknown key: another name for the key below"
    todo = "write it nested, a section per line" if "." in word else ""
    return Problem(message, origin, key, text, some(legal), meant, todo)


def allowed_by(names: Sequence[str]) -> str:
    """Return the new value of the variable TORCHREPRO_ALLOW_ENV, with `names` added to it.

    Raises `ProfileError` for a dangerous variable, or for a text that cannot name a variable.
    """
    return ",".join(dict.fromkeys([*_consented(), *_consented(OPTION, ",".join(names))]))


def _consented(source: str = VARIABLE, text: str | None = None) -> list[str]:
    text = os.environ.get(VARIABLE, "") if text is None else text
    names = [name.strip() for name in text.split(",") if name.strip()]
    problems = [Problem(why, source, found=name) for name in names if (why := refusal(name))]
    if problems:
        raise ProfileError(problems)
    return names


def _without_consent(composition: Composition) -> list[Problem]:
    problems = []
    for name, value in (composition.values.get(EXTRA) or {}).items():
        key, row = f"{EXTRA}.{name}", allowed().get(name)
        is_harmless = row is not None and not row.legal.complaint(str(value))
        if value is None or key in composition.typed or is_harmless or name in _consented():
            continue
        if row is not None:
            message = "not a value to which a profile may set this variable without consent"
            legal, close = row.legal.words, near(str(value), row.legal.choices())
        else:
            message = "not on the list of variables that a profile may set without consent"
            variables = (knob for knob in (*CATALOGUE, *allowed().values()) if knob.variable)
            known = {knob.variable: knob.name for knob in variables}
            legal, close = "", known.get(near(name, known), "")
        todo = (
            f"if you want it, consent: {OPTION} {name}, or {VARIABLE}={name} in the environment "
            f"(under Hydra, pytest and in code); or set it yourself by the override {key}=..."
        )
        origin = composition.origin_of(key)
        problems.append(Problem(message, origin, key, shown(str(value)), legal, close, todo))
    return problems


def _unmet(requires: Mapping[str, Any], composition: Composition) -> list[Problem]:
    if not requires:
        return []
    from packaging.specifiers import SpecifierSet

    problems = []
    for package, wanted in requires.items():
        key = f"requires.{package}"
        origin, installed = composition.origin_of(key), installed_version(package)
        specifier, fits = None, False
        # The operator === accepts any text, and Python refuses a number of thousands of digits.
        with suppress(ValueError):
            specifier = SpecifierSet(wanted) if _RANGE.fullmatch(wanted) else None
        if specifier is None:
            message = "not a version range"
            problems.append(Problem(message, origin, key, shown(wanted), '">=2.6"'))
            continue
        if installed is None:
            problems.append(Problem("the package is not installed", origin, key, wanted))
            continue
        with suppress(ValueError):  # metadata may have any text as the version
            fits = specifier.contains(installed, prereleases=True)
        if not fits:
            message = f"{package} {shown(installed)} is installed"
            todo = f"install {package}{wanted}, or use a profile made for {installed}"
            problems.append(Problem(message, origin, key, wanted, todo=todo))
    return problems


NULL = {"type": "null"}
_TRIED = range(1000)  # integers that are tried as a variable's value
_FEW = 16  # the most legal integers that are listed; more become a range


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema for the file of a profile or piece, including the defaults list."""
    model = Profile.model_json_schema(by_alias=True)
    text = (
        "Profiles to inherit from, in order, and pieces to add; `_self_` is this file. "
        f"A piece is in the folder `{PIECES}` of its pack, as in `team/{PIECES}/zero`."
    )
    names = ["_self_", *ProfileFolder(SHIPPED, "").names()]
    section = _schema_of_section(model, model.pop("$defs", {}), "")
    section["properties"] = {
        "defaults": {
            "type": "array",
            "items": {"type": "string", "examples": names},
            "description": text.replace("`", ""),
            "markdownDescription": text,
        },
        **section["properties"],
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "torchrepro profile",
        "description": "The settings of a run; an omitted key, or null, changes nothing.",
        **section,
    }


def _schema_of_section(model: Any, definitions: dict[str, Any], prefix: str) -> dict[str, Any]:
    properties = {
        key: _schema_of_key(value, definitions, f"{prefix}{key}")
        for key, value in model["properties"].items()
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema_of_key(entry: Any, definitions: dict[str, Any], key: str) -> dict[str, Any]:
    described = {"description": " ".join(entry.get("description", "").split())}
    if "$ref" in entry:
        model = definitions[entry["$ref"].rpartition("/")[2]]
        described["description"] = described["description"] or model["description"]
        section = _schema_of_section(model, definitions, f"{key}.")
        return described | section | {"type": ["object", "null"]}
    kept = {k: v for k, v in entry.items() if k not in ("title", "default", "description")}
    if key == EXTRA:
        without_consent = {
            name: {
                "description": f"{row.summary}. Values: {row.legal.words}; null leaves it alone.",
                "type": ["string", "integer", "null"],
                "pattern": _pattern(row.legal, []),
            }
            for name, row in allowed().items()
        }
        return described | {"properties": without_consent, **_or_null(kept)}
    knobs = rows_for_key(key)
    if not knobs:
        return described | _or_null(kept)
    legal = knobs[0].legal
    if knobs[0].variable:
        kept = {"anyOf": _texts(legal)}
    summary = described["description"].partition(" Cost: ")[0]
    cost = "; ".join(dict.fromkeys(knob.cost for knob in knobs))
    words = (word.strip(",;()") for knob in knobs for word in knob.source.split())
    sources = dict.fromkeys(word for word in words if word.startswith("http"))
    linked = ", ".join(f"[{number}]({source})" for number, source in enumerate(sources, 1))
    lines = [summary, f"Cost: {cost}.", f"Values: {legal.words}; null leaves it alone."]
    lines += [f"Sources: {linked}"] * bool(linked)
    hint = {"description": f"{summary} Cost: {cost}.", "markdownDescription": "\n\n".join(lines)}
    return hint | _or_null(kept)


def _or_null(entry: dict[str, Any]) -> dict[str, Any]:
    """Return `entry` as a schema that also accepts null, if possible without `anyOf`.

    For `anyOf`, an editor shows the hint of only one alternative.
    """
    first, *rest = entry.get("anyOf", [entry, NULL])
    if rest != [NULL] or not isinstance(first.get("type"), str):
        return entry
    words = {"enum": [*first["enum"], None]} if "enum" in first else {}
    return {**first, **words, "type": [first["type"], "null"]}


def _texts(legal: Legal) -> list[dict[str, Any]]:
    words = [word.strip('"') for word in legal.choices()]
    numbers = [number for number in _TRIED if not legal.complaint(str(number))]
    digits: dict[str, Any] = {"enum": numbers}
    if len(numbers) > _FEW:
        highest = {"maximum": legal.high} if hasattr(legal, "high") else {}
        digits = {"type": "integer", "minimum": numbers[0], **highest}
    branches: list[dict[str, Any]] = [
        {"enum": [word for word in words if not legal.complaint(word)]},
        {"type": "string", "pattern": _pattern(legal, numbers)},
        digits,
        NULL,
    ]
    return [branch for branch in branches if branch.get("enum") != []]


def _pattern(legal: Legal, numbers: list[int]) -> str:
    pattern = getattr(legal, "pattern", None)
    if pattern is None:
        words = [word for word in legal.choices() if not legal.complaint(word)]
        return f"^({'|'.join([*words, '[0-9]+'] if numbers else words)})$"
    if getattr(legal, "ignore_case", False):
        pattern = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in pattern)
    return f"^({pattern})$"
