"""What a run works on: prompts, the position in them, and how answers are sampled."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from paceline.config.run import RunConfig
from paceline.config.validation import HeldOutSet
from paceline.core.errors import DataError
from paceline.core.samples.trajectory import RewardContext, SamplingSpec
from paceline.data.cursor import PromptCursor
from paceline.data.images import ImageReader
from paceline.data.prompts import (
    Prompt,
    PromptSet,
    encode_prompt,
    last_message,
    load_tokenizer,
    stop_token_ids,
)
from paceline.storage.models import local_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeldOutPrompts:
    """A set of held-out prompts.

    Attributes:
        prompts: no id is another set's, too.
    """

    of: HeldOutSet
    prompts: PromptSet

    def ids(self) -> list[int]:
        """The prompts that a validation asks for."""
        return self.prompts.ids()[: self.of.max_prompts]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Training and held-out prompts, the cursor over the former, and the tokens that end an answer.

    `images` makes the pixels of the prompts' images, `encode` the token ids of text or chat messages.
    """

    train: PromptSet
    val: tuple[HeldOutPrompts, ...]
    cursor: PromptCursor
    stop_token_ids: tuple[int, ...]
    images: ImageReader | None = None
    encode: Callable[[object], list[int]] | None = None

    def made_prompt(self, value: object, prompt_id: int, context: RewardContext) -> Prompt:
        """Makes a prompt of text or messages as a data file's rows are; raises DataError or ModelError."""
        assert self.encode is not None, "a run's inputs come with its tokenizer"
        return Prompt(
            prompt_id=prompt_id,
            token_ids=np.asarray(self.encode(value), dtype=np.int32),
            context=replace(context, prompt_text=last_message(value)),
            messages=() if isinstance(value, str) else tuple(value),  # type: ignore[arg-type]
        )

    @functools.cached_property
    def digest(self) -> str:
        """Of all prompts' tokens and of what their rewards need, so that a resumed run notices other data."""
        digest = hashlib.blake2b(digest_size=16)
        unnamed = next((held_out.prompts.prompts for held_out in self.val if not held_out.of.name), {})
        named = {held_out.of.name: held_out.prompts.prompts for held_out in self.val if held_out.of.name}
        for name, prompts in (("", self.train.prompts), ("", unnamed), *sorted(named.items())):
            digest.update(name.encode())
            for prompt_id, prompt in sorted(prompts.items()):
                context = json.dumps(asdict(prompt.context), sort_keys=True, default=repr)
                digest.update(f"{prompt_id}\n{context}\n".encode(errors="backslashreplace"))
                digest.update(prompt.token_ids.tobytes())
                for image in prompt.images:
                    digest.update(image.digest.encode())
            digest.update(b"\0")
        return digest.hexdigest()

    def sampling(self, config: RunConfig, temperature: float) -> SamplingSpec:
        """How answers are sampled at a temperature."""
        return SamplingSpec(
            temperature=temperature,
            max_tokens=config.data.max_response_length,
            stop_token_ids=self.stop_token_ids,
        )

    def held_out_sampling(self, of: HeldOutSet) -> SamplingSpec:
        """How the answers to a set of held-out prompts are sampled."""
        return SamplingSpec(
            temperature=of.temperature,
            max_tokens=of.max_tokens,
            top_p=of.top_p,
            top_k=of.top_k,
            stop_token_ids=self.stop_token_ids,
        )


def load_inputs(config: RunConfig) -> Inputs:
    """Reads prompts and tokenizer; raises DataError or ModelError."""
    model = local_model(config.model, "controller")
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, config.data.chat_template_kwargs)
    images = ImageReader.load(config.data, model.path)
    train = PromptSet.load(config.data, tokenizer, images=images)
    train.check_token_budget(config)
    val: list[HeldOutPrompts] = []
    for of in config.held_out_sets:
        first_id = sum(held_out.prompts.num_rows for held_out in val)
        prompts = PromptSet.load(config.data, tokenizer, held_out=of, first_id=first_id, images=images)
        val.append(HeldOutPrompts(of=of, prompts=prompts))
    for name, prompts in (("training", train), *((held_out.of.title, held_out.prompts) for held_out in val)):
        log.info("%d %s prompts, %d left out as over-long", len(prompts.prompts), name, prompts.num_filtered)
        _check_episodes(config, prompts)
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    cursor = PromptCursor(
        train.ids(), batch_size=config.data.train_batch_size, seed=seed, shuffle=config.data.shuffle
    )
    return Inputs(
        train=train,
        val=tuple(val),
        cursor=cursor,
        stop_token_ids=stop_token_ids(model.path, tokenizer),
        images=images,
        encode=lambda value: encode_prompt(tokenizer, value, "text" if isinstance(value, str) else "chat"),
    )


def _check_episodes(config: RunConfig, prompts: PromptSet) -> None:
    plain = [i for i, prompt in prompts.prompts.items() if not prompt.messages]
    if config.has_episodes and plain:
        raise DataError(
            f"row {plain[0]} has a prompt that is plain text, and episodes need chat messages: set "
            "data.prompt_format: chat, or write lists of messages"
        )
