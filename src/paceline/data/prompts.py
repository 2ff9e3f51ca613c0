"""Loads prompts as token ids, with the context that their scorers need."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

from paceline.config.run import RunConfig
from paceline.core.errors import DataError, ModelError
from paceline.core.samples.trajectory import Int32Array, RewardContext
from paceline.data.images import ImageReader, ImageSource, expanded, with_images
from paceline.data.rows import Row
from paceline.service.imports import without_collections

TokenIds = Sequence[int] | Int32Array
"""Token ids as a decoder takes them."""


class Decoder(Protocol):
    """Turns the token ids of a response into its text."""

    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool) -> str:
        """Returns the text of token ids."""


class Tokenizer(Decoder, Protocol):
    """The part of a Hugging Face tokenizer that Paceline uses."""

    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: str | None
    all_special_tokens: list[str]

    added_tokens_decoder: Mapping[int, Any]

    def get_vocab(self) -> Mapping[str, int]:
        """Returns all tokens with their ids."""

    def get_added_vocab(self) -> Mapping[str, int]:
        """Returns the tokens that are matched before text is split."""

    def __call__(self, text: str | list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Returns a mapping that has the text's token ids under "input_ids"."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: Any,
    ) -> Any:
        """Renders a conversation as one text; `options` go to the template, for example its tools."""


def load_tokenizer(
    folder: str | Path, template_kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Tokenizer:
    """Loads the tokenizer of a model folder, without a download.

    Args:
        template_kwargs: arguments of every call of its chat template, as in `data.chat_template_kwargs`.

    Raises:
        ModelError: the folder is missing or holds no tokenizer.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(
            f"model folder {path} does not exist; set model.path (or model.tokenizer_path) to a folder in "
            "the Hugging Face layout"
        )
    if not any(
        (path / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    ):
        raise ModelError(
            f"model folder {path} has no tokenizer (tokenizer.json); save one there, or set "
            "model.tokenizer_path"
        )
    try:
        tokenizer: Tokenizer = _tokenizer_class(path).from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer in {path} does not load: {error}") from error
    if template_kwargs:
        render = functools.partial(tokenizer.apply_chat_template, **template_kwargs)
        tokenizer.apply_chat_template = render  # type: ignore[method-assign]
    return tokenizer


def _tokenizer_class(path: Path) -> Any:
    with without_collections():
        if (path / "tokenizer.json").is_file():
            # The file suffices; looking up the model's class would import torch, which takes ten seconds.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
        from transformers import AutoTokenizer

        return AutoTokenizer


def stop_token_ids(folder: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the sorted ids that end a response, from generation_config.json, config.json and the tokenizer.

    Raises:
        ModelError: none of them names such an id, so responses would never end.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        if file.is_file():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ModelError(
            f"{folder} names no end-of-sequence token; set eos_token_id in generation_config.json"
        )
    return tuple(sorted(ids))


def render_prompt(tokenizer: Tokenizer, value: object, prompt_format: str) -> str:
    """Returns a prompt's text: a string, or messages in the chat template up to the assistant's turn."""
    is_text = isinstance(value, str)
    if prompt_format == "text" or (prompt_format == "auto" and is_text):
        if not is_text:
            raise DataError(
                f"a prompt is a {type(value).__name__}, but data.prompt_format is text; "
                "use chat for lists of messages"
            )
        return str(value)
    messages = [{"role": "user", "content": value}] if is_text else value
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    ):
        raise DataError("a prompt must be a string or a list of {role, content} messages")
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template, but the prompts are chat messages; set data.prompt_format: "
            "text or add a template"
        )
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def encode_prompt(tokenizer: Tokenizer, value: object, prompt_format: str) -> list[int]:
    """Returns a prompt's token ids; special tokens come from the chat template, or else the tokenizer."""
    text = render_prompt(tokenizer, value, prompt_format)
    ids: list[int] = tokenizer(text, add_special_tokens=is_plain(value, prompt_format))["input_ids"]
    return ids


def encode_with_images(
    tokenizer: Tokenizer, value: object, prompt_format: str, row: Row, folder: Path, images: ImageReader
) -> tuple[list[int], tuple[ImageSource, ...]]:
    """Returns a row's prompt as token ids, and its images, each of which has a token per part of it.

    Args:
        value: the prompt.
        folder: folder of the row's file.

    Raises:
        DataError: the prompt is no chat, an image is missing, or the prompt has another number of places.
    """
    is_chat = isinstance(value, str) and prompt_format == "chat"
    messages = [{"role": "user", "content": value}] if is_chat else value
    sources = images.sources(row, folder)
    ids = encode_prompt(tokenizer, with_images(messages, len(sources)), "chat")
    return expanded(ids, images.image_token_id, sources), sources


def is_plain(value: object, prompt_format: str) -> bool:
    """Returns whether a prompt is tokenized without a chat template."""
    return prompt_format == "text" or (prompt_format == "auto" and isinstance(value, str))


def last_message(value: object) -> str:
    """Returns the text of a prompt's last message, or a plain-text prompt itself, for scorers."""
    content = value if isinstance(value, str) else value[-1]["content"]  # type: ignore[index]
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content)


def exchange_text(tokenizer: Tokenizer, prompt: str, answer: str) -> str:
    """Returns a message and its answer as text for a reward model, in the chat template if there is one."""
    if not tokenizer.chat_template:
        return prompt + answer
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))


def encode_exchange(tokenizer: Tokenizer, prompt: str, answer: str) -> list[int]:
    """Returns the token ids of `exchange_text`; special tokens come from its template, else the tokenizer."""
    text = exchange_text(tokenizer, prompt, answer)
    ids: list[int] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    return ids


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """Holds one row of the data files.

    `prompt_id` is its number among all rows of the training sets, or of the held-out sets, so that filtering
    changes no id.

    `messages` are the messages of a chat prompt; empty for plain text. `images` are in the order of
    their placeholders.
    """

    prompt_id: int
    token_ids: Int32Array
    context: RewardContext
    messages: tuple[Mapping[str, object], ...] = ()
    images: tuple[ImageSource, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFacts:
    """Facts about all prompts of a set.

    Attributes:
        digest: digest of their tokens and of the data that their scorers need.
        sources: their data sources; "" for none.
        first_text: id of the first plain-text prompt; None without one.
        longest: number of tokens of the longest prompt.
        largest: id of the largest prompt, images included.
        largest_size: number of tokens and patches of the largest prompt.
    """

    digest: str
    sources: frozenset[str]
    first_text: int | None
    longest: int
    largest: int
    largest_size: int

    @classmethod
    def of(cls, prompts: Mapping[int, Prompt]) -> PromptFacts:
        """Collects the facts from each prompt."""
        digest = hashlib.blake2b(digest_size=16)
        sizes = {}
        for prompt_id, prompt in sorted(prompts.items()):
            digest.update(f"{prompt_id}\n{scored_by(prompt.context)}\n".encode(errors="backslashreplace"))
            digest.update(prompt.token_ids.tobytes())
            for image in prompt.images:
                digest.update(image.digest.encode())
            sizes[prompt_id] = len(prompt.token_ids) + sum(image.num_patches for image in prompt.images)
        largest = max(sizes, key=sizes.__getitem__)
        return cls(
            digest=digest.hexdigest(),
            sources=frozenset(prompt.context.data_source for prompt in prompts.values()),
            first_text=next((i for i, prompt in prompts.items() if not prompt.messages), None),
            longest=max(len(prompt.token_ids) for prompt in prompts.values()),
            largest=largest,
            largest_size=sizes[largest],
        )


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The usable prompts of one or several sets, by id.

    Attributes:
        ranks: rank of each prompt in an epoch, by id; None without data.order_by.
        known: the facts of all prompts, if known without reading each.
    """

    prompts: Mapping[int, Prompt]
    num_filtered: int
    ranks: Mapping[int, int] | None = None
    known: PromptFacts | None = None

    @functools.cached_property
    def facts(self) -> PromptFacts:
        """Facts about all prompts of the set."""
        return PromptFacts.of(self.prompts) if self.known is None else self.known

    @classmethod
    def joined(cls, sets: Sequence[PromptSet]) -> PromptSet:
        """Joins several sets, which share no id, into one."""
        if len(sets) == 1:
            return sets[0]
        facts = [part.facts for part in sets]
        largest = max(facts, key=lambda of: of.largest_size)
        ranks = {i: rank for part in sets for i, rank in (part.ranks or {}).items()}
        return cls(
            prompts=ChainMap(*(cast(dict[int, Prompt], part.prompts) for part in reversed(sets))),
            num_filtered=sum(part.num_filtered for part in sets),
            ranks=ranks or None,
            known=PromptFacts(
                digest=" ".join(of.digest for of in facts),
                sources=frozenset().union(*(of.sources for of in facts)),
                first_text=next((of.first_text for of in facts if of.first_text is not None), None),
                longest=max(of.longest for of in facts),
                largest=largest.largest,
                largest_size=largest.largest_size,
            ),
        )

    def check_token_budget(self, config: RunConfig) -> None:
        """Checks that each prompt, with its images and the longest response, fits in a micro-batch.

        Raises:
            DataError: a prompt needs more than `actor.ppo_max_token_len_per_gpu`.
        """
        largest, size = self.facts.largest, self.facts.largest_size
        needed = size + config.data.max_response_length
        if needed > config.micro_batch_tokens:
            num_tokens = len(self.prompts[largest].token_ids)
            raise DataError(
                f"row {largest}: its prompt of {num_tokens} tokens and {size - num_tokens} patches "
                f"of images, with a response of {config.data.max_response_length} tokens, is over "
                f"actor.ppo_max_token_len_per_gpu={config.actor.ppo_max_token_len_per_gpu}: raise it to at "
                f"least {needed}, or lower data.max_pixels"
            )

    @property
    def num_rows(self) -> int:
        """Number of rows from which the prompts were made."""
        return len(self.prompts) + self.num_filtered

    def ids(self) -> list[int]:
        """Returns all prompt ids in ascending order."""
        return sorted(self.prompts)


def scored_by(context: RewardContext) -> str:
    """Returns, as text, the data that a prompt's scorers need."""
    return json.dumps(asdict(context), sort_keys=True, default=repr)
