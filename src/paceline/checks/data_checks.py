"""Checks the data: files, rows, and the prompts that they contain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.checks.preflight_check import PreflightCheck
from paceline.config.mixture import TrainSet
from paceline.config.run import RunConfig
from paceline.config.validation import HeldOutSet
from paceline.core.errors import DataError
from paceline.storage.demo_inputs import how_to_make

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.data.images import ImageReader
    from paceline.data.prompts import PromptSet, Tokenizer


def check_data_files(config: RunConfig) -> None:
    """Raises DataError if a data file is not there."""
    parts: list[TrainSet | HeldOutSet] = [*config.data.training_sets, *config.held_out_sets]
    for part in parts:
        _files(part)


def _files(of: TrainSet | HeldOutSet) -> list[Path]:
    from paceline.data.hub import local_files

    files = local_files(of.files, "train" if isinstance(of, TrainSet) else "val")
    for file in files:
        if not file.is_file():
            raise DataError(f"data file {file} does not exist; {how_to_make(file) or f'correct {of.key}'}")
    return files


def first_prompt_is_text(config: RunConfig) -> bool:
    """Returns whether the first row's prompt is a string, not messages."""
    from paceline.data.hub import local_files
    from paceline.data.rows import first_row, value_at

    try:
        files = local_files(config.data.training_sets[0].files[:1], "train")
        return isinstance(value_at(first_row(files[0]), config.data.prompt_key), str)
    except (DataError, IndexError):
        return False  # the controller says what is wrong with it


def training_line(config: RunConfig) -> str:
    """Reads the training prompts as the controller will; shows the first, and how many are kept."""
    from paceline.checks.example import first_prompt
    from paceline.data.reading.epochs import words

    if asked := _asked_for(config):
        return asked
    lines, sets, batch = [], {}, config.data.train_batch_size
    for part in config.data.training_sets:
        prompts, tokenizer, reader = _load(config, part)
        sets[part.name] = prompts
        prompts.check_token_budget(config)
        shown = first_prompt(prompts, tokenizer, None if reader is None else reader.image_token_id)
        lines.append(f"{part.name}: {_facts(prompts, reader)}" if part.name else _facts(prompts, reader))
        lines.append(f"the first: {shown}")
    kept = sum(len(prompts.prompts) for prompts in sets.values())
    if kept < batch:
        raise DataError(
            f"{kept} training prompts do not fill one batch of data.train_batch_size={batch}; lower it, and "
            "actor.ppo_mini_batch_size with it, or add prompts"
        )
    if config.trainer.total_epochs is not None:
        lines.append(words(config.with_epochs_counted(kept), kept))
    return "\n      ".join(lines)


def validation_line(config: RunConfig) -> str:
    """Reads the held-out prompts as the controller will; says how many each set keeps."""
    sets = config.held_out_sets
    if not sets:
        return _asked_for(config) or "none (data.val_files and data.val_sets are empty: no validation)"
    lines = []
    for held_out in sets:
        prompts, _, reader = _load(config, held_out)
        asked = min(len(prompts.prompts), held_out.max_prompts or len(prompts.prompts))
        facts = f"{_facts(prompts, reader)}; {asked} prompts x {held_out.n} samples per validation"
        lines.append(f"{held_out.name}: {facts}" if held_out.name else facts)
    return "\n      ".join(lines)


def _asked_for(config: RunConfig) -> str:
    """Returns words about the environment that supplies the rows; "" if files do."""
    environment = config.rollout.environment
    if config.data.training_sets or environment is None:
        return ""
    return f"the run asks the environment at {environment.address} for them"


def _load(config: RunConfig, of: TrainSet | HeldOutSet) -> tuple[PromptSet, Tokenizer, ImageReader | None]:
    from paceline.data.reading.prompt_reader import PromptReader
    from paceline.data.rows import StoredRows

    data = config.data
    # Before the tokenizer: a missing file or column is reported even without a model.
    required = [data.prompt_key, data.ground_truth_key, *data.extra_keys]
    StoredRows(_files(of), required)[:1]
    reader = PromptReader.of(config)
    return reader.read(of), reader.tokenizer, reader.images


def _facts(prompts: PromptSet, reader: ImageReader | None) -> str:
    facts = f"{len(prompts.prompts)} kept, {prompts.num_filtered} left out as too long, the longest has "
    facts += f"{prompts.facts.longest} tokens"
    with_images = () if reader is None else prompts.prompts.values()
    if images := [image for prompt in with_images for image in prompt.images]:
        most = max(image.num_tokens for image in images)
        facts += f"; {len(images)} images of at most {most} tokens"
    return facts


CHECKS = (
    PreflightCheck(name="training prompts", run=training_line),
    PreflightCheck(name="validation prompts", run=validation_line),
)
