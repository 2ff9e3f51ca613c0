"""What every section of the configuration shares: frozen, strict about keys, described field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import core_schema


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors; values do not change once read."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Annotates a value that must be one of these names, which a table elsewhere holds."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.literal_schema(list(self.names))
