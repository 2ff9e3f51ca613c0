"""Packs rows into a micro-batch: tokens without padding, and padded (B, R) tables for the losses.

[prompt response] [prompt response] ...                   each row by itself
[prompt] [response] [response] ... [prompt response] ...  with shared prompts: neighbours of the same prompt
[prompt response] [segment] [prompt response] ...         a row whose history was rewritten

Images of prompts go beside the tokens: `paceline.learner.batch.images`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from paceline.core.samples.expert_choices import ChoiceArray, joined_choices
from paceline.core.samples.trajectory import Int32Array
from paceline.learner.batch.blocks import Int64Array, on_device
from paceline.learner.batch.images import PlacedImages, in_three, prompt_positions
from paceline.learner.batch.types import MicroBatch, PackedRow, PackedSequences, PackedTeacher


def pack(rows: Sequence[PackedRow], device: torch.device, *, share_prompts: bool = False) -> MicroBatch:
    """Packs rows in the given order; returns a filler micro-batch if there are no rows.

    Args:
        share_prompts: neighbouring rows with the same prompt have one copy of it.
    """
    sources = tuple(rows)
    rows = list(rows) or [_filler_row()]
    layout = _Layout.of(rows, share_prompts=share_prompts)
    responses = np.array([len(row.response_token_ids) for row in rows])
    first = np.cumsum(responses) - responses  # start of each row among the n response tokens
    steps = np.arange(responses.max())
    inside = steps < responses[:, None]  # (B, R)
    score_positions = np.array(layout.response_starts)[:, None] - 1 + steps
    score_positions[:, 0] = layout.prompt_ends
    places = np.where(inside, first[:, None] + steps, responses.sum())
    mask = np.zeros(inside.shape, bool)
    log_probs = np.zeros(inside.shape, np.float32)
    mask[inside] = np.concatenate([row.response_mask for row in rows]) != 0
    log_probs[inside] = np.concatenate([row.response_log_probs for row in rows])
    put = partial(on_device, device=device)
    return MicroBatch(
        rows=tuple(row.index for row in sources),
        input_ids=put(np.concatenate(layout.tokens).astype(np.int64)).unsqueeze(0),
        position_ids=put(layout.position_ids()).unsqueeze(-2),
        packed=PackedSequences.of(layout.lengths, device, layout.prefixes),
        score_positions=put(score_positions[inside].astype(np.int64)),
        targets=put(np.concatenate([row.response_token_ids for row in rows]).astype(np.int64)),
        places=put(places.astype(np.int64)),
        mask=put(mask),
        rollout_log_probs=put(log_probs),
        sources=sources,
        share_prompts=share_prompts,
        images=layout.images.pack(device),
        expert_choices=layout.packed_choices(),
        teacher=_packed_teacher(rows),
    )


def _packed_teacher(rows: Sequence[PackedRow]) -> PackedTeacher | None:
    """Returns a teacher's tokens at all response tokens; None if a row has none."""
    parts = [row.teacher for row in rows if row.teacher is not None]
    if len(parts) < len(rows):
        return None
    return PackedTeacher(
        token_ids=torch.from_numpy(np.concatenate([part.token_ids for part in parts])),
        log_probs=torch.from_numpy(np.concatenate([part.log_probs for part in parts])),
    )


@dataclass(kw_only=True, slots=True)
class _Layout:
    """Where the rows' tokens lie.

    Attributes:
        tokens, positions: one array per prompt or response.
        choices: by prompt and response, the choices of experts or None, and the number of tokens.
    """

    tokens: list[Int32Array] = field(default_factory=list)
    positions: list[Int64Array] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    prefixes: list[int | None] = field(default_factory=list)
    prompt_ends: list[int] = field(default_factory=list)
    response_starts: list[int] = field(default_factory=list)
    images: PlacedImages = field(default_factory=PlacedImages)
    choices: list[tuple[ChoiceArray | None, int]] = field(default_factory=list)
    num_tokens: int = 0

    @classmethod
    def of(cls, rows: Sequence[PackedRow], *, share_prompts: bool) -> _Layout:
        layout = cls()
        runs = groupby(rows, lambda row: row.prompt_key)
        for family in ([*run] for _, run in runs) if share_prompts else ([row] for row in rows):
            prompt, prefix = family[0].prompt_token_ids, len(layout.lengths)
            response_position = layout._append_prompt(family[0])
            prompt_end = layout.num_tokens - 1
            if len(family) > 1:
                layout._close(len(prompt), None)
            for row in family:
                layout.prompt_ends.append(prompt_end)
                layout.response_starts.append(layout.num_tokens)
                choices = row.expert_choices
                own = None if choices is None else choices[len(prompt) :]
                layout.choices.append((own, len(row.response_token_ids)))
                response, *segments = np.split(row.response_token_ids, row.segment_starts)
                layout._append(response, response_position)
                if len(family) > 1:
                    layout._close(len(response), prefix)
                else:
                    layout._close(len(prompt) + len(response), None)
                for segment in segments:
                    layout._append(segment, 0)
                    layout._close(len(segment), None)
        return layout

    def position_ids(self) -> Int64Array:
        """Returns the position ids: (T,), or (3, T) with images."""
        if not self.images:
            return np.concatenate(self.positions).astype(np.int64)
        return np.concatenate([in_three(part) for part in self.positions], axis=1).astype(np.int64)

    def packed_choices(self) -> Tensor | None:
        """Returns the choices of all tokens, (T, L, K); None if there are none."""
        choices = joined_choices(*zip(*self.choices, strict=True))
        if choices is None:
            return None
        # Few operators take uint16, and no model has that many experts.
        return torch.from_numpy(choices if choices.itemsize == 1 else choices.view(np.int16))

    def _append_prompt(self, row: PackedRow) -> int:
        """Appends a row's prompt; returns the position of the next token."""
        prompt, choices = row.prompt_token_ids, row.expert_choices
        self.choices.append((None if choices is None else choices[: len(prompt)], len(prompt)))
        if not row.images:
            self._append(prompt, 0)
            return len(prompt)
        self.images.place(row.images, self.num_tokens)
        positions = prompt_positions(len(prompt), row.images)
        self.tokens.append(prompt)
        self.positions.append(positions)
        self.num_tokens += len(prompt)
        return int(positions.max()) + 1

    def _append(self, tokens: Int32Array, first_position: int) -> None:
        self.tokens.append(tokens)
        self.positions.append(np.arange(first_position, first_position + len(tokens)))
        self.num_tokens += len(tokens)

    def _close(self, length: int, prefix: int | None) -> None:
        """Makes the last `length` tokens a sequence."""
        self.lengths.append(length)
        self.prefixes.append(prefix)


def _filler_row() -> PackedRow:
    """Makes a row of two masked tokens, for a rank that has no row where other ranks have some."""
    return PackedRow(
        index=-1,
        prompt_token_ids=np.zeros(1, np.int32),
        response_token_ids=np.zeros(1, np.int32),
        response_mask=np.zeros(1, np.uint8),
        response_log_probs=np.zeros(1, np.float32),
    )
