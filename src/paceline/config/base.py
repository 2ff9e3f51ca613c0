"""What every section of the configuration shares: frozen, strict about keys, described field by field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors; values do not change once read."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
