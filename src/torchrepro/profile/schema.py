"""The schema of a profile: frozen pydantic models whose knobs come from the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictStr,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name, other_names
from torchrepro.knobs.legal import ANY_TEXT, SEED, OneOf, SchemaVersion
from torchrepro.knobs.refused import refusal
from torchrepro.profile.contradictions import contradictions
from torchrepro.profile.resolved import STRICT, Resolved

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob
    from torchrepro.knobs.legal import Legal

SECTIONS = ("torch", "cuda", "cudnn", "cpu", "npu", "distributed")

_CONFIG = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _field_type(legal: Legal) -> Any:
    """Return the type of a field that takes the values of `legal`, or null."""

    def judge(value: Any) -> Any:
        complaint = legal.complaint(value)
        if complaint:
            raise PydanticCustomError(
                "illegal", "{complaint}", {"complaint": complaint, "legal": legal}
            )
        return value

    return Annotated[Any, AfterValidator(judge), WithJsonSchema(legal.json_schema())] | None


def _as_text(value: Any) -> Any:
    """Turn an unquoted whole number into its digits, and refuse an unquoted true or false."""
    if isinstance(value, bool):
        word = str(value).lower()
        raise PydanticCustomError(
            "unquoted",
            "a variable is text, and YAML reads this word as a boolean",
            {"todo": f'write "{word}" in quotes, or the digit that the variable expects'},
        )
    return str(value) if isinstance(value, int) else value


def _variable_type(legal: Legal) -> Any:
    return Annotated[_field_type(legal), BeforeValidator(_as_text)]


def _extra_variables(values: Mapping[str, str]) -> Mapping[str, str]:
    known = {knob.name.removeprefix("env.") for knob in CATALOGUE if knob.target == "env"}
    for name in values:
        why = refusal(name)
        if name in known:
            why = "the catalogue knows this variable: set it in `env`"
        if why:
            raise PydanticCustomError("variable", "{why}", {"why": why, "name": name})
    return MappingProxyType(dict(values))


def _frozen(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(values))


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


class Section(BaseModel):
    """A section of a profile; null means an empty one."""

    model_config = _CONFIG


def _section(name: str, knobs: Mapping[str, Knob], doc: str) -> type[Section]:
    fields: dict[str, Any] = {
        field: (
            _variable_type(knob.legal) if knob.target == "env" else _field_type(knob.legal),
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

Backends: type[Section] = create_model(
    "Backends",
    __base__=Section,
    __doc__="Flags of torch and its back ends.",
    **{
        section: (
            Annotated[_backend(section), BeforeValidator(_empty_if_null)],
            Field(default_factory=_backend(section), description=f"Knobs of {section}."),
        )
        for section in SECTIONS
    },
)
Environment = _section("Environment", _ENV_ROWS, "Environment variables of the catalogue.")

TextByName = Annotated[
    Mapping[str, StrictStr],
    BeforeValidator(_empty_if_null),
    AfterValidator(_frozen),
    PlainSerializer(dict),
]
ExtraVariables = Annotated[
    Mapping[str, Annotated[_field_type(ANY_TEXT), BeforeValidator(_as_text)]],
    BeforeValidator(_empty_if_null),
    AfterValidator(_extra_variables),
    PlainSerializer(dict),
]


def _policy_fields(section: str) -> dict[str, Knob]:
    rows = (knob for knob in CATALOGUE if knob.name.startswith(f"{section}."))
    return {knob.name.removeprefix(f"{section}."): knob for knob in rows}


Device = create_model(
    "Device",
    __base__=_section("DevicePolicies", _policy_fields("device"), "What is computed where."),
    modules=(
        TextByName,
        Field(
            default_factory=lambda: MappingProxyType({}),
            description="Pattern of module names -> device on which that part of the model runs.",
        ),
    ),
)
Dataloader = _section("Dataloader", _policy_fields("dataloader"), "How data is loaded.")


def _word(knob: str) -> Any:
    return _field_type(knobs_by_name()[knob].legal)


class Profile(BaseModel):
    """What a team asks for; null leaves a thing alone."""

    model_config = ConfigDict(**_CONFIG, validate_by_name=False, title="torchrepro profile")

    schema_version: _field_type(SchemaVersion()) = Field(None, alias="schema")
    """Version of this schema that the file was written for."""

    name: StrictStr | None = None
    """What reports call the profile; the file's own name unless given."""

    description: StrictStr | None = None
    """One sentence for `torchrepro list`."""

    guarantee: _field_type(OneOf(("seeded", *STRICT))) = None
    """The promise: same random numbers; bitwise repeatable on one machine; equal across devices
    within tolerance. The last two are strict: they stop rather than go on with less."""

    seed: _field_type(SEED) = None
    """Seed of every generator: Python, numpy, torch, all devices."""

    ranks: _word("ranks") = None
    """Whether the ranks of a distributed run draw different random numbers."""

    backends: Annotated[Backends, BeforeValidator(_empty_if_null)] = Field(  # type: ignore[valid-type]
        default_factory=Backends
    )
    """Flags of torch and its back ends."""

    env: Annotated[Environment, BeforeValidator(_empty_if_null)] = Field(  # type: ignore[valid-type]
        default_factory=Environment
    )
    """Environment variables that the catalogue knows."""

    env_extra: ExtraVariables = Field(default_factory=lambda: MappingProxyType({}))
    """Other environment variables, never dangerous ones."""

    dropout: _word("dropout") = None
    """zero: dropout passes everything through."""

    device: Annotated[Device, BeforeValidator(_empty_if_null)] = Field(  # type: ignore[valid-type]
        default_factory=Device
    )
    """What is computed where."""

    dataloader: Annotated[Dataloader, BeforeValidator(_empty_if_null)] = Field(  # type: ignore[valid-type]
        default_factory=Dataloader
    )
    """How data is loaded."""

    on_late: _field_type(OneOf(("relaunch", "error", "warn"))) = None
    """What a knob past its phase leads to."""

    guard: _word("guard") = None
    """Whether knobs are read again during the run."""

    requires: TextByName = Field(default_factory=lambda: MappingProxyType({}))
    """Package -> versions that the profile needs, as in ``torch: ">=2.6"``."""

    @model_validator(mode="after")
    def _without_contradictions(self) -> Profile:
        found = contradictions(self.resolved)
        if found:
            raise PydanticCustomError("contradiction", "contradiction", {"found": found})
        return self

    @property
    def resolved(self) -> Resolved:
        """The plain values that the profile sets."""
        return Resolved.of(self.model_dump(by_alias=True, mode="json", exclude_none=True))

    @property
    def digest(self) -> str:
        """SHA-256 of what the profile asks for; name and description take no part."""
        return self.resolved.digest
