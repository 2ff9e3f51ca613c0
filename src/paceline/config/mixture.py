"""Which training prompts a step draws from several sets: `data.train_sets` and `data.curriculum`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from paceline.config.base import Files, Section, own_path
from paceline.config.validation import files_alone, set_name


class TrainSetConfig(Section):
    """A named set of training prompts."""

    files: Files = Field(
        description="The set's files, written as in data.train_files; columns and limits are those of data."
    )
    weight: float = Field(
        1.0,
        ge=0,
        description="The set's share of each step's prompts is its weight divided by the sum of all weights; "
        "its number of rows does not matter. 0: none, until data.curriculum gives it a weight.",
    )
    max_prompts: int | None = Field(None, gt=0, description="Number of first rows to use; null: all.")


TrainSets = dict[
    Annotated[str, AfterValidator(set_name)], Annotated[TrainSetConfig, BeforeValidator(files_alone)]
]
"""The sets by name; a set that is written as files only has the other options' defaults."""


class CurriculumStage(Section):
    """The weights of the training sets from a step on."""

    from_step: int = Field(gt=0, description="The first step with these weights; steps are counted from 1.")
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        description="Weights by set; a set that is left out has the weight 0."
    )


Curriculum = Annotated[
    Annotated[tuple[CurriculumStage, ...], Tag("stages")]
    | Annotated[str, AfterValidator(own_path), Tag("own")],
    Discriminator(lambda value: "own" if isinstance(value, str) else "stages"),
]
"""Weights by step, or the path of a function that returns them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSet:
    """A set of training prompts: its files, weight and limit; `name` is "" for data.train_files."""

    name: str
    files: tuple[str, ...]
    weight: float
    max_prompts: int | None

    @property
    def key(self) -> str:
        """The key of the configuration that holds the set's files."""
        return f"data.train_sets.{self.name}.files" if self.name else "data.train_files"

    @property
    def title(self) -> str:
        """Names the set in messages, before a noun: "training prompts"."""
        return f"training ({self.name})" if self.name else "training"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsFrom:
    """The weights of all training sets, in their order, from a step on."""

    step: int
    weights: tuple[float, ...]
