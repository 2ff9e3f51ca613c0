"""What held-out prompts are, and how they are answered: `data.val_sets` and `rollout.val`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from paceline.config.base import Files, Section

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TAKEN = ("reward", "episode", "response_length", "source")


class ValSamplingConfig(Section):
    """How held-out prompts are answered, where a set of data.val_sets does not say otherwise."""

    n: int = Field(1, gt=0, description="Samples per held-out prompt.")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Draw from the likeliest tokens that have this share.")
    top_k: int = Field(0, ge=0, description="Draw from so many of the likeliest tokens; 0: from all.")
    right_above: float = Field(
        0.0, description="An answer with a reward above this is right: what avg@n, pass@k and maj@k count."
    )


class ValSetConfig(Section):
    """A named set of held-out prompts."""

    files: Files = Field(description="Its files, as data.val_files; columns and limits are those of data.")
    max_prompts: int | None = Field(None, gt=0, description="Take the first so many prompts; null: all.")
    every: int = Field(
        1,
        gt=0,
        description="Take part in every so many of the validations that trainer.test_freq asks for: with "
        "test_freq: 10 and every: 3, after steps 30, 60 and so on. Before step 1 and after the last step "
        "every set takes part.",
    )
    n: int | None = Field(None, gt=0, description="Samples per prompt; null: as rollout.val.n.")
    temperature: float | None = Field(None, ge=0, description="null: as rollout.val.temperature.")
    top_p: float | None = Field(None, gt=0, le=1, description="null: as rollout.val.top_p.")
    top_k: int | None = Field(None, ge=0, description="null: as rollout.val.top_k.")
    right_above: float | None = Field(None, description="null: as rollout.val.right_above.")
    max_response_length: int | None = Field(
        None,
        gt=0,
        description="Longest response in tokens, also above data.max_response_length, which null stands "
        "for. Not for episodes: rollout.episode has their limits.",
    )


def set_name(name: str) -> str:
    """Returns the name of a set of prompts, if metrics can bear it."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a set; write letters, digits, - and _, as metrics bear it")
    if name in _TAKEN:
        raise ValueError(f"{name!r} cannot name a set, as metrics use that word; choose another name")
    return name


def files_alone(value: object) -> object:
    """Returns a set that has just these files; a set stays as it is."""
    return {"files": value} if isinstance(value, str | list) else value


ValSets = dict[
    Annotated[str, AfterValidator(set_name)], Annotated[ValSetConfig, BeforeValidator(files_alone)]
]
"""By name; the files may stand in place of a set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutSet:
    """A set of held-out prompts with everything that holds for it.

    Attributes:
        name: "" for that of data.val_files.
        max_prompts: None for all.
        every: of how many validations it takes part in one.
        max_tokens: of a response.
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
        """Where the configuration has its files."""
        return f"data.val_sets.{self.name}.files" if self.name else "data.val_files"

    @property
    def title(self) -> str:
        """What sentences call it: "validation prompts" with a noun behind it."""
        return f"validation ({self.name})" if self.name else "validation"

    @property
    def metrics(self) -> str:
        """What its metrics begin with."""
        return f"val/{self.name}/" if self.name else "val/"
