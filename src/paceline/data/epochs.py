"""How many steps the epochs of `trainer.total_epochs` take, which the launcher tells before a run begins."""

from __future__ import annotations

from paceline.config.run import RunConfig
from paceline.data.images import ImageReader
from paceline.data.prompts import load_tokenizer, load_training
from paceline.storage.models import local_model


def with_epochs_counted(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with trainer.total_steps, and what people should know of it.

    Raises:
        DataError, ModelError: prompts or tokenizer cannot be read.
        ConfigError: the run would be too short.
    """
    if config.trainer.total_epochs is None:
        return config, []
    model = local_model(config.model, "controller")
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, config.data.chat_template_kwargs)
    sets = load_training(config.data, tokenizer, ImageReader.load(config.data, model.path))
    num_prompts = sum(len(prompts.prompts) for prompts in sets.values())
    counted = config.with_epochs_counted(num_prompts)
    return counted, [words(counted, num_prompts)]


def words(config: RunConfig, num_prompts: int) -> str:
    """Says how many steps the epochs are."""
    trainer, batch = config.trainer, config.data.train_batch_size
    return (
        f"{trainer.num_steps} steps, for trainer.total_epochs={trainer.total_epochs:g}: {num_prompts} "
        f"prompts are {num_prompts // batch} steps of data.train_batch_size={batch}"
    )
