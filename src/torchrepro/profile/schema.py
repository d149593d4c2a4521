"""The schema of a profile: one frozen pydantic model."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.legal import SEED, OneOf, SchemaVersion
from torchrepro.profile.composition import Composition  # noqa: TC001 - pydantic reads it
from torchrepro.profile.contradictions import contradictions
from torchrepro.profile.resolved import STRICT, Resolved
from torchrepro.profile.sections import (
    CONFIG,
    FROZEN,
    NULL_IS_EMPTY,
    Backends,
    Dataloader,
    Device,
    Environment,
    ExtraVariables,
    TextByName,
    Values,
)


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
        return _as_it_was, (type(self), values, self._composition)

    def __deepcopy__(self, memo: Any = None) -> Profile:
        return self  # frozen all the way down

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and self.resolved == other.resolved

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def resolved(self) -> Resolved:
        """The plain values that the profile sets."""
        values = self.model_dump(by_alias=True, mode="json", exclude_none=True)
        return Resolved.of(values, self._composition)

    def remember(self, composition: Composition) -> None:
        """Keep where each value comes from; equality and digest take no notice of it."""
        self._composition = composition

    @property
    def digest(self) -> str:
        """SHA-256 of what the profile asks for; name and description take no part."""
        return self.resolved.digest


def _as_it_was(kind: type[Profile], values: Any, composition: Composition | None) -> Profile:
    profile = kind.model_validate(values)
    if composition is not None:
        profile.remember(composition)
    return profile
