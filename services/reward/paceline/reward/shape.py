"""How a scorer's value enters the sum: for which items, clipped, weighted, and whether it may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from paceline.core.scoring import ScoreItem

if TYPE_CHECKING:  # child processes start without pydantic
    from paceline.config.reward import ShapedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A scorer's place in the sum.

    Args:
        weight: the factor of its value.
        minimum, maximum: what its value is clipped to before; None: not.
        data_sources: the items that it scores; none: all.
        required: whether its error is the item's.
    """

    weight: float = 1.0
    minimum: float | None = None
    maximum: float | None = None
    data_sources: tuple[str, ...] = ()
    required: bool = True

    @classmethod
    def configured(cls, config: ShapedConfig) -> Self:
        """What a section of the configuration asks for."""
        return cls(
            weight=config.weight,
            minimum=config.min_value,
            maximum=config.max_value,
            data_sources=config.data_sources,
            required=config.required,
        )

    def takes(self, item: ScoreItem) -> bool:
        """Whether the scorer scores this item."""
        return not self.data_sources or item.data_source in self.data_sources

    def contribution(self, value: float) -> float:
        """What a value adds to the sum; infinite where it overflows."""
        if self.minimum is not None:
            value = max(value, self.minimum)
        if self.maximum is not None:
            value = min(value, self.maximum)
        return self.weight * value
