"""Loads prompts as token ids, with the context that their scorers need."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from paceline.config.data import DataConfig
from paceline.config.mixture import TrainSet
from paceline.config.run import RunConfig
from paceline.config.validation import HeldOutSet
from paceline.core.errors import DataError, ModelError
from paceline.core.samples.trajectory import Int32Array, RewardContext
from paceline.data.hub import local_files
from paceline.data.images import ImageReader, ImageSource, expanded, with_images
from paceline.data.plain import plain_value
from paceline.data.rows import Row, rows_with_folders, value_at
from paceline.service.imports import without_collections


class Decoder(Protocol):
    """Turns the token ids of a response into its text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of token ids."""
        ...


class Tokenizer(Decoder, Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    eos_token_id: int | None
    chat_template: str | None
    all_special_tokens: list[str]

    added_tokens_decoder: Mapping[int, Any]

    def get_vocab(self) -> Mapping[str, int]:
        """Returns all tokens with their ids."""
        ...

    def get_added_vocab(self) -> Mapping[str, int]:
        """Tokens that text is searched for before it is split."""
        ...

    def __call__(self, text: str | list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Returns a mapping that has the text's token ids under "input_ids"."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: Any,
    ) -> Any:
        """The conversation as one text; `options` are the template's own, say its tools."""
        ...


def load_tokenizer(
    folder: str | Path, template_kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Tokenizer:
    """Loads the tokenizer of a model folder; nothing is fetched from a hub.

    Args:
        template_kwargs: what its chat template gets in every call, as `data.chat_template_kwargs`.

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
            # The file is complete; to look up the model's class transformers would import torch: ten seconds.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
        from transformers import AutoTokenizer

        return AutoTokenizer


def stop_token_ids(folder: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a response, from generation_config.json, config.json and the tokenizer: each once, sorted.

    Raises:
        ModelError: none of them names such an id; responses would never end.
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
    """The text of a prompt: a string, or messages in the chat template with the assistant's turn opened."""
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
    """Token ids of a prompt. A chat template adds its own special tokens; plain text gets the tokenizer's."""
    text = render_prompt(tokenizer, value, prompt_format)
    plain = prompt_format == "text" or (prompt_format == "auto" and isinstance(value, str))
    ids: list[int] = tokenizer(text, add_special_tokens=plain)["input_ids"]
    return ids


def last_message(value: object) -> str:
    """The text of a prompt's last message, which scorers see; all of a plain text."""
    content = value if isinstance(value, str) else value[-1]["content"]  # type: ignore[index]
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content)


def exchange_text(tokenizer: Tokenizer, prompt: str, answer: str) -> str:
    """A message with its answer, as reward models read them: in the chat template, if there is one."""
    if not tokenizer.chat_template:
        return prompt + answer
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))


def encode_exchange(tokenizer: Tokenizer, prompt: str, answer: str) -> list[int]:
    """Token ids of `exchange_text`; special tokens come from its template, else from the tokenizer."""
    text = exchange_text(tokenizer, prompt, answer)
    ids: list[int] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    return ids


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """Holds one row of the data files.

    `prompt_id` is its number among all rows of the training sets, or of the held-out ones, so that filtering
    changes no id.

    `messages` are what a chat prompt was rendered from; empty for plain text. `images` are in the order of
    their placeholders.
    """

    prompt_id: int
    token_ids: Int32Array
    context: RewardContext
    messages: tuple[Mapping[str, object], ...] = ()
    images: tuple[ImageSource, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The usable prompts of one set, or of several, by id.

    Attributes:
        ranks: where each comes in an epoch, by id; None: data.order_by does not say.
    """

    prompts: Mapping[int, Prompt]
    num_filtered: int
    ranks: Mapping[int, int] | None = None

    @classmethod
    def load(
        cls,
        config: DataConfig,
        tokenizer: Tokenizer,
        of: TrainSet | HeldOutSet,
        *,
        first_id: int = 0,
        images: ImageReader | None = None,
    ) -> PromptSet:
        """Reads, tokenizes and filters a set of training or held-out prompts.

        Args:
            of: the set; of a held-out one all prompts are kept, whatever its max_prompts.
            first_id: the id of the first row.
            images: reads those of `data.image_key`.

        Raises:
            DataError: a file or column is missing, a row is unusable, a prompt is too long with
                overlong_prompts=error, or no prompt is left.
        """
        is_training, what = isinstance(of, TrainSet), of.title
        required = [config.prompt_key, config.ground_truth_key, *config.extra_keys]
        required += [images.column] if images is not None else []
        required += [config.order_by] if config.order_by and is_training else []
        rows = rows_with_folders(local_files(of.files, "train" if is_training else "val"), required)
        rows = rows[: of.max_prompts] if is_training else rows
        prompts = [
            _prompt(config, tokenizer, number, row, images, folder)
            for number, (row, folder) in enumerate(rows, start=first_id)
        ]
        limit = config.max_prompt_length
        kept = {p.prompt_id: p for p in prompts if 0 < len(p.token_ids) <= limit}
        dropped = len(rows) - len(kept)
        if dropped and config.overlong_prompts == "error":
            worst = max(prompts, key=lambda p: len(p.token_ids))
            raise DataError(
                f"{dropped} of {len(rows)} {what} prompts are empty or longer than "
                f"data.max_prompt_length={limit} tokens (row {worst.prompt_id} has {len(worst.token_ids)}); "
                "raise the limit, or set data.overlong_prompts: filter"
            )
        if not kept:
            raise DataError(
                f"none of the {len(rows)} {what} prompts fits data.max_prompt_length={limit} tokens; "
                "raise the limit"
            )
        values = {n: row for n, (row, _) in enumerate(rows, start=first_id) if n in kept}
        ranks = _ranks(values, config.order_by) if config.order_by and is_training else None
        return cls(prompts=kept, num_filtered=dropped, ranks=ranks)

    @classmethod
    def joined(cls, sets: Sequence[PromptSet]) -> PromptSet:
        """Several sets, which have no id in common, as one."""
        if len(sets) == 1:
            return sets[0]
        ranks = {i: rank for part in sets for i, rank in (part.ranks or {}).items()}
        return cls(
            prompts={i: prompt for part in sets for i, prompt in part.prompts.items()},
            num_filtered=sum(part.num_filtered for part in sets),
            ranks=ranks or None,
        )

    def check_token_budget(self, config: RunConfig) -> None:
        """Whether a micro-batch holds each prompt with its images and the longest response.

        Raises:
            DataError: one is larger than `actor.ppo_max_token_len_per_gpu`.
        """
        sizes = {
            prompt_id: len(prompt.token_ids) + sum(image.num_patches for image in prompt.images)
            for prompt_id, prompt in self.prompts.items()
        }
        largest = max(sizes, key=sizes.__getitem__)
        needed = sizes[largest] + config.data.max_response_length
        if needed > config.micro_batch_tokens:
            num_tokens = len(self.prompts[largest].token_ids)
            raise DataError(
                f"row {largest}: its prompt of {num_tokens} tokens and {sizes[largest] - num_tokens} patches "
                f"of images, with a response of {config.data.max_response_length} tokens, is over "
                f"actor.ppo_max_token_len_per_gpu={config.actor.ppo_max_token_len_per_gpu}: raise it to at "
                f"least {needed}, or lower data.max_pixels"
            )

    @property
    def num_rows(self) -> int:
        """Rows that the prompts were made of."""
        return len(self.prompts) + self.num_filtered

    def ids(self) -> list[int]:
        """Returns all prompt ids in ascending order."""
        return sorted(self.prompts)


def load_training(
    config: DataConfig, tokenizer: Tokenizer, images: ImageReader | None
) -> dict[str, PromptSet]:
    """The training sets by name, with ids that go on from set to set; raises what `PromptSet.load` does."""
    sets: dict[str, PromptSet] = {}
    for part in config.training_sets:
        first_id = sum(prompts.num_rows for prompts in sets.values())
        sets[part.name] = PromptSet.load(config, tokenizer, part, first_id=first_id, images=images)
    return sets


def _ranks(rows: Mapping[int, Row], column: str) -> dict[int, int]:
    """By id, the rank of a row's value among those of all rows."""
    values = {number: _column(number, row, column) for number, row in rows.items()}
    for number, value in values.items():
        if not isinstance(value, str | int | float):
            raise DataError(
                f"row {number} has {value!r} in column {column!r}, by which data.order_by puts the rows in "
                "order; write a number or a string there"
            )
    if len({isinstance(value, str) for value in values.values()}) > 1:
        raise DataError(f"column {column!r} (data.order_by) has numbers and strings; write one of them")
    places = {value: rank for rank, value in enumerate(sorted(set(values.values())))}
    return {number: places[value] for number, value in values.items()}


def _prompt(
    config: DataConfig,
    tokenizer: Tokenizer,
    number: int,
    row: Row,
    images: ImageReader | None,
    folder: Path,
) -> Prompt:
    value, truth = _column(number, row, config.prompt_key), _column(number, row, config.ground_truth_key)
    if value is None or truth is None:
        key = config.prompt_key if value is None else config.ground_truth_key
        raise DataError(f"row {number} has no value in column {key!r}; fill it or drop the row")
    value = _with_system(value, config.system_prompt)
    sources: tuple[ImageSource, ...] = ()
    try:
        if images is None:
            token_ids = encode_prompt(tokenizer, value, config.prompt_format)
        else:
            sources = images.sources(row, folder)
            messages = with_images(_conversation(value, config.prompt_format), len(sources))
            token_ids = encode_prompt(tokenizer, messages, "chat")
            token_ids = expanded(token_ids, images.image_token_id, sources)
    except DataError as error:
        raise DataError(f"row {number}: {error}") from error
    source_key = config.data_source_key
    source = _column(number, row, source_key) if source_key else None
    context = RewardContext(
        ground_truth=str(truth),
        data_source="" if source is None else str(source),
        prompt_text=last_message(value),
        extra={key: _column(number, row, key) for key in config.extra_keys},
    )
    return Prompt(
        prompt_id=number,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        context=context,
        messages=_messages(value, config.prompt_format),
        images=sources,
    )


def _with_system(value: object, system_prompt: str | None) -> object:
    """The prompt as messages behind a system message; without one it stays as it is."""
    if system_prompt is None:
        return value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or _begins_with_system(messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _begins_with_system(messages: Sequence[object]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, dict) and first.get("role") == "system"


def _conversation(value: object, prompt_format: str) -> object:
    """A prompt as messages, where it is to be rendered as such."""
    is_chat = isinstance(value, str) and prompt_format == "chat"
    return [{"role": "user", "content": value}] if is_chat else value


def _messages(value: object, prompt_format: str) -> tuple[Mapping[str, object], ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": value},) if prompt_format == "chat" else ()
    return tuple(value) if isinstance(value, list) else ()


def _column(number: int, row: Row, key: str) -> Any:
    try:
        return plain_value(value_at(row, key))
    except DataError as error:
        raise DataError(
            f"row {number}: column {key!r} {error}; change it, or leave the column out"
        ) from error
