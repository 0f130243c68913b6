"""Writes docs/reference/configuration.schema.json: the JSON Schema of the configuration file.

It holds the keys, their types and the bounds of each value. It cannot hold rules across keys, which
`schedsvc check` checks.
"""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from schedsvc.config import Config
from spec.generate import sentences, written
from spec.settings import SECTIONS

__all__ = ["schema_text"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: A whole number with k or M, as the file may have it.
_SHORT = "^[0-9]{1,12}[kM]$"


class _OfFile(GenerateJsonSchema):
    """Writes what the file may have, which is not what the models hold."""

    def int_schema(self, schema: core_schema.IntSchema) -> dict[str, Any]:
        # A pattern speaks of texts alone, and bounds of numbers alone.
        return {**super().int_schema(schema), "type": ["integer", "string"], "pattern": _SHORT}

    def bool_schema(self, schema: core_schema.BoolSchema) -> dict[str, Any]:
        # YAML 1.1, in which the file is read, has more words for these than YAML 1.2 of an editor.
        return {"enum": [True, False, "on", "off", "yes", "no"]}

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> dict[str, Any]:
        # A model holds many defaults in another unit than the file.
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def schema_text() -> str:
    """Return the schema as text. O(keys)."""
    schema = Config.model_json_schema(schema_generator=_OfFile)
    for section in SECTIONS:
        found = schema["$defs"][section.model]
        for setting in section.settings:
            key = found["properties"][setting.name]
            key["description"] = sentences(setting)
            default = setting.default
            key["default"] = default if isinstance(default, bool) else _value(written(default))
    return json.dumps({"$schema": _DIALECT, **schema}, indent=2) + "\n"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
