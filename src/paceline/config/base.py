"""The base class of the configuration's sections, which are frozen and refuse unknown keys; shared types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic_core import core_schema


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors; values cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def changed(self, **sections: Mapping[str, Any]) -> Self:
        """Returns a copy with other values in some of its sections, which are not validated again."""
        copies = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=copies)


Files = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
"""Paths of data files, or names of data sets; a single path or name may be written without a list."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """Annotates a value that must be one of `names`; with `or_own`, it may also be the path of a user's own
    function or class."""

    names: tuple[str, ...]
    or_own: bool = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        literal = core_schema.literal_schema(list(self.names))
        if not self.or_own:
            return literal
        own = core_schema.no_info_after_validator_function(own_path, core_schema.str_schema())

        def kind(value: object) -> str:
            return "own" if ":" in str(value) else "literal"

        return core_schema.tagged_union_schema({"own": own, "literal": literal}, discriminator=kind)


OwnOptions = dict[str, bool | int | float | str | None]
"""Keyword arguments of a user's own function or class."""


def own_path(path: str) -> str:
    """Returns the path of a user's own function or class; raises ValueError if it lacks file or name."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ValueError("write path/to/file.py:function or module:function; for an algorithm, its class")
    return path
