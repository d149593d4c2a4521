"""The schema of a profile: frozen pydantic models whose sections the catalogue's rows make."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PrivateAttr,
    StrictStr,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name, other_names
from torchrepro.knobs.legal_values import ANY_TEXT, SEED, OneOf, SchemaVersion, waits_for_refusal
from torchrepro.knobs.variables import refusal
from torchrepro.messages import shown
from torchrepro.profile.composition import Composition, flatten, plain
from torchrepro.profile.document import LONGEST_NUMBER
from torchrepro.profile.needs import NEEDS, folded
from torchrepro.profile.resolved import STRICT, ResolvedProfile

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob
    from torchrepro.knobs.legal_values import Legal


SECTIONS = ("torch", "cuda", "cudnn", "cpu", "npu", "distributed")
CONFIG = ConfigDict(extra="forbid", frozen=True)

# pydantic looks for plugins in every installed distribution when the first model is made, and
# raises there if the entry points of one cannot be read. It looks once: later models are made.
# Which distribution it is, the search path says.
with suppress(
    ValueError
):  # what is raised for bytes that are no text, and for lines that are no ini
    create_model("First")


class Values:
    """Annotates a field with the legal values of a knob; null is always legal."""

    def __init__(self, legal: Legal) -> None:
        self.legal = legal

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._judge, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [self.legal.json_schema(), {"type": "null"}]}

    def _judge(self, value: Any) -> Any:
        inside, complaint = ((), "") if value is None else self.legal.wrong_part(value)
        if complaint:
            context = {"complaint": complaint, "legal": self.legal, "inside": inside}
            raise PydanticCustomError("illegal", "{complaint}", context)
        return value


def _as_text(value: Any) -> Any:
    """Turn an unquoted whole number into its digits, and refuse an unquoted true or false."""
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
    kept = {key: _frozen(inner) for key, inner in value.items() if inner is not None}
    return MappingProxyType(kept)


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


AS_TEXT = BeforeValidator(_as_text)
NULL_IS_EMPTY = BeforeValidator(_empty_if_null)
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

    if TYPE_CHECKING:

        def __getattr__(self, knob: str) -> Any:
            """Every knob of the section is an attribute."""


def _section(name: str, knobs: Mapping[str, Knob], doc: str) -> type[Section]:
    fields: dict[str, Any] = {
        field: (
            Annotated[Any, *([AS_TEXT] if knob.variable else []), Values(knob.legal), *FROZEN],
            Field(None, description=f"{knob.summary} Cost: {knob.cost}."),
        )
        for field, knob in knobs.items()
    }
    return create_model(name, __base__=Section, __doc__=doc, **fields)


def _backend(section: str) -> type[Section]:
    prefix = f"backends.{section}."
    rows = {k.name.removeprefix(prefix): k for k in CATALOGUE if k.name.startswith(prefix)}
    rows |= {
        alias.removeprefix(prefix): knobs[0]
        for alias, knobs in other_names().items()
        if alias.startswith(prefix)
    }
    return _section(f"{section.title()}Backend", rows, f"Knobs of {section}.")


_ENV_ROWS = {k.name.removeprefix("env."): k for k in CATALOGUE if k.name.startswith("env.")}

_BACKENDS: dict[str, Any] = {
    section: (
        Annotated[_backend(section), NULL_IS_EMPTY],
        Field(default_factory=_backend(section), description=f"Knobs of {section}."),
    )
    for section in SECTIONS
}
_Backends = create_model(
    "Backends", __base__=Section, __doc__="Flags of torch and its back ends.", **_BACKENDS
)
_Environment = _section("Environment", _ENV_ROWS, "Environment variables of the catalogue.")

TextByName: TypeAlias = Annotated[
    Mapping[str, StrictStr | None], NULL_IS_EMPTY, AfterValidator(_frozen), PlainSerializer(dict)
]
ExtraVariables: TypeAlias = Annotated[
    Mapping[str, Annotated[Any, AS_TEXT, Values(ANY_TEXT)]],
    NULL_IS_EMPTY,
    AfterValidator(_extra_variables),
    PlainSerializer(dict),
]


MODULES = "device.modules"  # a field of its own, which is never null


def _policy_fields(section: str) -> dict[str, Knob]:
    rows = {k.name.removeprefix(f"{section}."): k for k in CATALOGUE}
    return {field: knob for field, knob in rows.items() if knob.name not in (field, MODULES)}


_modules: Any = (
    Annotated[Any, NULL_IS_EMPTY, Values(knobs_by_name()[MODULES].legal), *FROZEN],
    Field(
        default_factory=lambda: MappingProxyType({}),
        description="Pattern of module names -> device on which that part of the model runs.",
    ),
)
_Device = create_model(
    "Device",
    __base__=_section("DevicePolicies", _policy_fields("device"), "What is computed where."),
    modules=_modules,
)
_Dataloader = _section("Dataloader", _policy_fields("dataloader"), "How data is loaded.")

if TYPE_CHECKING:
    # The catalogue makes these models, so a type checker cannot know their fields.
    Backends: TypeAlias = Section
    Environment: TypeAlias = Section
    Device: TypeAlias = Section
    Dataloader: TypeAlias = Section
else:
    Backends, Environment, Device, Dataloader = _Backends, _Environment, _Device, _Dataloader


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


def legal_values(knob: str) -> Values:
    """Return the annotation for a field that obeys the row `knob`."""
    return Values(knobs_by_name()[knob].legal)


class Profile(BaseModel):
    """What a team asks for; null leaves a thing alone."""

    model_config = ConfigDict(**CONFIG, title="torchrepro profile", use_attribute_docstrings=True)

    schema_version: Annotated[Any, Values(SchemaVersion())] = Field(None, alias="schema")
    """Version of this schema that the file was written for."""

    name: StrictStr | None = None
    """What reports call the profile; the file's own name unless given."""

    description: StrictStr | None = None
    """One sentence for `torchrepro list`."""

    guarantee: Annotated[Any, Values(OneOf(("seeded", *STRICT)))] = None
    """The promise: same random numbers; bitwise repeatable on one machine; equal across devices
    within tolerance. The last two are strict: they stop rather than go on with less."""

    seed: Annotated[Any, Values(SEED)] = None
    """Seed of every generator: Python, numpy, torch, all devices."""

    streams: Annotated[Any, NULL_IS_EMPTY, legal_values("streams"), *FROZEN] = Field(
        default_factory=lambda: MappingProxyType({})
    )
    """Stream -> a seed of its own, so that one source of variation can be swept alone."""

    ranks: Annotated[Any, legal_values("ranks"), *FROZEN] = None
    """Whether the ranks of a distributed run draw different random numbers: one word, or one per
    dimension of a device mesh."""

    backends: Annotated[Backends, NULL_IS_EMPTY] = Field(default_factory=Backends)
    """Flags of torch and its back ends."""

    env: Annotated[Environment, NULL_IS_EMPTY] = Field(default_factory=Environment)
    """Environment variables that the catalogue knows."""

    env_extra: ExtraVariables = Field(default_factory=lambda: MappingProxyType({}))
    """Other environment variables: those of an allow list; any other one needs the consent of
    whoever starts the run (--allow-env NAME, or TORCHREPRO_ALLOW_ENV); never dangerous ones."""

    dropout: Annotated[Any, legal_values("dropout")] = None
    """zero: dropout passes everything through."""

    device: Annotated[Device, NULL_IS_EMPTY] = Field(default_factory=Device)
    """What is computed where."""

    dataloader: Annotated[Dataloader, NULL_IS_EMPTY] = Field(default_factory=Dataloader)
    """How data is loaded."""

    on_late: Annotated[Any, Values(OneOf(("relaunch", "relaunch_or_warn", "error", "warn")))] = None
    """What a knob past its phase leads to. relaunch_or_warn: a Hydra run starts its command line
    again where that is safe; everything else goes on, with the guarantee lowered in name."""

    guard: Annotated[Any, legal_values("guard")] = None
    """Whether knobs are read again during the run."""

    requires: TextByName = Field(default_factory=lambda: MappingProxyType({}))
    """Package -> versions that the profile needs, as in ``torch: ">=2.6"``."""

    _composition: Composition | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _without_contradictions(self) -> Profile:
        found = contradictions(self.resolved)
        if found:
            raise PydanticCustomError("contradiction", "contradiction", {"found": found})
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        values = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        return _unpickled, (type(self), values, self._composition)

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
        return ResolvedProfile.of(values, self._composition)

    def remember(self, composition: Composition) -> None:
        """Keep where each value comes from; equality and digest ignore it."""
        self._composition = composition

    @property
    def digest(self) -> str:
        """SHA-256 of what the profile asks for; name and description take no part."""
        return self.resolved.digest


def _unpickled(kind: type[Profile], values: Any, composition: Composition | None) -> Profile:
    profile = kind.model_validate(values)
    if composition is not None:
        profile.remember(composition)
    return profile
