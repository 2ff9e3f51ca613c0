"""Checks the data: its files, its rows, the prompts that are made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.checks.preflight_check import PreflightCheck, how_to_make
from paceline.config.mixture import TrainSet
from paceline.config.run import RunConfig
from paceline.config.validation import HeldOutSet
from paceline.core.errors import DataError
from paceline.storage.models import local_model

if TYPE_CHECKING:
    from paceline.data.images import ImageReader
    from paceline.data.prompts import PromptSet, Tokenizer


def check_data_files(config: RunConfig) -> None:
    """Raises DataError if a data file is not there."""
    from paceline.data.hub import local_files

    places = [(part.files, "train", part.key) for part in config.data.training_sets]
    places += [(held_out.files, "val", held_out.key) for held_out in config.held_out_sets]
    for names, split, key in places:
        for file in local_files(names, split):
            if not file.is_file():
                raise DataError(f"data file {file} does not exist; {how_to_make(file) or f'correct {key}'}")


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
    """Reads the training prompts as the controller will; says how many it keeps, and the first."""
    from paceline.checks.example import first_prompt
    from paceline.data.epochs import words

    if asked := _asked_for(config):
        return asked
    lines, sets, batch = [], {}, config.data.train_batch_size
    for part in config.data.training_sets:
        prompts, tokenizer, reader = _load(config, part)
        sets[part.name] = prompts
        prompts.check_token_budget(config)
        shown = first_prompt(prompts, tokenizer, None if reader is None else reader.image_token_id)
        lines.append(f"{part.name}: {_facts(prompts)}" if part.name else _facts(prompts))
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
    """Reads the held-out prompts as the controller will; says of each set how many it keeps."""
    sets = config.held_out_sets
    if not sets:
        return _asked_for(config) or "none (data.val_files and data.val_sets are empty: no validation)"
    lines = []
    for held_out in sets:
        prompts, _, _ = _load(config, held_out)
        asked = min(len(prompts.prompts), held_out.max_prompts or len(prompts.prompts))
        facts = f"{_facts(prompts)}; {asked} prompts x {held_out.n} samples per validation"
        lines.append(f"{held_out.name}: {facts}" if held_out.name else facts)
    return "\n      ".join(lines)


def _asked_for(config: RunConfig) -> str:
    """Who has the rows, where that is not a file; "" where files do."""
    environment = config.rollout.environment
    if config.data.training_sets or environment is None:
        return ""
    return f"the environment at {environment.address} is asked for them by the run"


def _load(config: RunConfig, of: TrainSet | HeldOutSet) -> tuple[PromptSet, Tokenizer, ImageReader | None]:
    from paceline.data.hub import local_files
    from paceline.data.images import ImageReader
    from paceline.data.prompts import PromptSet, load_tokenizer
    from paceline.data.rows import read_rows

    data, split = config.data, "train" if isinstance(of, TrainSet) else "val"
    # Before the tokenizer: a missing file or column is reported even without a model.
    read_rows(local_files(of.files, split), [data.prompt_key, data.ground_truth_key, *data.extra_keys])
    model = local_model(config.model, "controller")
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, config.data.chat_template_kwargs)
    reader = ImageReader.load(data, model.path)
    return PromptSet.load(data, tokenizer, of, images=reader), tokenizer, reader


def _facts(prompts: PromptSet) -> str:
    longest = max(len(prompt.token_ids) for prompt in prompts.prompts.values())
    facts = f"{len(prompts.prompts)} kept, {prompts.num_filtered} left out as too long, the longest has "
    facts += f"{longest} tokens"
    if images := [image for prompt in prompts.prompts.values() for image in prompt.images]:
        most = max(image.num_tokens for image in images)
        facts += f"; {len(images)} images of at most {most} tokens"
    return facts


CHECKS = (
    PreflightCheck(name="training prompts", run=training_line),
    PreflightCheck(name="validation prompts", run=validation_line),
)
