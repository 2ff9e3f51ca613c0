"""Checks the data: its files, its rows, the prompts that are made of them."""

from __future__ import annotations

from functools import partial

from paceline.checks.preflight_check import PreflightCheck, how_to_make
from paceline.config.run import RunConfig
from paceline.core.errors import DataError
from paceline.storage.models import local_model


def check_data_files(config: RunConfig) -> None:
    """Raises DataError if a data file is not there."""
    from paceline.data.hub import local_files

    data = config.data
    for file in (*local_files(data.train_files, "train"), *local_files(data.val_files, "val")):
        if not file.is_file():
            remedy = how_to_make(file) or "correct data.train_files or data.val_files"
            raise DataError(f"data file {file} does not exist; {remedy}")


def first_prompt_is_text(config: RunConfig) -> bool:
    """Returns whether the first row's prompt is a string, not messages."""
    from paceline.data.hub import local_files
    from paceline.data.rows import first_row, value_at

    try:
        files = local_files(config.data.train_files[:1], "train")
        return isinstance(value_at(first_row(files[0]), config.data.prompt_key), str)
    except (DataError, IndexError):
        return False  # the controller says what is wrong with it


def prompts_line(config: RunConfig, split: str) -> str:
    """Reads a split's prompts as the controller will; says how many it keeps, and the first."""
    from paceline.checks.example import first_prompt
    from paceline.data.hub import local_files
    from paceline.data.images import ImageReader
    from paceline.data.prompts import PromptSet, load_tokenizer
    from paceline.data.rows import read_rows

    data = config.data
    files = data.train_files if split == "train" else data.val_files
    if not files and not data.train_files and config.rollout.environment is not None:
        return f"the environment at {config.rollout.environment.address} is asked for them by the run"
    if split == "val" and not files:
        return "none (data.val_files is empty: no validation)"
    # Before the tokenizer: a missing file or column is reported even without a model.
    read_rows(local_files(files, split), [data.prompt_key, data.ground_truth_key, *data.extra_keys])
    model = local_model(config.model, "controller")
    tokenizer = load_tokenizer(model.tokenizer_path or model.path)
    reader = ImageReader.load(data, model.path)
    prompts = PromptSet.load(data, tokenizer, split=split, images=reader)
    kept, batch = len(prompts.prompts), data.train_batch_size
    if split == "train" and kept < batch:
        raise DataError(
            f"{kept} training prompts do not fill one batch of data.train_batch_size={batch}; lower it, and "
            "actor.ppo_mini_batch_size with it, or add prompts"
        )
    if split == "train":
        prompts.check_token_budget(config)
    longest = max(len(prompt.token_ids) for prompt in prompts.prompts.values())
    facts = f"{kept} kept, {prompts.num_filtered} left out as too long, the longest has {longest} tokens"
    if images := [image for prompt in prompts.prompts.values() for image in prompt.images]:
        most = max(image.num_tokens for image in images)
        facts += f"; {len(images)} images of at most {most} tokens"
    if split == "val":
        return facts
    shown = first_prompt(prompts, tokenizer, None if reader is None else reader.image_token_id)
    return f"{facts}\n      the first: {shown}"


CHECKS = (
    PreflightCheck(name="training prompts", run=partial(prompts_line, split="train")),
    PreflightCheck(name="validation prompts", run=partial(prompts_line, split="val")),
)
