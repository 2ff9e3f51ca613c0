"""`actor.memory`: what an update keeps in GPU or host memory, and what it recomputes or gathers again."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from paceline.config.base import Section

KEPT_LOGITS_SHARE: Final = 1 / 32
"""Logits of a micro-batch that take at most this share of a GPU's memory are kept for its backward pass."""
HOST_SHARE: Final = 0.5
"""Most of a host's free memory that its ranks pin for inputs of layers, unless the file says otherwise."""
_GIB: Final = 1 << 30


class MemoryConfig(Section):
    """What an update keeps: these options change speed and memory, and results only by rounding."""

    recompute: Literal["auto", "none", "full", "from_host"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "auto",
        description="What the backward pass computes again. none: nothing. full: every layer, from its "
        "input. from_host: the same, but the inputs wait in pinned host memory. A number: the share of "
        "activations that is kept. With actor.compile, the compiler chooses which; without it, this share of "
        "the layers keeps all of its activations. auto: keep as much as the memory plan allows, and take "
        "from_host only if nothing else fits on a rank; on a CPU, recompute nothing.",
    )
    host_gib: float | None = Field(
        None,
        gt=0,
        description="With recompute: from_host, the most GiB of host memory that each rank pins for inputs "
        "of layers; further inputs stay on the GPU. null: half of the free memory of the host or container, "
        "divided by the host's ranks.",
    )
    keep_gathered: bool | None = Field(
        None,
        description="Keep the layers' gathered weights until the last micro-batch of a mini-batch, instead "
        "of gathering them twice per micro-batch; every rank then holds the whole model in model.dtype. "
        "null: if the memory plan has room; never on a CPU.",
    )
    accumulate: bool | None = Field(
        None,
        description="Add up whole gradients on every rank and reduce them once per mini-batch; false: reduce "
        "the gradients of every micro-batch, so that a rank keeps only its share. null: true if the memory "
        "plan has room, and always on a CPU.",
    )

    offload: bool | None = Field(
        None,
        description="Keep the optimizers' averages in pinned host memory: 8 bytes per parameter of a rank's "
        "shard with AdamW, 2 with its 8 bits, 4 with Muon. They are copied to the GPU in parts in each "
        "optimizer step. null: if nothing else fits the memory plan, or if it is estimated to be faster than "
        "recomputing and the host has 20 bytes of free memory per parameter; never on a CPU.",
    )

    @property
    def offloads(self) -> bool:
        """Whether the averages are in host memory; False while the choice is still open."""
        return bool(self.offload)

    @property
    def kept_share(self) -> float:
        """Share of the activations that are kept; 1 while the choice is still open."""
        if isinstance(self.recompute, float):
            return self.recompute
        return 0.0 if self.recompute in ("full", "from_host") else 1.0

    @property
    def inputs_on_host(self) -> bool:
        """Whether inputs of layers wait in host memory; False while the choice is still open."""
        return self.recompute == "from_host"

    @property
    def host_limit(self) -> int | None:
        """Most bytes that a rank pins for inputs of layers; None: as its host has room."""
        return None if self.host_gib is None else round(self.host_gib * _GIB)

    @property
    def host_share(self) -> float:
        """The most of a host's free memory that its ranks together pin for inputs of layers."""
        return HOST_SHARE if self.host_gib is None else 1.0

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights stay gathered; False while the choice is still open."""
        return bool(self.keep_gathered)

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients are added up; True while the choice is still open."""
        return self.accumulate is not False

    @property
    def is_open(self) -> bool:
        """Whether any option still has to be chosen."""
        return None in (self.keep_gathered, self.accumulate, self.offload) or self.recompute == "auto"

    def with_rest_of(self, other: MemoryConfig) -> MemoryConfig:
        """Returns a copy in which the options that are still open have the other's values."""
        chosen = {
            name: getattr(other, name)
            for name in MemoryConfig.model_fields
            if getattr(self, name) in (None, "auto")
        }
        return self.model_copy(update=chosen)


class ActorMemoryConfig(MemoryConfig):
    """What an update keeps in memory, and where frozen networks are kept between steps."""

    offload_reference: bool = Field(
        False,
        description="Keep the reference model and algorithm.networks in pinned host memory; each rank keeps "
        "its shards. Once per step, one model after the other is copied to the GPU to score the samples. "
        "With model.lora the reference needs no memory of its own.",
    )


def _or_open(given: object) -> object:
    return {} if given == "auto" else given


Memory = Annotated[MemoryConfig, BeforeValidator(_or_open)]
"""The section `memory`; writing `auto` instead leaves every option open."""

ActorMemory = Annotated[ActorMemoryConfig, BeforeValidator(_or_open)]
"""The section `actor.memory` of a run, in the same forms."""
