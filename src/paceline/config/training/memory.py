"""`actor.memory`: what an update keeps in a GPU's memory, and what it computes or gathers again."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from paceline.config.base import Section

KEPT_LOGITS_SHARE: Final = 1 / 32
"""Of a GPU's memory: logits of a micro-batch that take no more are kept for its backward pass."""


class MemoryConfig(Section):
    """What an update keeps; everything changes speed and memory, and no number beyond rounding."""

    recompute: Literal["auto", "none", "full"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "auto",
        description="What the backward pass computes again. none: nothing. full: every layer, from its "
        "input. A number: the share of the activations that is kept, chosen by the compiler with "
        "actor.compile, else as the share of the layers that keep theirs. auto: as much is kept as the "
        "memory plan allows; nothing is recomputed on a CPU.",
    )
    keep_gathered: bool | None = Field(
        None,
        description="Keep the layers' gathered weights until the last micro-batch of a mini-batch, instead "
        "of gathering them twice per micro-batch; takes the whole model in model.dtype on every rank. null: "
        "where the memory plan has room; not on a CPU.",
    )
    accumulate: bool | None = Field(
        None,
        description="Add up whole gradients on every rank and reduce them once per mini-batch; false: "
        "reduce those of every micro-batch, so that a rank has its share only. null: where the memory plan "
        "has room; always on a CPU.",
    )

    offload: bool | None = Field(
        None,
        description="Keep the optimizers' averages in pinned host memory, 8 bytes per parameter and rank's "
        "share, or 4 of Muon's; they visit the GPU in parts in each optimizer step. null: where nothing else "
        "fits the memory plan, or where it is estimated to be faster than recomputing and the host has 20 "
        "bytes of free memory per parameter; not on a CPU.",
    )

    @property
    def offloads(self) -> bool:
        """Whether the averages are in host memory; not where nothing has chosen yet."""
        return bool(self.offload)

    @property
    def kept_share(self) -> float:
        """Share of the activations that are kept; all of them where nothing has chosen yet."""
        if isinstance(self.recompute, float):
            return self.recompute
        return 0.0 if self.recompute == "full" else 1.0

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights stay gathered; not where nothing has chosen yet."""
        return bool(self.keep_gathered)

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients are added up; they are where nothing has chosen yet."""
        return self.accumulate is not False

    @property
    def is_open(self) -> bool:
        """Whether something is left to choose."""
        return None in (self.keep_gathered, self.accumulate, self.offload) or self.recompute == "auto"

    def with_rest_of(self, other: MemoryConfig) -> MemoryConfig:
        """Returns the same with the other's values where something is left open."""
        chosen = {
            name: getattr(other, name)
            for name in MemoryConfig.model_fields
            if getattr(self, name) in (None, "auto")
        }
        return self.model_copy(update=chosen)


class ActorMemoryConfig(MemoryConfig):
    """What an update keeps, and where frozen networks wait."""

    offload_reference: bool = Field(
        False,
        description="Keep the reference model and algorithm.networks in pinned host memory, each rank its "
        "shards; each of them is copied to the GPU while it scores, once per step, one after the other. With "
        "model.lora the reference takes no memory, and none is kept.",
    )


def _or_open(given: object) -> object:
    return {} if given == "auto" else given


Memory = Annotated[MemoryConfig, BeforeValidator(_or_open)]
"""The section; `auto` in its place leaves everything open."""

ActorMemory = Annotated[ActorMemoryConfig, BeforeValidator(_or_open)]
"""The same of a run."""
