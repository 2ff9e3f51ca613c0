"""The inputs of a run: prompts, the cursor over them, and the sampling parameters."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Sized
from dataclasses import dataclass, replace

import numpy as np

from paceline.config.run import RunConfig
from paceline.config.validation import HeldOutSet
from paceline.core.errors import DataError
from paceline.core.samples.trajectory import RewardContext, SamplingSpec
from paceline.data.images import ImageReader
from paceline.data.mixture import PromptMixture
from paceline.data.prompts import (
    Prompt,
    PromptSet,
    encode_prompt,
    last_message,
    stop_token_ids,
)
from paceline.data.reading.prompt_reader import PromptReader

log = logging.getLogger(__name__)

_MOST_SOURCES = 20
# Characters that MLflow refuses in the name of a metric.
_NO_NAME = re.compile(r"[^A-Za-z0-9_.:/ -]")


@dataclass(frozen=True, kw_only=True)
class HeldOutPrompts:
    """A set of held-out prompts.

    Attributes:
        prompts: the set's prompts; ids are unique over all sets.
    """

    of: HeldOutSet
    prompts: PromptSet

    def ids(self) -> list[int]:
        """Returns the prompts that a validation asks for."""
        return self.prompts.ids()[: self.of.max_prompts]

    def sources(self) -> dict[str, set[int]]:
        """Returns the prompts of each data source by its name; {} if metrics leave them out."""
        by_source: dict[str, set[int]] = {}
        for prompt_id in self.ids():
            context = self.prompts.prompts[prompt_id].context
            by_source.setdefault(source_name(context.data_source), set()).add(prompt_id)
        return dict(sorted(by_source.items())) if _tells_apart(by_source) else {}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Training and held-out prompts, the position in the training prompts, and the tokens that end an answer.

    `images` makes the pixels of the prompts' images, `encode` the token ids of text or chat messages.
    """

    train: PromptSet
    val: tuple[HeldOutPrompts, ...]
    cursor: PromptMixture
    stop_token_ids: tuple[int, ...]
    images: ImageReader | None = None
    encode: Callable[[object], list[int]] | None = None

    def made_prompt(self, value: object, prompt_id: int, context: RewardContext) -> Prompt:
        """Makes a prompt from text or messages, as from a data file; raises DataError or ModelError."""
        assert self.encode is not None, "a run's inputs come with its tokenizer"
        return Prompt(
            prompt_id=prompt_id,
            token_ids=np.asarray(self.encode(value), dtype=np.int32),
            context=replace(context, prompt_text=last_message(value)),
            messages=() if isinstance(value, str) else tuple(value),  # type: ignore[arg-type]
        )

    @functools.cached_property
    def sources(self) -> frozenset[str]:
        """The data sources of the training prompts, by name; empty if metrics leave them out."""
        names = frozenset(map(source_name, self.train.facts.sources))
        return names if _tells_apart(names) else frozenset()

    @functools.cached_property
    def digest(self) -> str:
        """Digest of prompts' tokens and rewards' inputs, by which a resumed run notices changed data."""
        digest = hashlib.blake2b(digest_size=16)
        unnamed = next((held_out.prompts for held_out in self.val if not held_out.of.name), None)
        named = {held_out.of.name: held_out.prompts for held_out in self.val if held_out.of.name}
        for name, prompts in (("", self.train), ("", unnamed), *sorted(named.items())):
            facts = "" if prompts is None else prompts.facts.digest
            digest.update(f"{name}\n{facts}\n".encode())
        if self.cursor.names != ("",) or self.train.ranks:
            digest.update(json.dumps([self.cursor.ranges(), self.cursor.names]).encode())
        return digest.hexdigest()

    def sampling(self, config: RunConfig, temperature: float) -> SamplingSpec:
        """Returns the sampling parameters at a temperature."""
        return SamplingSpec(
            temperature=temperature,
            max_tokens=config.data.max_response_length,
            stop_token_ids=self.stop_token_ids,
        )

    def held_out_sampling(self, of: HeldOutSet) -> SamplingSpec:
        """Returns the sampling parameters of a set of held-out prompts."""
        return SamplingSpec(
            temperature=of.temperature,
            max_tokens=of.max_tokens,
            top_p=of.top_p,
            top_k=of.top_k,
            stop_token_ids=self.stop_token_ids,
        )


def load_inputs(config: RunConfig) -> Inputs:
    """Reads prompts and tokenizer; raises DataError or ModelError."""
    reader = PromptReader.of(config)
    sets = reader.training()
    train = PromptSet.joined([*sets.values()])
    train.check_token_budget(config)
    val: list[HeldOutPrompts] = []
    for of in config.held_out_sets:
        first_id = sum(held_out.prompts.num_rows for held_out in val)
        prompts = reader.read(of, first_id=first_id)
        val.append(HeldOutPrompts(of=of, prompts=prompts))
    named = [(part.title, sets[part.name]) for part in config.data.training_sets]
    for title, prompts in (*named, *((held_out.of.title, held_out.prompts) for held_out in val)):
        log.info("%d %s prompts, %d left out as over-long", len(prompts.prompts), title, prompts.num_filtered)
        _check_episodes(config, prompts)
    return Inputs(
        train=train,
        val=tuple(val),
        cursor=PromptMixture(
            {name: prompts.ids() for name, prompts in sets.items()},
            batch_size=config.data.train_batch_size,
            seed=config.prompt_seed,
            shuffle=config.data.shuffle,
            ranks=train.ranks,
            schedule=config.data.weights_by_step,
        ),
        stop_token_ids=stop_token_ids(reader.folder, reader.tokenizer),
        images=reader.images,
        encode=lambda value: encode_prompt(
            reader.tokenizer, value, "text" if isinstance(value, str) else "chat"
        ),
    )


def source_name(source: str) -> str:
    """Returns the name of a data source in metrics."""
    return _NO_NAME.sub("_", source or "none")


def _tells_apart(sources: Sized) -> bool:
    """Returns whether metrics by source are useful: there are several sources, but not too many."""
    return 1 < len(sources) <= _MOST_SOURCES


def _check_episodes(config: RunConfig, prompts: PromptSet) -> None:
    plain = prompts.facts.first_text
    if config.has_episodes and plain is not None:
        raise DataError(
            f"row {plain} has a prompt that is plain text, and episodes need chat messages: set "
            "data.prompt_format: chat, or write lists of messages"
        )
