"""How a scorer's value enters the sum: for which items, clipped, weighted, and whether it may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from paceline.core.errors import RewardError, RewardErrorKind
from paceline.core.scoring import ScoreItem

if TYPE_CHECKING:  # child processes start without pydantic
    from paceline.config.reward import ShapedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A scorer's place in the sum.

    Args:
        minimum, maximum: the bounds to which its value is clipped before weighting; None: no bound.
        data_sources: the data sources that the scorer scores; empty: all.
        where: by column, the allowed values, as text.
        weight_key: column with a further factor.
        required: whether its error becomes the item's error.
        cache_size: number of cached scores; 0: none.
        group: whether the scorer scores the samples of a prompt together.
        is_normalized: whether the controller normalises its value over the batch.
    """

    weight: float = 1.0
    minimum: float | None = None
    maximum: float | None = None
    data_sources: tuple[str, ...] = ()
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    weight_key: str | None = None
    required: bool = True
    cache_size: int = 0
    group: bool = False
    is_normalized: bool = False

    @classmethod
    def configured(cls, config: ShapedConfig) -> Self:
        """Reads a section of the configuration."""
        return cls(
            weight=config.weight,
            minimum=config.min_value,
            maximum=config.max_value,
            data_sources=config.data_sources,
            where=config.where,
            weight_key=config.weight_key,
            required=config.required,
            cache_size=getattr(config, "cache_size", 0),
            group=getattr(config, "group", False),
            is_normalized=config.normalize is not None,
        )

    def takes(self, item: ScoreItem) -> bool:
        """Returns whether the scorer scores this item."""
        if self.data_sources and item.data_source not in self.data_sources:
            return False
        return all(_text(item.extra.get(column)) in values for column, values in self.where.items())

    def weight_of(self, item: ScoreItem) -> float:
        """Returns the factor of an item's value.

        Raises:
            RewardError: WRONG_TYPE, if its row has no number in the column with the factor.
        """
        if self.weight_key is None:
            return self.weight
        factor = item.extra.get(self.weight_key)
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise RewardError(
                f"weight_key={self.weight_key}: the row has {factor!r} there, not a number; "
                "add the column to data.extra_keys, and a number to each row",
                kind=RewardErrorKind.WRONG_TYPE,
            )
        return self.weight * factor

    def contribution(self, value: float, item: ScoreItem) -> float:
        """Returns the summand for a value, infinite if it overflows; raises what `weight_of` raises."""
        return self.weight_of(item) * self.clipped(value)

    def clipped(self, value: float) -> float:
        """Clips a value to the scorer's range."""
        if self.minimum is not None:
            value = max(value, self.minimum)
        if self.maximum is not None:
            value = min(value, self.maximum)
        return value


def _text(value: object) -> str:
    """Returns a column's value as the configuration writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
