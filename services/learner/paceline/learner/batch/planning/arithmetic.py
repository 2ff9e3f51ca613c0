"""Counts the arithmetic of rows from their lengths and the model's shape, to spread a step evenly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLength:
    """What the plan needs to know of a row; rows are ordered by (prompt id, sample index)."""

    prompt_id: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_patches: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens prompt and response have together."""
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def num_budgeted(self) -> int:
        """Its share of a micro-batch's token budget: its tokens, and the patches of its images."""
        return self.num_tokens + self.num_patches


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Operations of one forward and backward pass; whole numbers, so that every rank rounds alike.

    Attributes:
        per_token: operations of all layers' matrix products.
        per_response_token: operations of the head.
        per_pair: operations of attention, times the squared length of a sequence.
        per_patch: operations of the vision tower.
        per_patch_pair: operations of the tower's attention, times the squared number of a row's patches.
            Several images count as one, which overestimates a few images by some per cent.
    """

    per_token: int
    per_response_token: int
    per_pair: int
    per_patch: int = 0
    per_patch_pair: int = 0

    def of_images(self, row: RowLength) -> int:
        """Returns operations for the images of the row's prompt."""
        return self.per_patch * row.num_patches + self.per_patch_pair * row.num_patches**2

    def of_prompt(self, row: RowLength) -> int:
        """Returns operations for the tokens of the row's prompt."""
        return self.per_token * row.num_prompt_tokens + self.per_pair * row.num_prompt_tokens**2

    def of_response(self, row: RowLength) -> int:
        """Returns operations for the row's response, which also attends to the prompt."""
        length = row.num_response_tokens
        # The pairs are (prompt + response)^2 - prompt^2.
        per_pair = self.per_pair * (2 * row.num_prompt_tokens + length)
        return (self.per_token + self.per_response_token + per_pair) * length

    def of_rows(self, rows: Iterable[RowLength], *, share_prompts: bool = False) -> int:
        """Returns operations for rows, each with its own prompt or sharing it; images are computed once."""
        rows = tuple(rows)
        return RowCosts(self, rows, share_prompts=share_prompts).of(range(len(rows)))


class RowCosts:
    """Counts the arithmetic of any choice of some rows; what a row takes is computed once.

    Args:
        share_prompts: whether chosen rows with the same prompt have one copy of it.
    """

    def __init__(self, arithmetic: Arithmetic, rows: Sequence[RowLength], *, share_prompts: bool) -> None:
        self._prompt_ids = [row.prompt_id for row in rows]
        prompts = {row.prompt_id: row for row in rows}
        self._once = {number: arithmetic.of_images(row) for number, row in prompts.items()}
        self._each = list(map(arithmetic.of_response, rows))
        if share_prompts:
            self._once = {
                number: self._once[number] + arithmetic.of_prompt(prompts[number]) for number in prompts
            }
        else:
            self._each = list(map(add, self._each, map(arithmetic.of_prompt, rows)))
        self._has_shared = any(self._once.values())

    def of(self, indices: Sequence[int]) -> int:
        """Returns operations for the rows with these indices."""
        total = sum(map(self._each.__getitem__, indices))
        if self._has_shared:
            total += sum(map(self._once.__getitem__, {self._prompt_ids[index] for index in indices}))
        return total
