"""The JSON Schema of a profile file, for completion and hints in editors."""

from __future__ import annotations

from typing import Any

from torchrepro.profile.schema import Profile


def json_schema() -> dict[str, Any]:
    """Return the schema of a profile file: the keys of a profile, and its defaults list."""
    schema = Profile.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["defaults"] = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Profiles to inherit from, in order; `_self_` is this file.",
    }
    return schema
