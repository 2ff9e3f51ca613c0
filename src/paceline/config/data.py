"""`data.*`: where prompts come from and how long they may be."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.config.base import Files, Section
from paceline.config.mixture import Curriculum, TrainSet, TrainSets, WeightsFrom
from paceline.config.validation import ValSets

_OWN_ARGUMENTS = {"conversation", "tools", "tokenize", "add_generation_prompt", "chat_template"}


class DataConfig(Section):
    """Prompts: parquet or JSONL files, one row per prompt."""

    train_files: Files = Field(
        (),
        description="Parquet or JSONL files (by suffix) with the training prompts, or names of data sets on "
        "the Hugging Face hub: ORG/NAME[@REVISION][:CONFIG[:SPLIT]]. Without train_files and train_sets, "
        "rollout.environment provides the rows, also those for validation.",
    )
    train_sets: TrainSets = Field(
        {},
        description="Instead of train_files: several sets of training prompts by name, each with its "
        "weight: {math: {files: FILE, weight: 3}, code: FILE}; docs/own-data.md.",
    )
    curriculum: Curriculum = Field(
        (),
        description="The weights of train_sets by step: [{from_step: 100, weights: {math: 1, code: 3}}]; "
        "before the first stage, the weights in train_sets apply. Or a function, path/to/file.py:function or "
        "module:function, which is called after every step; docs/own-data.md.",
    )
    order_by: str | None = Field(
        None,
        description="Column of numbers or strings: in every epoch, the rows of each set come in ascending "
        "order of its values, and shuffle only affects rows with equal values. null: no such order.",
    )
    val_files: Files = Field(
        (),
        description="Files with the held-out prompts, sampled with rollout.val. Without val_files and "
        "val_sets there is no validation.",
    )
    val_sets: ValSets = Field(
        {},
        description="Further held-out prompts by name, each set with its number of samples and sampling: "
        "{gsm8k: FILE, hard: {files: FILE, n: 8, temperature: 1}}; docs/evaluate.md.",
    )
    prompt_key: str = Field(
        "prompt", description="Column with the prompt: a string, or a list of {role, content} messages."
    )
    ground_truth_key: str = Field(
        "ground_truth",
        description="Column with the reference that the reward functions get. In this and the other keys, a "
        "dot names a field of a nested column: reward_model.ground_truth.",
    )
    data_source_key: str | None = Field(
        "data_source", description="Column that names the row's origin; null: none."
    )
    extra_keys: tuple[str, ...] = Field(
        (),
        description="Further columns that the reward functions get as keyword arguments; a function receives "
        "a column with a dot in its name through **extra.",
    )
    image_key: str | None = Field(
        None,
        description="Column with the images of a row's prompt: paths relative to the data file, bytes, or "
        "{bytes, path} as in data sets of the hub; one image or a list. For models with a vision tower.",
    )
    max_pixels: int | None = Field(
        None,
        gt=0,
        description="Images with more pixels are scaled down to this number; null: the limit of the model's "
        "image processor.",
    )
    prompt_format: Literal["auto", "chat", "text"] = Field(
        "auto",
        description="chat: through the tokenizer's chat template (a string becomes one user message); "
        "text: tokenized unchanged; auto: chat for lists of messages, text for strings.",
    )
    system_prompt: str | None = Field(
        None,
        min_length=1,
        description="System message of every prompt. With prompt_format: auto, strings then become user "
        "messages, too. A row that begins with its own system message keeps it.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Further variables for the chat template, in every turn: {enable_thinking: false}."
    )
    max_prompt_length: int = Field(512, gt=0, description="Longest prompt in tokens.")
    max_response_length: int = Field(512, gt=0, description="Longest response in tokens.")
    overlong_prompts: Literal["filter", "error"] = Field(
        "filter", description="Leave overlong prompts out (and report how many), or refuse to start."
    )
    train_batch_size: int = Field(64, gt=0, description="Prompts per step; each gets rollout.n samples.")
    train_max_prompts: int | None = Field(
        None, gt=0, description="Number of first rows of train_files to train on; null: all."
    )
    val_max_prompts: int | None = Field(
        None, gt=0, description="Number of first prompts of val_files to validate on; null: all."
    )
    shuffle: bool = Field(True, description="Shuffle the prompts in every epoch, from the seed.")
    seed: int | None = Field(None, description="Seed of the order; null: trainer.seed.")

    @property
    def training_sets(self) -> tuple[TrainSet, ...]:
        """The sets of training prompts; train_files form a single set without a name."""
        if self.train_files:
            unnamed = TrainSet(
                name="", files=self.train_files, weight=1.0, max_prompts=self.train_max_prompts
            )
            return (unnamed,)
        return tuple(
            TrainSet(name=name, files=given.files, weight=given.weight, max_prompts=given.max_prompts)
            for name, given in self.train_sets.items()
        )

    @property
    def weights_by_step(self) -> tuple[WeightsFrom, ...]:
        """The weights of the training sets, each with the step from which they apply; the first apply from
        step 1."""
        sets, stages = self.training_sets, self.curriculum
        own = WeightsFrom(step=1, weights=tuple(of.weight for of in sets))
        if isinstance(stages, str):
            return (own,)
        later = [
            WeightsFrom(step=stage.from_step, weights=tuple(stage.weights.get(of.name, 0.0) for of in sets))
            for stage in stages
        ]
        return tuple(later) if later and later[0].step == 1 else (own, *later)

    @model_validator(mode="after")
    def _of_the_sets(self) -> DataConfig:
        if self.train_sets and (self.train_files or self.train_max_prompts):
            key = "train_files" if self.train_files else "train_max_prompts"
            raise ValueError(
                f"{key} and train_sets: with train_sets each set has files and max_prompts of its own; leave "
                f"{key} out"
            )
        if self.curriculum and not self.train_sets:
            raise ValueError(
                "curriculum says how much of each set in train_sets is drawn; set train_sets, too"
            )
        if not isinstance(self.curriculum, str):
            steps = [stage.from_step for stage in self.curriculum]
            if sorted(set(steps)) != steps:
                raise ValueError(f"the stages of curriculum begin at the steps {steps}; write them in order")
            for name in (name for stage in self.curriculum for name in stage.weights):
                if name not in self.train_sets:
                    known = ", ".join(self.train_sets)
                    raise ValueError(f"curriculum has a weight for {name!r}; train_sets has {known}")
        for of_stage in self.weights_by_step:
            if self.train_sets and not any(of_stage.weights):
                raise ValueError(
                    f"all weights of train_sets are 0 from step {of_stage.step} on; give one set a weight"
                )
        return self

    @model_validator(mode="after")
    def _of_the_template(self) -> DataConfig:
        if taken := _OWN_ARGUMENTS & self.chat_template_kwargs.keys():
            raise ValueError(f"chat_template_kwargs.{min(taken)} is set by Paceline; leave it out")
        for name in ("system_prompt", "chat_template_kwargs"):
            if getattr(self, name) and self.prompt_format == "text":
                raise ValueError(f"{name} is for chat prompts, and prompt_format=text has none; write chat")
        return self
