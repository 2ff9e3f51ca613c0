"""`sft` and `rm`: training on pairs, of an answer to a prompt or of two answers to compare."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Files, Section
from paceline.config.training.memory import Memory, MemoryConfig


class TuningConfig(Section):
    """What `paceline sft` and `paceline rm` have in common."""

    train_files: Files = Field(description="Parquet or JSONL files, or data sets of the hub, with the pairs.")
    output: str = Field(description="Folder to write the trained model to.")
    steps: int = Field(gt=0, description="Optimizer steps.")
    batch_size: int = Field(256, gt=0, description="Pairs per step.")
    max_token_len_per_gpu: int = Field(16384, gt=0, description="Token budget of a micro-batch on one rank.")
    memory: Memory = Field(MemoryConfig(), description="What the update keeps in memory; as actor.memory.")
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="Shape after the warm-up."
    )
    warmup_steps_ratio: float = Field(
        0.05, ge=0, lt=1, description="Share of the steps over which the rate rises."
    )
    weight_decay: float = Field(0.01, ge=0, description="AdamW's decoupled decay.")
    save_freq: int = Field(
        100,
        ge=0,
        description="Checkpoint every so many steps, in OUTPUT.checkpoints. The same command goes on after "
        "the newest; they are removed when the model is written. 0: none.",
    )
    val_files: Files = Field(
        (),
        description="Held-out pairs: `paceline sft` prints the loss on them at the end, `paceline rm` the "
        "accuracy.",
    )


class SftConfig(TuningConfig):
    """`paceline sft`: trains a starting model on prompt/answer pairs with the same learner."""

    answer_key: str = Field("answer", description="Column with the answer text.")


class RmConfig(TuningConfig):
    """`paceline rm`: trains a reward model on pairs of answers, by the Bradley-Terry model."""

    chosen_key: str = Field("chosen", description="Column with the better answer.")
    rejected_key: str = Field("rejected", description="Column with the worse answer.")
    margin_key: str | None = Field(
        None,
        description="Column with the number by which the better answer's score should exceed the other's "
        "(Llama 2, arXiv:2307.09288, eq. 2); null: margin for all pairs.",
    )
    margin: float = Field(0.0, ge=0, description="The margin without margin_key.")
    centring: float = Field(
        0.01,
        ge=0,
        description="Coefficient of the squared sum of a pair's scores (arXiv:2312.09244), which keeps "
        "scores around 0; 0: none.",
    )


class PairDataConfig(Section):
    """How the pairs' prompts are read."""

    prompt_key: str = Field("prompt", description="Column with the prompt.")
    prompt_format: str = Field(
        "auto",
        pattern="^(auto|chat|text)$",
        description="chat: through the tokenizer's chat template; text: tokenized as it is; auto: chat for "
        "lists of messages, text for strings. `paceline rm` reads a prompt's last message, as reward models "
        "see it in a run, always in the chat template where there is one.",
    )
    max_prompt_length: int = Field(512, gt=0, description="Longer prompts are left out, and counted.")
    max_response_length: int = Field(
        512,
        gt=0,
        description="Longer answers are left out, and counted; `paceline rm` leaves out pairs of which a "
        "prompt and answer together exceed both.",
    )
