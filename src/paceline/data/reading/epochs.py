"""Reads training prompts before a run begins, so that the launcher can turn epochs into steps."""

from __future__ import annotations

from collections.abc import Callable

from paceline.config.run import RunConfig
from paceline.data.hub import local_files
from paceline.data.reading.prompt_reader import PromptReader
from paceline.data.reading.prompt_table import KEPT_FROM
from paceline.data.rows import count_rows


def with_epochs_counted(config: RunConfig, tell: Callable[[str], None]) -> tuple[RunConfig, list[str]]:
    """Returns the configuration with trainer.total_steps, and messages for the user.

    Args:
        tell: called with a progress message every few seconds while prompts are tokenized.

    Raises:
        DataError, ModelError: prompts or tokenizer cannot be read.
        ConfigError: the run would be too short.
    """
    if config.trainer.total_epochs is None:
        return config, []
    sets = PromptReader.of(config, tell).training()
    num_prompts = sum(len(prompts.prompts) for prompts in sets.values())
    counted = config.with_epochs_counted(num_prompts)
    return counted, [words(counted, num_prompts)]


def words(config: RunConfig, num_prompts: int) -> str:
    """Says how many steps the epochs have."""
    trainer, batch = config.trainer, config.data.train_batch_size
    return (
        f"{trainer.num_steps} steps, for trainer.total_epochs={trainer.total_epochs:g}: {num_prompts} "
        f"prompts are {num_prompts // batch} steps of data.train_batch_size={batch}"
    )


def tokenize_ahead(config: RunConfig, tell: Callable[[str], None]) -> None:
    """Tokenizes large training sets, with progress in the terminal; the controller finds the cached tokens.

    Raises:
        DataError, ModelError: prompts or tokenizer cannot be read.
    """
    sets = config.data.training_sets
    if config.data.image_key is None and any(
        count_rows(local_files(of.files, "train"), KEPT_FROM) >= KEPT_FROM for of in sets
    ):
        PromptReader.of(config, tell).training()
