"""`sft`, `rm` and `dpo`: training on pairs of prompt and answer, or of a better and a worse answer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Files, Section
from paceline.config.training.memory import Memory, MemoryConfig


class TuningConfig(Section):
    """What `paceline sft`, `paceline rm` and `paceline dpo` have in common."""

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
        description="Steps between checkpoints, which go to OUTPUT.checkpoints. The same command, started "
        "again, goes on from the newest; all are removed when the model is written. 0: none.",
    )
    val_files: Files = Field(
        (),
        description="Held-out pairs. At the end, `paceline sft` prints the loss on them; `paceline rm` and "
        "`paceline dpo` print the accuracy.",
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
        description="Column with each pair's margin, by which the better answer's score should exceed the "
        "other's (Llama 2, arXiv:2307.09288, eq. 2); null: rm.margin for all pairs.",
    )
    margin: float = Field(0.0, ge=0, description="The margin of all pairs if margin_key is not set.")
    centring: float = Field(
        0.01,
        ge=0,
        description="Coefficient of the squared sum of a pair's scores (arXiv:2312.09244), which keeps "
        "scores around 0; 0: none.",
    )


class DpoConfig(TuningConfig):
    """`paceline dpo`: trains a policy on pairs of answers; it needs no reward and no sampling."""

    chosen_key: str = Field(
        "chosen",
        description="Column with the better answer: text, or a list of messages that ends with the answer.",
    )
    rejected_key: str = Field("rejected", description="Column with the worse answer.")
    loss: Literal["dpo", "ipo", "simpo", "kto"] = Field(
        "dpo",
        description="dpo (arXiv:2305.18290); ipo (arXiv:2310.12036), on means over tokens; simpo "
        "(arXiv:2405.14734), without a reference; kto (arXiv:2402.01306), which takes each answer by itself.",
    )
    beta: float | None = Field(
        None,
        gt=0,
        description="How strongly the policy is kept close to the starting model; simpo: the factor of the "
        "difference of the log-probs. null: 0.1, for simpo 2.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="dpo: assumed share of pairs whose better and worse answer are swapped.",
    )
    gamma: float = Field(0.5, ge=0, description="simpo: the target margin.")
    sft_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient with which the mean negative log-prob per token of the better answers is "
        "added to the loss (RPO, arXiv:2404.19733).",
    )
    lr: float = Field(1e-6, gt=0, description="Peak learning rate; adapters need about ten times as much.")
    batch_size: int = Field(64, gt=0, description="Pairs per step.")

    @property
    def strength(self) -> float:
        """The beta in force: the configured one, or the loss's default."""
        if self.beta is not None:
            return self.beta
        return 2.0 if self.loss == "simpo" else 0.1

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        for name, loss in (("label_smoothing", "dpo"), ("gamma", "simpo")):
            if self.loss != loss and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"dpo.{name} is an option of dpo.loss: {loss}; leave it out")
        return self


class PairDataConfig(Section):
    """How the pairs' prompts are read."""

    prompt_key: str = Field("prompt", description="Column with the prompt.")
    prompt_format: str = Field(
        "auto",
        pattern="^(auto|chat|text)$",
        description="chat: through the tokenizer's chat template; text: tokenized unchanged; auto: chat for "
        "lists of messages, text for strings. `paceline rm` reads only a prompt's last message, which is "
        "what reward models get in a run, and always uses the chat template if there is one.",
    )
    image_key: str | None = Field(
        None,
        description="Column with the images of a row's prompt, as data.image_key of a run; only for "
        "`paceline sft`.",
    )
    max_pixels: int | None = Field(
        None,
        gt=0,
        description="Images with more pixels are scaled down to this number; null: the limit of the model's "
        "image processor.",
    )
    max_prompt_length: int = Field(512, gt=0, description="Longer prompts are left out, and counted.")
    max_response_length: int = Field(
        512,
        gt=0,
        description="Longer answers are left out, and counted; `paceline rm` leaves out a pair if the prompt "
        "and one answer together exceed the sum of both limits.",
    )
