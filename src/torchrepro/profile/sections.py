"""The sections of a profile: frozen pydantic models that the catalogue's rows make."""

from __future__ import annotations

from collections.abc import Mapping
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
    StrictStr,
    create_model,
)
from pydantic_core import PydanticCustomError, core_schema

from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name, other_names
from torchrepro.knobs.legal import ANY_TEXT
from torchrepro.knobs.refused import refusal
from torchrepro.profile.document import LONGEST_NUMBER

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob
    from torchrepro.knobs.legal import Legal

SECTIONS = ("torch", "cuda", "cudnn", "cpu", "npu", "distributed")
CONFIG = ConfigDict(extra="forbid", frozen=True)


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
        complaint = "" if value is None else self.legal.complaint(value)
        if complaint:
            part = getattr(self.legal, "wrong_part", None)
            inside, _ = part(value) if part else ((), "")
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


def _thawed(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _thawed(inner) for key, inner in value.items()}


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


AS_TEXT = BeforeValidator(_as_text)
NULL_IS_EMPTY = BeforeValidator(_empty_if_null)
FROZEN = (AfterValidator(_frozen), PlainSerializer(_thawed))


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
    Mapping[str, StrictStr | None],
    NULL_IS_EMPTY,
    AfterValidator(_frozen),
    PlainSerializer(dict),
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
