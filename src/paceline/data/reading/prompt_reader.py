"""Reads sets of prompts from data files: tokens at once, each prompt on request."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config.data import DataConfig
from paceline.config.mixture import TrainSet
from paceline.config.run import RunConfig
from paceline.config.validation import HeldOutSet
from paceline.core.errors import DataError
from paceline.core.samples.trajectory import RewardContext
from paceline.data.hub import local_files
from paceline.data.images import ImageReader
from paceline.data.plain import plain_value
from paceline.data.prompts import (
    Prompt,
    PromptFacts,
    PromptSet,
    Tokenizer,
    encode_with_images,
    is_plain,
    last_message,
    load_tokenizer,
    render_prompt,
    scored_by,
)
from paceline.data.reading.prompt_table import (
    KEPT_FROM,
    PromptTable,
    TokenizedRow,
    keep_table,
    kept_table,
    ranked,
)
from paceline.data.rows import Row, StoredRows, value_at
from paceline.service.packages import version
from paceline.storage.models import local_model

log = logging.getLogger(__name__)

_CHUNK = 1000
_TELL_EVERY_S = 5.0
# Maximum number of prompts of a set that stay in memory.
_MADE = 8192


class StoredPrompts(Mapping[int, Prompt]):
    """The usable prompts of files, each made on request."""

    def __init__(
        self, make: Callable[[int], Prompt], kept: npt.NDArray[np.int64], first_id: int, num_rows: int
    ) -> None:
        self._ids = (kept + first_id).tolist()
        self._is_kept = np.zeros(num_rows, dtype=np.bool_)
        self._is_kept[kept] = True
        self._first_id = first_id
        # A step asks for each of its prompts several times.
        self._make = functools.lru_cache(maxsize=_MADE)(make)

    def __getitem__(self, prompt_id: int) -> Prompt:
        place = prompt_id - self._first_id
        if not 0 <= place < len(self._is_kept) or not self._is_kept[place]:
            raise KeyError(prompt_id)
        return self._make(place)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """The rows of a set that are read.

    Attributes:
        count: number of rows to read, from the first on.
    """

    files: Sequence[Path]
    stored: StoredRows
    count: int
    of: TrainSet | HeldOutSet
    first_id: int
    order_by: str | None


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Reads sets of prompts: tokenizes their rows, or uses tokens cached by an earlier run.

    Attributes:
        images: reader of the images of `data.image_key`.
        tokenizer_digest: digest of the tokenizer's files; without one, tokens are not cached.
        tell: called with a message when many rows are read, and every few seconds while they are tokenized.
    """

    data: DataConfig
    tokenizer: Tokenizer
    folder: Path = Path()
    images: ImageReader | None = None
    tokenizer_digest: str = ""
    tell: Callable[[str], None] = log.info

    @classmethod
    def of(cls, config: RunConfig, tell: Callable[[str], None] = log.info) -> PromptReader:
        """Returns the reader of a run; raises ModelError if its model has no tokenizer."""
        model = local_model(config.model, "controller")
        folder = model.tokenizer_path or model.path
        return cls(
            data=config.data,
            tokenizer=load_tokenizer(folder, config.data.chat_template_kwargs),
            folder=Path(model.path),
            images=ImageReader.load(config.data, model.path),
            tokenizer_digest=_digest_of_tokenizer(Path(folder)),
            tell=tell,
        )

    def training(self) -> dict[str, PromptSet]:
        """Returns the training sets by name; ids continue from set to set. Raises the errors of `read`."""
        sets: dict[str, PromptSet] = {}
        for part in self.data.training_sets:
            sets[part.name] = self.read(part, first_id=sum(read.num_rows for read in sets.values()))
        return sets

    def read(self, of: TrainSet | HeldOutSet, *, first_id: int = 0) -> PromptSet:
        """Reads, tokenizes and filters a set of training or held-out prompts.

        Args:
            of: the set; a held-out set keeps all prompts, whatever its max_prompts.

        Raises:
            DataError: a file or column is missing, a row is unusable, a prompt is too long with
                overlong_prompts=error, or no prompt is left.
        """
        data, is_training = self.data, isinstance(of, TrainSet)
        files = local_files(of.files, "train" if is_training else "val")
        order_by = data.order_by if is_training else None
        required = [data.prompt_key, data.ground_truth_key, *data.extra_keys]
        required += [self.images.column] if self.images is not None else []
        required += [order_by] if order_by else []
        rows = StoredRows(files, required)
        num_rows = min(len(rows), of.max_prompts or len(rows)) if is_training else len(rows)
        part = _Rows(files=files, stored=rows, count=num_rows, of=of, first_id=first_id, order_by=order_by)
        if self.images is not None:
            return self._with_images(part)
        table = self._table(part)
        kept = self._kept(table.lengths, of, first_id)

        def make(place: int) -> Prompt:
            row, _ = rows[place]
            value = _value(data, first_id + place, row)
            context = _context(data, first_id + place, row, value)
            return Prompt(
                prompt_id=first_id + place,
                token_ids=table.token_ids(place),
                context=context,
                messages=_messages(value, data.prompt_format),
            )

        ranks = None
        if table.ranks is not None:
            ranks = dict(zip((kept + first_id).tolist(), table.ranks[kept].tolist(), strict=True))
        largest = kept[np.argmax(table.lengths[kept])]
        texts = kept[table.is_text[kept]]
        return PromptSet(
            prompts=StoredPrompts(make, kept, first_id, num_rows),
            num_filtered=num_rows - len(kept),
            ranks=ranks,
            known=PromptFacts(
                digest=hashlib.blake2b(table.digest.encode() + kept.tobytes(), digest_size=16).hexdigest(),
                sources=frozenset(table.sources[place] for place in np.unique(table.source[kept])),
                first_text=first_id + int(texts[0]) if len(texts) else None,
                longest=int(table.lengths[largest]),
                largest=first_id + int(largest),
                largest_size=int(table.lengths[largest]),
            ),
        )

    def _kept(
        self, lengths: npt.NDArray[np.int64], of: TrainSet | HeldOutSet, first_id: int
    ) -> npt.NDArray[np.int64]:
        """Returns the places of the rows that fit; raises DataError if the settings refuse the others."""
        limit, what = self.data.max_prompt_length, of.title
        kept = np.flatnonzero((lengths > 0) & (lengths <= limit))
        dropped = len(lengths) - len(kept)
        if dropped and self.data.overlong_prompts == "error":
            worst = int(np.argmax(lengths))
            raise DataError(
                f"{dropped} of {len(lengths)} {what} prompts are empty or longer than "
                f"data.max_prompt_length={limit} tokens (row {first_id + worst} has {lengths[worst]}); "
                "raise the limit, or set data.overlong_prompts: filter"
            )
        if not len(kept):
            raise DataError(
                f"none of the {len(lengths)} {what} prompts fits data.max_prompt_length={limit} tokens; "
                "raise the limit"
            )
        return kept

    # --- tokens

    def _table(self, part: _Rows) -> PromptTable:
        """Returns the tokens of the rows, from the cache if they are there."""
        is_large = part.count >= KEPT_FROM and bool(self.tokenizer_digest)
        key = self._key(part) if is_large else ""
        if is_large:
            self.tell(f"reading {part.count} {part.of.title} prompts")
            table = kept_table(key)
            if table is not None:
                return table
        table = PromptTable.of(self._tokenized(part))
        if is_large:
            keep_table(key, table)
        return table

    def _tokenized(self, part: _Rows) -> Iterator[TokenizedRow]:
        data, told = self.data, time.monotonic()
        for start in range(0, part.count, _CHUNK):
            stored = part.stored[start : min(start + _CHUNK, part.count)]
            numbered = list(enumerate(stored, start=part.first_id + start))
            values = [_value(data, number, row) for number, (row, _) in numbered]
            encoded = self._encoded(part.first_id + start, values)
            for (number, (row, _)), value, token_ids in zip(numbered, values, encoded, strict=True):
                context = _context(data, number, row, value)
                yield TokenizedRow(
                    token_ids=token_ids,
                    is_text=not _messages(value, data.prompt_format),
                    source=context.data_source,
                    order=_order(number, row, part.order_by) if part.order_by else None,
                    scored_by=scored_by(context),
                )
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                self.tell(f"tokenized {start + len(numbered)} of {part.count} {part.of.title} prompts")

    def _encoded(self, first: int, values: Sequence[object]) -> list[Sequence[int]]:
        """Returns token ids as `encode_prompt` does; `first` is the number of the first row."""
        texts = []
        for number, value in enumerate(values, start=first):
            try:
                texts.append(render_prompt(self.tokenizer, value, self.data.prompt_format))
            except DataError as error:
                raise DataError(f"row {number}: {error}") from error
        plain = [is_plain(value, self.data.prompt_format) for value in values]
        encoded: list[Sequence[int]] = [()] * len(texts)
        for special in set(plain):
            places = [place for place, own in enumerate(plain) if own is special]
            chosen = [texts[place] for place in places]
            ids = self.tokenizer(chosen, add_special_tokens=special)["input_ids"]
            for place, token_ids in zip(places, ids, strict=True):
                encoded[place] = token_ids
        return encoded

    def _key(self, part: _Rows) -> str:
        """Returns a digest of everything that determines the rows' tokens, including this program."""
        data = self.data
        parts = [
            self.tokenizer_digest,
            self.tokenizer.chat_template,
            *(version(name) for name in ("paceline", "transformers", "tokenizers", "jinja2")),
            [_digest_of([file]) for file in sorted(Path(__file__).parent.parent.rglob("*.py"))],
            [[file.suffix, _digest_of([file])] for file in part.files],
            part.count,
            part.order_by,
            [data.prompt_key, data.ground_truth_key, data.data_source_key, data.extra_keys],
            [data.prompt_format, data.system_prompt, data.chat_template_kwargs],
        ]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    # --- images

    def _with_images(self, part: _Rows) -> PromptSet:
        """Makes all prompts at once, because each image is opened when the run starts."""
        made = [
            self._with_its_images(number, row, folder)
            for number, (row, folder) in enumerate(part.stored[: part.count], start=part.first_id)
        ]
        lengths = np.asarray([len(prompt.token_ids) for prompt in made])
        kept, ranks = self._kept(lengths, part.of, part.first_id), None
        if part.order_by:
            orders = [
                _order(part.first_id + place, part.stored[place][0], part.order_by) for place in kept.tolist()
            ]
            ranks = dict(zip((kept + part.first_id).tolist(), ranked(orders)[1].tolist(), strict=True))
        prompts = {made[place].prompt_id: made[place] for place in kept.tolist()}
        return PromptSet(prompts=prompts, num_filtered=part.count - len(kept), ranks=ranks)

    def _with_its_images(self, number: int, row: Row, folder: Path) -> Prompt:
        assert self.images is not None
        data, value = self.data, _value(self.data, number, row)
        try:
            token_ids, sources = encode_with_images(
                self.tokenizer, value, data.prompt_format, row, folder, self.images
            )
        except DataError as error:
            raise DataError(f"row {number}: {error}") from error
        return Prompt(
            prompt_id=number,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            context=_context(data, number, row, value),
            messages=_messages(value, data.prompt_format),
            images=sources,
        )


def _value(config: DataConfig, number: int, row: Row) -> object:
    """Returns a row's prompt with the system prompt; raises DataError if the row is unusable."""
    value, truth = _column(number, row, config.prompt_key), _column(number, row, config.ground_truth_key)
    if value is None or truth is None:
        key = config.prompt_key if value is None else config.ground_truth_key
        raise DataError(f"row {number} has no value in column {key!r}; fill it or drop the row")
    return _with_system(value, config.system_prompt)


def _context(config: DataConfig, number: int, row: Row, value: object) -> RewardContext:
    """Returns the context for the scorers of a row whose prompt is `value`."""
    source_key = config.data_source_key
    source = _column(number, row, source_key) if source_key else None
    return RewardContext(
        ground_truth=str(_column(number, row, config.ground_truth_key)),
        data_source="" if source is None else str(source),
        prompt_text=last_message(value),
        extra={key: _column(number, row, key) for key in config.extra_keys},
    )


def _order(number: int, row: Row, column: str) -> str | float:
    value = _column(number, row, column)
    if isinstance(value, str | int | float):
        return value
    raise DataError(
        f"row {number} has {value!r} in column {column!r}, by which data.order_by puts the rows in order; "
        "write a number or a string there"
    )


def _digest_of_tokenizer(folder: Path) -> str:
    return _digest_of(sorted(file for file in folder.iterdir() if file.is_file() and _is_part(file.name)))


def _is_part(name: str) -> bool:
    begins = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")
    return name.startswith(begins) or name.endswith((".model", ".tiktoken"))


def _digest_of(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "blake2b").digest())
    return digest.hexdigest()


def _with_system(value: object, system_prompt: str | None) -> object:
    """Puts the system message, if there is one, before the prompt's messages."""
    if system_prompt is None:
        return value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or _begins_with_system(messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _begins_with_system(messages: Sequence[object]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, dict) and first.get("role") == "system"


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
