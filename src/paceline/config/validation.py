"""The sets of held-out prompts and how answers to them are sampled: `data.val_sets` and `rollout.val`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from paceline.config.base import Files, Section
from paceline.config.reward import ScorersConfig
from paceline.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TAKEN = ("reward", "episode", "response_length", "source")


class ValSamplingConfig(Section):
    """How answers to held-out prompts are sampled, unless a set of data.val_sets says otherwise."""

    n: int = Field(1, gt=0, description="Samples per held-out prompt.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Draw from the likeliest tokens whose probabilities add up to this."
    )
    top_k: int = Field(0, ge=0, description="Draw from this many of the likeliest tokens; 0: from all.")
    right_above: float = Field(
        0.0, description="An answer with a reward above this counts as right in avg@n, pass@k and maj@k."
    )


def _function_alone(value: object) -> object:
    """Returns scorers with the given function; a value that already lists scorers is unchanged."""
    return {"functions": [{"name": value}]} if isinstance(value, str) else value


class ValSetConfig(Section):
    """A named set of held-out prompts."""

    files: Files = Field(
        description="The set's files, written as in data.val_files; columns and limits are those of data."
    )
    max_prompts: int | None = Field(None, gt=0, description="Number of first prompts to use; null: all.")
    every: int = Field(
        1,
        gt=0,
        description="Take part in every k-th validation: with trainer.test_freq: 10 and every: 3, after "
        "steps 30, 60 and so on. All sets take part before step 1 and after the last step.",
    )
    n: int | None = Field(None, gt=0, description="Samples per prompt; null: rollout.val.n.")
    temperature: float | None = Field(None, ge=0, description="null: rollout.val.temperature.")
    top_p: float | None = Field(None, gt=0, le=1, description="null: rollout.val.top_p.")
    top_k: int | None = Field(None, ge=0, description="null: rollout.val.top_k.")
    right_above: float | None = Field(None, description="null: rollout.val.right_above.")
    max_response_length: int | None = Field(
        None,
        gt=0,
        description="Longest response in tokens, which may exceed data.max_response_length; null: "
        "data.max_response_length. Not for episodes, whose limits are in rollout.episode.",
    )
    reward: Annotated[ScorersConfig | None, BeforeValidator(_function_alone)] = Field(
        None,
        description="The scorers of the set's answers, instead of those of `reward`, whose limits they "
        "share; a function may be written as its name alone. null: those of `reward`.",
    )

    @model_validator(mode="after")
    def _normalizes_nothing(self) -> Self:
        for name, scorer in (self.reward or ScorersConfig()).named_scorers.items():
            if scorer.normalize is not None:
                raise ValueError(
                    f"reward: {name} has normalize={scorer.normalize}, which only training does; leave it out"
                )
        return self


def set_name(name: str) -> str:
    """Returns the name of a set of prompts if it can be part of a metric's name; raises ValueError if not."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a set; write letters, digits, - and _, because metric names contain it"
        )
    if name in _TAKEN:
        raise ValueError(f"{name!r} cannot name a set, because metrics use it; choose another name")
    return name


def files_alone(value: object) -> object:
    """Returns a set with the given files; a value that is already a set is unchanged."""
    return {"files": value} if isinstance(value, str | list) else value


ValSets = dict[
    Annotated[str, AfterValidator(set_name)], Annotated[ValSetConfig, BeforeValidator(files_alone)]
]
"""The sets by name; a set that is written as files only has the other options' defaults."""


def reward_key(name: str) -> str:
    """Returns the key of a set's own reward; "" stands for the run's reward."""
    return f"data.val_sets.{name}.reward" if name else "reward"


@contextmanager
def naming_set(name: str) -> Iterator[None]:
    """Prefixes the message of a ConfigError with the key of a set's reward; "" is the run's own reward."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"{reward_key(name)}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutSet:
    """A set of held-out prompts with all settings that apply to it.

    Attributes:
        name: "" for the set of data.val_files.
        max_prompts: None for all.
        every: k if the set takes part in every k-th validation.
        max_tokens: longest response, in tokens.
        right_above: an answer with a reward above this is right.
    """

    name: str
    files: tuple[str, ...]
    max_prompts: int | None
    every: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    right_above: float

    @property
    def key(self) -> str:
        """The key of the configuration that holds the set's files."""
        return f"data.val_sets.{self.name}.files" if self.name else "data.val_files"

    @property
    def title(self) -> str:
        """Names the set in messages, before a noun: "validation prompts"."""
        return f"validation ({self.name})" if self.name else "validation"

    @property
    def metrics(self) -> str:
        """Prefix of the names of the set's metrics."""
        return f"val/{self.name}/" if self.name else "val/"
