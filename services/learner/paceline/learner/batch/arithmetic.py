"""The arithmetic of rows, from their lengths and the model's shape, by which a step is spread evenly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLength:
    """What the plan needs to know of a row; rows are ordered by (prompt id, sample index)."""

    prompt_id: int
    num_prompt_tokens: int
    num_response_tokens: int
    num_patches: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def num_budgeted(self) -> int:
        """What it takes of a micro-batch's token budget: its tokens, and the patches of its images."""
        return self.num_tokens + self.num_patches


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Operations of one forward and backward pass; whole numbers, so that every rank rounds alike.

    Attributes:
        per_token: of all layers' matrix products.
        per_response_token: of the head.
        per_pair: of attention, by the squared length of a sequence.
    """

    per_token: int
    per_response_token: int
    per_pair: int

    def of_row(self, row: RowLength) -> int:
        """A row by itself."""
        return self.of_prompt(row) + self.of_response(row)

    def of_prompt(self, row: RowLength) -> int:
        """The row's prompt."""
        return self.per_token * row.num_prompt_tokens + self.per_pair * row.num_prompt_tokens**2

    def of_response(self, row: RowLength) -> int:
        """The row's response, which attends to the prompt, too."""
        pairs = row.num_tokens**2 - row.num_prompt_tokens**2
        return (self.per_token + self.per_response_token) * row.num_response_tokens + self.per_pair * pairs

    def of_rows(self, rows: Iterable[RowLength], *, share_prompts: bool = False) -> int:
        """Rows by themselves, or with one copy of each prompt."""
        if not share_prompts:
            return sum(map(self.of_row, rows))
        rows = tuple(rows)
        prompts = {row.prompt_id: row for row in rows}
        return sum(map(self.of_prompt, prompts.values())) + sum(map(self.of_response, rows))
