"""`data.*`: where prompts come from and how long they may be."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.config.base import Files, Section
from paceline.config.validation import ValSets

_OWN_ARGUMENTS = {"conversation", "tools", "tokenize", "add_generation_prompt", "chat_template"}


class DataConfig(Section):
    """Prompts: parquet or JSONL files, one row per prompt."""

    train_files: Files = Field(
        (),
        description="Parquet or JSONL files (by suffix) with the training prompts, or names of data sets on "
        "the Hugging Face hub: ORG/NAME[@REVISION][:CONFIG[:SPLIT]]. Empty: rollout.environment has the "
        "rows, those for validation too.",
    )
    val_files: Files = Field(
        (),
        description="Files with the held-out prompts, answered as rollout.val says; with neither these nor "
        "val_sets there is no validation.",
    )
    val_sets: ValSets = Field(
        {},
        description="Further held-out prompts by name, each with how often and how they are answered: "
        "{gsm8k: FILE, hard: {files: FILE, n: 8, temperature: 1}}; docs/evaluate.md.",
    )
    prompt_key: str = Field(
        "prompt", description="Column with the prompt: a string, or a list of {role, content} messages."
    )
    ground_truth_key: str = Field(
        "ground_truth",
        description="Column with what the reward compares to. Here and in the other keys a dot leads into a "
        "nested column: reward_model.ground_truth.",
    )
    data_source_key: str | None = Field(
        "data_source", description="Column that names the row's origin; null: none."
    )
    extra_keys: tuple[str, ...] = Field(
        (),
        description="Further columns that are handed to the reward functions by name; one with a dot in its "
        "name comes in **extra.",
    )
    image_key: str | None = Field(
        None,
        description="Column with the images of a row's prompt: paths relative to the data file, bytes, or "
        "{bytes, path} as data sets of the hub have them; one, or a list. For models with a vision tower.",
    )
    max_pixels: int | None = Field(
        None,
        gt=0,
        description="Larger images are made smaller than that; null: as the model's image processor does.",
    )
    prompt_format: Literal["auto", "chat", "text"] = Field(
        "auto",
        description="chat: through the tokenizer's chat template (a string becomes one user message); "
        "text: tokenized as it is; auto: chat for lists of messages, text for strings.",
    )
    system_prompt: str | None = Field(
        None,
        min_length=1,
        description="System message of every prompt, strings under prompt_format: auto included, which are "
        "user messages then. A row that begins with a system message of its own keeps that.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="What the chat template gets beside the messages, in every turn: "
        "{enable_thinking: false}.",
    )
    max_prompt_length: int = Field(512, gt=0, description="Longest prompt in tokens.")
    max_response_length: int = Field(512, gt=0, description="Longest response in tokens.")
    overlong_prompts: Literal["filter", "error"] = Field(
        "filter", description="Leave over-long prompts out (and say how many), or refuse to start."
    )
    train_batch_size: int = Field(64, gt=0, description="Prompts per step; each gets rollout.n samples.")
    train_max_prompts: int | None = Field(
        None, gt=0, description="Train on the first so many rows of train_files; null: on all."
    )
    val_max_prompts: int | None = Field(
        None, gt=0, description="Validate on the first so many prompts of val_files; null: on all."
    )
    shuffle: bool = Field(True, description="Shuffle the prompts in every epoch, from the seed.")
    seed: int | None = Field(None, description="Seed of the order; null: trainer.seed.")

    @model_validator(mode="after")
    def _of_the_template(self) -> DataConfig:
        if taken := _OWN_ARGUMENTS & self.chat_template_kwargs.keys():
            raise ValueError(f"chat_template_kwargs.{min(taken)} is set by Paceline; leave it out")
        for name in ("system_prompt", "chat_template_kwargs"):
            if getattr(self, name) and self.prompt_format == "text":
                raise ValueError(f"{name} is for chat prompts, and prompt_format=text has none; write chat")
        return self
