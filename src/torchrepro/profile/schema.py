"""The schema of a profile: frozen pydantic models whose sections the catalogue's rows make.

Validation also asks for consent, and for what is installed. What a profile may set in the
environment: the variables of the catalogue and of the allow list cannot choose code or hosts. A
profile is data from others, so any other variable is set only with the consent of the user who
starts the run, given by its name or by an override that sets it. The schema refuses dangerous
variables in any case.

The JSON Schema of a profile's file, for completion and hints in editors, is written for as many
editors as possible: draft 7, without references (that draft ignores a description beside a
`$ref`), and with `markdownDescription`, which editors on VS Code's YAML language server show as a
formatted hint: https://github.com/redhat-developer/vscode-yaml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args

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

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.imports import installed_version
from torchrepro.ground.messages import Problem, near, shown, some
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name, other_names, rows_for_key
from torchrepro.knobs.knob import (
    ANY_TEXT,
    SCHEMA_VERSION,
    SEED,
    Legal,
    OneOf,
    Text,
    waits_for_refusal,
)
from torchrepro.knobs.variables import allowed, refusal
from torchrepro.profile.document import LONGEST_NUMBER
from torchrepro.profile.needs import NEEDS, folded
from torchrepro.profile.resolved import EXTRA, STRICT, ResolvedProfile, ValueOrigin, flatten, plain
from torchrepro.profile.search_path import PIECES, SHIPPED, ProfileFolder

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from torchrepro.profile.resolved import Composition

SECTIONS = ("torch", "cuda", "cudnn", "cpu", "npu", "distributed")
VARIABLE = "TORCHREPRO_ALLOW_ENV"
"""Variable with the names, separated by commas, that the user who starts the run consents to.

No profile can set it, nor any other variable of torchrepro.
"""

OPTION = "--allow-env"

MAPPINGS = {  # keys whose value is a mapping of the user's own words
    **{key: knobs_by_name()[key].legal.words for key in ("device.modules", "streams", "ranks")},
    "requires": 'a mapping such as {torch: ">=2.6"}',
}
_NO_SECTION = ("model_type", "model_attributes_type", "dict_type", "mapping_type")
_REWORDED = dict.fromkeys(_NO_SECTION, "a section of keys belongs here")
_REWORDED["string_type"] = "not text"
"""pydantic's messages, by the type of the error, in the words of a profile's author."""

_HOW_TO_LAY_PIECES = (
    "choose them with +repro/with=[dropout-zero] under Hydra, with=[dropout-zero] among overrides, "
    "or name them in `defaults`: [debug-strict, with/dropout-zero, _self_]"
)
LONGEST = 200  # characters of a version range

_ORDINARY = re.compile(r"[\w.,<>=!~*+\- ]*", re.ASCII)

CONFIG = ConfigDict(extra="forbid", frozen=True)

# pydantic looks for plugins in every installed distribution when the first model is made, and
# raises ValueError there for entry points that are not UTF-8, or hold a line without `=`. It looks
# once: later models are made. Which distribution it is, the search path says.
with suppress(ValueError):
    create_model("First")


def legal_values(of: str | Legal) -> GetPydanticSchema:
    """Return the annotation of a field with these legal values, or those of a row by its name.

    Null is always legal.
    """
    legal = knobs_by_name()[of].legal if isinstance(of, str) else of

    def judge(value: Any) -> Any:
        inside, complaint = ((), "") if value is None else legal.wrong_part(value)
        if complaint:
            context = {"complaint": complaint, "legal": legal, "inside": inside}
            raise PydanticCustomError("illegal", "{complaint}", context)
        return value

    return GetPydanticSchema(
        lambda source, handler: core_schema.no_info_after_validator_function(
            judge, handler(source)
        ),
        lambda _schema, _handler: {"anyOf": [legal.json_schema(), NULL]},
    )


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        word = str(value).lower()
        raise PydanticCustomError(
            "unquoted",
            "a variable is text, and YAML reads this word as a boolean",
            {"todo": f'write "{word}" in quotes, or the digit that the variable expects'},
        )
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
            raise PydanticCustomError("variable", "{why}", {"why": why, "name": name})
    return MappingProxyType(dict(values))


def _frozen(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return MappingProxyType({k: _frozen(inner) for k, inner in value.items() if inner is not None})


PROFILE_NAME = Text(
    r"[^\x00-\x20\x7f-\xa0()\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
    r"[^\x00-\x1f\x7f-\xa0()\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]{0,254}",
    "one line of printable characters without parentheses",
    "reports write what they say of a profile into the same line, and into parentheses",
    variable=False,
)

AS_TEXT = BeforeValidator(_as_text)
NULL_IS_EMPTY = BeforeValidator(lambda value: {} if value is None else value)
FROZEN = (AfterValidator(_frozen), PlainSerializer(plain))


class Section(BaseModel):
    """A section of a profile; null means an empty one. A value is an attribute or an item."""

    model_config = CONFIG

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields and self[str(key)] is not None

    if TYPE_CHECKING:  # every knob of the section is an attribute

        def __getattr__(self, knob: str) -> Any: ...


def _section(name: str, prefix: str, doc: str, **more: Any) -> Any:
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
    return create_model(name, __base__=Section, __doc__=doc, **fields | more)


if TYPE_CHECKING:
    # The catalogue makes these models, so a type checker cannot know their fields.
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
        "What is computed where.",
        modules=(  # never null
            Annotated[Any, NULL_IS_EMPTY, legal_values("device.modules"), *FROZEN],
            Field(
                default_factory=lambda: MappingProxyType({}),
                description="Pattern of module names -> device on which that part of the model "
                "runs.",
            ),
        ),
    )
    Dataloader = _section("Dataloader", "dataloader.", "How data is loaded.")

TextByName: TypeAlias = Annotated[
    Mapping[str, StrictStr | None], NULL_IS_EMPTY, AfterValidator(_frozen), PlainSerializer(dict)
]
ExtraVariables: TypeAlias = Annotated[
    Mapping[str, Annotated[Any, AS_TEXT, legal_values(ANY_TEXT)]],
    NULL_IS_EMPTY,
    AfterValidator(_extra_variables),
    PlainSerializer(dict),
]


def contradictions(resolved: ResolvedProfile) -> list[tuple[str, str, str]]:
    """Return (key, value, reason) for every contradiction in `resolved`."""
    leaves = flatten(resolved.values)
    found = [
        (key, shown(leaves[key]), f"contradicts guarantee: {resolved.guarantee}; {row.because}")
        for row in NEEDS
        for key in leaves
        if resolved.guarantee in row.guarantees
        and row.knob in (key, *(knob.name for knob in other_names().get(key, ())))
        and folded(leaves[key]) in row.broken_by
    ]
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
            f"and deterministic_algorithms: {algorithms} undo each other: the level moves "
            "torch's own flag along"
        )
        found.append(("backends.npu.deterministic_level", shown(level), why))
    fallback = leaves.get("device.fallback")
    never_refuses = algorithms in ("none", "warn")
    if never_refuses and fallback is not None and waits_for_refusal(fallback):
        why = f"with deterministic_algorithms: {algorithms} no op raises, and none would fall back"
        found.append(("device.fallback", shown(fallback), why))
    return found


class Profile(BaseModel):
    """What a team asks for; null leaves a thing alone."""

    model_config = ConfigDict(**CONFIG, title="torchrepro profile")

    schema_version: Annotated[Any, legal_values(SCHEMA_VERSION)] = Field(
        None, alias="schema", description="Version of this schema that the file was written for."
    )
    name: Annotated[StrictStr | None, legal_values(PROFILE_NAME)] = Field(
        None, description="What reports call the profile; the file's own name unless given."
    )
    description: StrictStr | None = Field(None, description="One sentence for `torchrepro list`.")
    guarantee: Annotated[Any, legal_values(OneOf(("seeded", *STRICT)))] = Field(
        None,
        description="The promise: same random numbers; bitwise repeatable on one machine; equal "
        "across devices within tolerance. The last two are strict: they stop rather than go on "
        "with less.",
    )
    seed: Annotated[Any, legal_values(SEED)] = Field(
        None, description="Seed of every generator: Python, numpy, torch, all devices."
    )
    streams: Annotated[Any, NULL_IS_EMPTY, legal_values("streams"), *FROZEN] = Field(
        default_factory=lambda: MappingProxyType({}),
        description="Stream -> a seed of its own, so that one source of variation can be swept "
        "alone.",
    )
    ranks: Annotated[Any, legal_values("ranks"), *FROZEN] = Field(
        None,
        description="Whether the ranks of a distributed run draw different random numbers: one "
        "word, or one per dimension of a device mesh.",
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
        description="Other environment variables: those of an allow list; any other one needs the "
        "consent of whoever starts the run (--allow-env NAME, or TORCHREPRO_ALLOW_ENV); never "
        "dangerous ones.",
    )
    dropout: Annotated[Any, legal_values("dropout")] = Field(
        None, description="zero: dropout passes everything through."
    )
    device: Annotated[Device, NULL_IS_EMPTY] = Field(
        default_factory=Device, description="What is computed where."
    )
    dataloader: Annotated[Dataloader, NULL_IS_EMPTY] = Field(
        default_factory=Dataloader, description="How data is loaded."
    )
    on_late: Annotated[
        Any, legal_values(OneOf(("relaunch", "relaunch_or_warn", "error", "warn")))
    ] = Field(
        None,
        description="What a knob past its phase leads to. relaunch_or_warn: a Hydra run starts "
        "its command line again where that is safe; everything else goes on, with the guarantee "
        "lowered in name.",
    )
    guard: Annotated[Any, legal_values("guard")] = Field(
        None, description="Whether knobs are read again during the run."
    )
    requires: TextByName = Field(
        default_factory=lambda: MappingProxyType({}),
        description='Package -> versions that the profile needs, as in ``torch: ">=2.6"``.',
    )

    _origins: Mapping[str, ValueOrigin] = PrivateAttr(default_factory=dict)
    _asked: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _holds_together(self) -> Profile:
        if found := contradictions(self.resolved):
            raise PydanticCustomError("contradiction", "contradiction", {"found": found})
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        values = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        return _unpickled, (type(self), values, self._origins, self._asked)

    def __deepcopy__(self, memo: Any = None) -> Profile:
        return self  # frozen all the way down

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
        """Keep where each value comes from; equality and digest ignore it."""
        self._origins, self._asked = origins, asked

    @property
    def digest(self) -> str:
        """SHA-256 of what the profile asks for; name and description take no part."""
        return self.resolved.digest


def _unpickled(kind: type[Profile], values: Any, origins: Any, asked: Any) -> Profile:
    profile = kind.model_validate(values)
    profile.remember(origins, asked)
    return profile


def validated(composition: Composition) -> Profile:
    """Validate composed values; raises `ProfileError` that names where each value was set."""
    try:
        profile = Profile.model_validate(composition.values)
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for details in error.errors():
            for problem in _problems(details, composition):
                found.setdefault(problem.key, problem)
        raise ProfileError(list(found.values())) from None
    profile.remember(composition.origins, composition.asked)
    unconsented = _without_consent(composition)
    unmet = [] if unconsented else _unmet(profile.requires, composition)
    if unconsented or unmet:
        raise ProfileError(unconsented or unmet)
    return profile


def _problems(details: ErrorDetails, composition: Composition) -> list[Problem]:
    context: Mapping[str, Any] = details.get("ctx", {})
    if details["type"] == "contradiction":
        return [
            Problem(reason, composition.place(key), key, value)
            for key, value, reason in context["found"]
        ]
    path = [str(part) for part in details["loc"]]
    if details["type"] == "variable":
        path.append(context["name"])
    inside = context.get("inside", ())
    path += inside
    key = ".".join(part for part in path if part != "[key]")  # pydantic's word for a key itself
    value = details["input"]
    for each in inside:
        value = value[each]
    if "name" in context and isinstance(value, dict):
        value = value.get(context["name"])
    found = shown(value)
    if isinstance(value, dict | list):
        found = "a section" if isinstance(value, dict) else "a list"
    place = composition.place(key)
    if details["type"] == "extra_forbidden":
        return [_unknown_key(path, found, place)]
    if details["type"] == "illegal":
        legal, what = context["legal"], context["complaint"]
        if inside and place.startswith("override ") and key not in place:
            what = f"{key}: {what}"  # of several that stand there
        close = near(found, legal.choices())
        return [Problem(what, place, key, found, legal.words, close)]
    what = context.get("why") or _REWORDED.get(details["type"], details["msg"])
    legal = next((words for name, words in MAPPINGS.items() if key.startswith(name)), "")
    return [Problem(what, place, key, found, legal, todo=context.get("todo", ""))]


def _unknown_key(path: list[str], found: str, place: str) -> Problem:
    *sections, word = path
    key = ".".join(path)
    model: type[BaseModel] = Profile
    for section in sections:
        annotation = model.model_fields[section].annotation
        model = annotation if isinstance(annotation, type) else get_args(annotation)[0]
    legal = sorted(field.alias or name for name, field in model.model_fields.items())
    if sections == ["env"]:
        if why := refusal(word):
            return Problem(why, place, key, found)
        todo, meant = f"to set it all the same, move it to `env_extra: {{{word}: ...}}`", ""
        if word not in allowed():
            todo += ", which needs the consent of whoever starts the run"
            meant = near(word, legal)
        what = "the catalogue does not know this variable"
        return Problem(what, place, key, found, near=meant, todo=todo)
    if key == PIECES:
        what = "unknown key: pieces are not values of a profile"
        meant = near(word, legal)
        return Problem(what, place, key, found, some(legal), meant, _HOW_TO_LAY_PIECES)
    known = other_names().get(key) or other_names().get(f"torch.{key}") or other_names().get(word)
    # Somebody may leave its sections out.
    keys = [knob.profile_key for knob in reversed(CATALOGUE)]
    by_last_part = {key.rpartition(".")[2]: key for key in keys}
    meant = known[0].profile_key if known else by_last_part.get(word) or near(word, legal)
    what = "unknown key"
    if known:
        what = "unknown key: another name of the state behind the one below"
    todo = "write it nested, a section per line" if "." in word else ""
    return Problem(what, place, key, found, some(legal), meant, todo)


def allowed_by(names: Sequence[str]) -> str:
    """Return the value of `VARIABLE` that consents to `names` besides those it holds already.

    Raises `ProfileError` for a dangerous variable, or a text that cannot name a variable.
    """
    return ",".join(dict.fromkeys([*_consented(), *_consented(OPTION, ",".join(names))]))


def _consented(where: str = VARIABLE, text: str | None = None) -> list[str]:
    text = os.environ.get(VARIABLE, "") if text is None else text
    names = [name.strip() for name in text.split(",") if name.strip()]
    problems = [Problem(why, where, found=name) for name in names if (why := refusal(name))]
    if problems:
        raise ProfileError(problems)
    return names


def _without_consent(composition: Composition) -> list[Problem]:
    wrong = {
        name: str(value)
        for name, value in (composition.values.get(EXTRA) or {}).items()
        if value is not None
        and f"{EXTRA}.{name}" not in composition.typed
        and (name not in allowed() or allowed()[name].legal.complaint(str(value)))
    }
    if not wrong:
        return []
    consented = _consented()
    known = {knob.variable: f"env.{knob.variable}" for knob in CATALOGUE if knob.variable}
    known |= {name: f"{EXTRA}.{name}" for name in allowed()}
    problems = []
    for name, value in wrong.items():
        if name in consented:
            continue
        key = f"{EXTRA}.{name}"
        what = "not on the list of variables that a profile may set by itself"
        legal, close = "", known.get(near(name, known), "")
        if name in allowed():
            row = allowed()[name]
            what = "not a value that a profile may give this variable by itself"
            legal, close = row.legal.words, near(value, row.legal.choices())
        todo = (
            f"if you want it, consent: {OPTION} {name}, or {VARIABLE}={name} in the environment "
            f"(under Hydra, pytest and in code); or give the override {key}=... yourself"
        )
        place = composition.place(key)
        problems.append(Problem(what, place, key, shown(value), legal, close, todo))
    return problems


def _unmet(requires: Mapping[str, Any], composition: Composition) -> list[Problem]:
    if not requires:
        return []
    from packaging.specifiers import SpecifierSet

    problems = []
    for package, wanted in requires.items():
        key = f"requires.{package}"
        place, installed = composition.place(key), installed_version(package)
        specifier, fits = None, False
        # The operator === takes any text, and Python refuses a number of thousands of digits.
        if len(wanted) <= LONGEST and _ORDINARY.fullmatch(wanted):
            with suppress(ValueError):
                specifier = SpecifierSet(wanted)
        if specifier is None:
            what = "not a version range"
            problems.append(Problem(what, place, key, shown(wanted), '">=2.6"'))
            continue
        if installed is None:
            problems.append(Problem("the package is not installed", place, key, wanted))
            continue
        with suppress(ValueError):  # metadata may hold any text as its version
            fits = specifier.contains(installed, prereleases=True)
        if not fits:
            what = f"{package} {shown(installed)} is installed"
            todo = f"install {package}{wanted}, or take a profile made for {installed}"
            problems.append(Problem(what, place, key, wanted, todo=todo))
    return problems


NULL = {"type": "null"}
_TRIED = range(1000)  # integers that a variable might take
_FEW = 16  # of them are listed; more are a range


def json_schema() -> dict[str, Any]:
    """Return the schema of a profile or a piece: its keys, their values, its defaults list."""
    model = Profile.model_json_schema(by_alias=True)
    said = (
        "Profiles to inherit from, in order, and pieces to lay on top; `_self_` is this file. "
        f"A piece lies in the folder `{PIECES}` of its pack, as in `team/{PIECES}/zero`."
    )
    names = ["_self_", *ProfileFolder(SHIPPED, "").names()]
    section = _schema_of_section(model, model.pop("$defs", {}), "")
    section["properties"] = {
        "defaults": {
            "type": "array",
            "items": {"type": "string", "examples": names},
            "description": said.replace("`", ""),
            "markdownDescription": said,
        },
        **section["properties"],
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "torchrepro profile",
        "description": "What a run asks for; a key that is left out, or null, is left alone.",
        **section,
    }


def _schema_of_section(model: Any, definitions: dict[str, Any], prefix: str) -> dict[str, Any]:
    properties = {
        key: _schema_of_key(value, definitions, f"{prefix}{key}")
        for key, value in model["properties"].items()
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema_of_key(entry: Any, definitions: dict[str, Any], key: str) -> dict[str, Any]:
    said = {"description": " ".join(entry.get("description", "").split())}
    if "$ref" in entry:
        model = definitions[entry["$ref"].rpartition("/")[2]]
        said["description"] = said["description"] or model["description"]
        section = _schema_of_section(model, definitions, f"{key}.")
        return said | section | {"type": ["object", "null"]}
    kept = {k: v for k, v in entry.items() if k not in ("title", "default", "description")}
    if key == EXTRA:
        without_consent = {
            name: {
                "description": f"{row.why}. Values: {row.legal.words}; null leaves it alone.",
                "type": ["string", "integer", "null"],
                "pattern": _pattern(row.legal, []),
            }
            for name, row in allowed().items()
        }
        return said | {"properties": without_consent, **_or_null(kept)}
    knobs = rows_for_key(key)
    if not knobs:
        return said | _or_null(kept)
    legal = knobs[0].legal
    if knobs[0].variable:
        kept = {"anyOf": _texts(legal)}
    does = said["description"].partition(" Cost: ")[0]
    cost = "; ".join(dict.fromkeys(knob.cost for knob in knobs))
    words = (word.strip(",;()") for knob in knobs for word in knob.source.split())
    sources = dict.fromkeys(word for word in words if word.startswith("http"))
    linked = ", ".join(f"[{number}]({source})" for number, source in enumerate(sources, 1))
    lines = [does, f"Cost: {cost}.", f"Values: {legal.words}; null leaves it alone."]
    lines += [f"Sources: {linked}"] * bool(linked)
    hint = {"description": f"{does} Cost: {cost}.", "markdownDescription": "\n\n".join(lines)}
    return hint | _or_null(kept)


def _or_null(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also takes null, without alternatives where that is possible.

    An editor shows the hint of only one alternative.
    """
    one, *others = entry.get("anyOf", [entry, NULL])
    if others != [NULL] or not isinstance(one.get("type"), str):
        return entry
    words = {"enum": [*one["enum"], None]} if "enum" in one else {}
    return {**one, **words, "type": [one["type"], "null"]}


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
