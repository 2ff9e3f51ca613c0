"""The records of a batch on its way to the update: rows, micro-batches, scored batches, training batches.

B counts the rows of a micro-batch, R is their longest response, T all their tokens, n their response tokens.
The model sees (1, T). Its numbers per response token are flat, (n,); `MicroBatch.table` spreads them over
(B, R) for `paceline.algorithms`, whose functions need complete sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.samples.expert_choices import ChoiceArray
from paceline.core.samples.teacher_top_k import TeacherTopK
from paceline.core.samples.trajectory import Float32Array, Int32Array, UInt8Array
from paceline.learner.batch.blocks import SequenceBlock, merged_blocks
from paceline.learner.batch.chained import ChainedSequences
from paceline.learner.batch.padded import PaddedSequences
from paceline.learner.batch.row_index import RowIndex
from paceline.learner.distributed.mesh import RankGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptImage:
    """An image of a prompt; its tokens stand side by side in the prompt.

    Attributes:
        start: the place of its first token in the prompt.
        grid: (t, h, w), in patches.
        merge_size: the patches along height and along width that one token stands for.
        pixels: (t h w, width), the patches as the model's processor gives them.
    """

    hash: str
    start: int
    grid: tuple[int, int, int]
    merge_size: int
    pixels: Float32Array

    @property
    def token_grid(self) -> tuple[int, int, int]:
        """(t, h, w), in tokens."""
        t, h, w = self.grid
        return t, h // self.merge_size, w // self.merge_size

    @property
    def num_tokens(self) -> int:
        """Number of the image's tokens in the prompt."""
        return prod(self.token_grid)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRow:
    """A trajectory; `index` is its place in the step's batch, -1 for a filler of an empty micro-batch.

    It is one sequence, or several: a new one begins at each of `segment_starts`, places in the response.
    `images` are those of the prompt, in order. `expert_choices` are the engine's, of prompt and response.
    `teacher` are a served teacher's likeliest tokens at the R tokens of the response.
    """

    index: int
    prompt_token_ids: Int32Array
    response_token_ids: Int32Array
    response_mask: UInt8Array
    response_log_probs: Float32Array
    segment_starts: tuple[int, ...] = ()
    images: tuple[PromptImage, ...] = ()
    expert_choices: ChoiceArray | None = None
    teacher: TeacherTopK | None = None

    @property
    def prompt_key(self) -> tuple[object, ...]:
        """A key that is equal for rows with the same prompt, token by token and image by image."""
        return (self.prompt_token_ids.tobytes(), *(image.hash for image in self.images))

    @classmethod
    def unsampled(
        cls, index: int, prompt: Int32Array, response: Int32Array, *, images: tuple[PromptImage, ...] = ()
    ) -> PackedRow:
        """Makes a row that no sampler gave: all tokens of the response count, and have log-probs of 0."""
        return cls(
            index=index,
            prompt_token_ids=prompt,
            response_token_ids=response,
            response_mask=np.ones(len(response), np.uint8),
            response_log_probs=np.zeros(len(response), np.float32),
            images=images,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixedKeys:
    """The keys that the sequences see, one sequence after another: first its prefix, then itself.

    Attributes:
        tokens: (K,), which of the T tokens each key belongs to; a prefix occurs once per sequence.
        cu_seqlens: (num_sequences + 1,) int32, where each sequence's keys begin among the K.
        max_length: largest number of keys of a sequence.
    """

    tokens: RowIndex
    cu_seqlens: Tensor
    max_length: int


# Not a dataclass: FSDP would copy it with all its contents before every layer, and torch 2.11 would guard
# compiled layers on every field of a frozen one.
class PackedSequences:
    """Where the sequences of a packed row begin. Immutable, except that it caches what it derives.

    A sequence may have another one as its prefix: its tokens also see the prefix's tokens, as if they
    followed them.

    Attributes:
        cu_seqlens: (num_sequences + 1,) int32 on the model's device, from 0 to the number of tokens.
        blocks: the same sequences as runs of equal length and prefix, in order.
        keys: None if no sequence has a prefix.
        context: the ranks that share these tokens, each with its own part; None for one rank.
    """

    __slots__ = (
        "_chained",
        "_chunked",
        "_padded",
        "_positions",
        "blocks",
        "context",
        "cu_seqlens",
        "keys",
        "max_length",
    )

    def __init__(
        self,
        *,
        cu_seqlens: Tensor,
        max_length: int,
        blocks: tuple[SequenceBlock, ...],
        keys: PrefixedKeys | None = None,
        context: RankGroup | None = None,
    ) -> None:
        self.cu_seqlens, self.max_length, self.blocks = cu_seqlens, max_length, blocks
        self.keys, self.context = keys, context
        self._padded: PaddedSequences | None = None
        self._chained: ChainedSequences | None = None
        self._chunked: PackedSequences | None = None
        self._positions: Tensor | None = None

    @property
    def num_positions(self) -> int:
        """The number of tokens of the longest sequence together with its prefix."""
        return max(block.prefix_length + block.length for block in self.blocks)

    @property
    def positions(self) -> Tensor:
        """(T,) int64, the place of each token in its sequence, after the prefix; made on first use."""
        if self._positions is None:
            parts = [
                torch.arange(block.prefix_length, block.prefix_length + block.length).repeat(
                    block.num_sequences
                )
                for block in self.blocks
            ]
            self._positions = torch.cat(parts).to(self.cu_seqlens.device, non_blocking=True)
        return self._positions

    @property
    def padded(self) -> PaddedSequences:
        """The sequences in padded batches, made on first use."""
        if self._padded is None:
            self._padded = PaddedSequences.of(self.blocks, self.cu_seqlens.device)
        return self._padded

    def chained(self, taps: int) -> ChainedSequences:
        """Returns the sequences for layers with a state, made on first use.

        Args:
            taps: taps of the layers' convolutions, the same in all of them.
        """
        if self._chained is None:
            self._chained = ChainedSequences.of(self.blocks, taps, self.cu_seqlens.device)
        return self._chained

    def in_chunks(self, size: int) -> PackedSequences:
        """Returns the sequences cut at every `size` positions, made on first use.

        A token of the result sees those before it in its own chunk. Where a prefix ends within a chunk, the
        chunk's part of it is the prefix.

        Args:
            size: positions of a chunk, the same in all layers.
        """
        if self.num_positions <= size:
            return self
        if self._chunked is None:
            chunks = [chunk for block in self.blocks for chunk in block.chunks(size)]
            self._chunked = PackedSequences.of_blocks(merged_blocks(chunks), self.cu_seqlens.device)
        return self._chunked

    def for_pass(self, context: RankGroup | None) -> PackedSequences:
        """Returns the same sequences for one pass through the model; padded batches are freed after it."""
        return PackedSequences(
            cu_seqlens=self.cu_seqlens,
            max_length=self.max_length,
            blocks=self.blocks,
            keys=self.keys,
            context=context,
        )

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device, prefixes: Sequence[int | None] = ()
    ) -> PackedSequences:
        """Makes sequences of these lengths, each at least 1, in this order.

        Args:
            prefixes: for each sequence, the index of the earlier sequence that is its prefix (and has no
                prefix itself), or None. Empty: no sequence has a prefix.
        """
        starts, prefixes = _offsets(lengths), prefixes or [None] * len(lengths)
        blocks = [
            SequenceBlock(
                start=start,
                num_sequences=1,
                length=length,
                prefix_start=0 if prefix is None else starts[prefix],
                prefix_length=0 if prefix is None else lengths[prefix],
            )
            for start, length, prefix in zip(starts, lengths, prefixes, strict=False)
        ]
        return cls.of_blocks(merged_blocks(blocks), device)

    @classmethod
    def of_blocks(cls, blocks: tuple[SequenceBlock, ...], device: torch.device) -> PackedSequences:
        """Makes the sequences of these runs, which lie one after another."""
        lengths = [block.length for block in blocks for _ in range(block.num_sequences)]
        return cls(
            cu_seqlens=torch.tensor(_offsets(lengths), dtype=torch.int32).to(device, non_blocking=True),
            max_length=max(lengths),
            blocks=blocks,
            keys=_prefixed_keys(blocks, device) if any(block.prefix_length for block in blocks) else None,
        )

    def followed_by(self, length: int) -> PackedSequences:
        """Returns the sequences with one more sequence at the end, which has no prefix."""
        start = self.blocks[-1].stop
        keys = self.keys
        if keys is not None:
            tokens = torch.arange(start, start + length, device=keys.cu_seqlens.device)
            keys = PrefixedKeys(
                tokens=keys.tokens.followed_by(tokens),
                cu_seqlens=_with_end(keys.cu_seqlens, len(keys.tokens.rows) + length),
                max_length=max(keys.max_length, length),
            )
        return PackedSequences(
            cu_seqlens=_with_end(self.cu_seqlens, start + length),
            max_length=max(self.max_length, length),
            blocks=(*self.blocks, SequenceBlock(start=start, num_sequences=1, length=length)),
            keys=keys,
        )


def _with_end(cu_seqlens: Tensor, end: int) -> Tensor:
    return torch.cat([cu_seqlens, cu_seqlens.new_full((1,), end)])


def _prefixed_keys(blocks: Sequence[SequenceBlock], device: torch.device) -> PrefixedKeys:
    tokens, lengths = [], []
    for block in blocks:
        prefix = torch.arange(block.prefix_start, block.prefix_start + block.prefix_length)
        for start in range(block.start, block.stop, block.length):
            tokens += [prefix, torch.arange(start, start + block.length)]
            lengths.append(block.prefix_length + block.length)
    return PrefixedKeys(
        tokens=RowIndex.of(torch.cat(tokens), blocks[-1].stop).to(device),
        cu_seqlens=torch.tensor(_offsets(lengths), dtype=torch.int32).to(device, non_blocking=True),
        max_length=max(lengths),
    )


def _offsets(lengths: Sequence[int]) -> list[int]:
    """Returns where each sequence begins, and where the last one ends."""
    return [0, *accumulate(lengths)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedImages:
    """The images of a micro-batch, on the model's device; equal images are stored once.

    Attributes:
        pixels: (P, width), the patches of all images.
        grids: (I, 3) int64, each image's (t, h, w) in patches.
        places: (m,), the positions in T of tokens that stand for a part of an image.
        states: (m,), index of the vision tower's state that each of these tokens takes.
    """

    pixels: Tensor
    grids: Tensor
    places: Tensor
    states: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedTeacher:
    """A served teacher's likeliest tokens, (n, K) int32, and their log-probs, (n, K) float32; on the host."""

    token_ids: Tensor
    log_probs: Tensor

    @classmethod
    def nothing(cls, num_tokens: int) -> PackedTeacher:
        """Returns a stand-in for a micro-batch without rows."""
        shape = (num_tokens, 1)
        return cls(token_ids=torch.zeros(shape, dtype=torch.int32), log_probs=torch.zeros(shape))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Tensors of one forward pass, on the model's device.

    Attributes:
        rows: place of each row in the step's batch, (B,) on the host; empty for a filler.
        input_ids: (1, T).
        position_ids: (1, T), from 0 in each prompt, continued in its responses; (3, 1, T) with images, see
            `paceline.learner.batch.images`.
        packed: places of the sequences among the tokens.
        score_positions: (n,), the positions in T that predict the response tokens; the last token of the
            prompt predicts the first token of a response.
        targets: (n,), the response tokens.
        places: (B, R), the index among the n of each entry; n on padding.
        mask: (B, R) bool, True on tokens that the policy produced.
        rollout_log_probs: (B, R) as sampled, 0 on padding.
        sources: the rows that were packed, each once, on the host; empty for a filler.
        share_prompts: whether the rows were packed with shared prompts.
        images: images of the prompts; None if there are none.
        expert_choices: (T, L, K) uint8 or int16, on the host, the engine's choices of experts; None if no row
            has any. A token whose first two are the same has none.
        teacher: a served teacher's likeliest tokens at the n response tokens, on the host; None if no row has
            any.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    packed: PackedSequences
    score_positions: Tensor
    targets: Tensor
    places: Tensor
    mask: Tensor
    rollout_log_probs: Tensor
    sources: tuple[PackedRow, ...] = ()
    share_prompts: bool = False
    images: PackedImages | None = None
    expert_choices: Tensor | None = None
    teacher: PackedTeacher | None = None

    def with_rows(self, places: Tensor) -> MicroBatch:
        """Returns the same tokens with tables for other rows; `places` may repeat."""
        return replace(
            self,
            rows=tuple(self.rows[place] for place in places.tolist()),
            places=self.places[places],
            mask=self.mask[places],
            rollout_log_probs=self.rollout_log_probs[places],
        )

    def table(self, flat: Tensor) -> Tensor:
        """Spreads (n, ...) over (B, R, ...), 0 on padding; differentiable."""
        return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[self.places]


LogProbs = dict[str, Tensor]
"""A micro-batch's log-probs by the name of their source, tables (B, R).

"rollout" is the sampler, "old" the policy before the update, others are frozen networks. Rows of the first
mini-batch need not be scored: its forward pass precedes every optimizer step, so it has the same weights and
a ratio of 1. Until then there is no "old", and all holders of the micro-batch share one mapping.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredBatch:
    """A micro-batch with its scores by the networks; tables (B, R), None where not in use."""

    batch: MicroBatch
    log_probs: LogProbs
    values: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingBatch:
    """A micro-batch ready for its updates; tables (B, R), None where not in use.

    Attributes:
        scores: each sequence's reward with the overlong penalty, (B,).
        group_ids: equal for samples of one prompt, on all ranks and in all micro-batches, (B,) int64.
        weights: rollout correction's factors of the policy loss.
        selected: the tokens that a covariance loss treats separately.
    """

    batch: MicroBatch
    log_probs: LogProbs
    values: Tensor | None
    scores: Tensor
    group_ids: Tensor
    advantages: Tensor
    returns: Tensor | None
    weights: Tensor | None = None
    selected: Tensor | None = None

    def with_rows(self, batch: MicroBatch, pick: Callable[[Tensor], Tensor]) -> TrainingBatch:
        """Returns the batch with the rows of the micro-batch `batch`; `pick` fits each table to them."""

        def picked(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: pick(table) for name, table in value.items()}
            return None if value is None else pick(value)

        tables = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "batch"}
        return TrainingBatch(batch=batch, **{name: picked(value) for name, value in tables.items()})

    def positive_mask(self, above: float) -> Tensor:
        """Returns the mask of the policy's tokens in sequences that score above `above`; False elsewhere."""
        return self.batch.mask & (self.scores > above).unsqueeze(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Denominators:
    """Counts of one mini-batch over all ranks, by which losses divide, however the rows are split."""

    num_tokens: int
    num_sequences: int
    num_positive_tokens: int = 0
    """Tokens of right responses; see actor.positive_loss_coef."""
