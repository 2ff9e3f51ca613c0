"""Sets how decoder layers run: compiled or not, kept activations, how long weights stay gathered.

No option changes results beyond rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.config.training.actor import ActorConfig
from paceline.config.training.memory import MemoryConfig
from paceline.learner.distributed.ranks import Ranks
from paceline.learner.model.decoder.compiling import TOKEN_MULTIPLE, compile_layers
from paceline.learner.model.decoder.host_inputs import HostInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """Options of how a network's layers compute.

    Attributes:
        kept_share: share of the activations that a layer keeps for the backward pass; 0 recomputes all.
        compiled: whether torch.compile compiles the layers.
        keep_gathered: weights stay gathered after a forward pass, until a backward pass or
            `forget_forward_passes`.
        host_inputs: where recomputed layers keep their inputs; None: on the device.
    """

    kept_share: float = 1.0
    compiled: bool = False
    keep_gathered: bool = False
    host_inputs: HostInputs | None = None

    @classmethod
    def of(
        cls, memory: MemoryConfig, *, num_tokens: int, ranks: Ranks, compiled: bool = False
    ) -> LayerOptions:
        """Returns the options of a memory configuration, for micro-batches of `num_tokens` on each rank.

        Raises:
            EnvironmentLackError: the host has less free memory than its ranks may pin.
        """
        multiple = TOKEN_MULTIPLE if compiled else 1
        return cls(
            kept_share=memory.kept_share,
            compiled=compiled,
            keep_gathered=memory.keeps_gathered,
            host_inputs=HostInputs.of(memory, num_tokens=-(-num_tokens // multiple) * multiple, ranks=ranks),
        )

    @classmethod
    def of_actor(cls, actor: ActorConfig, ranks: Ranks) -> LayerOptions:
        """Returns the options of policy and critic; raises as `of`."""
        num_tokens = actor.ppo_max_token_len_per_gpu
        return cls.of(actor.memory, num_tokens=num_tokens, ranks=ranks, compiled=actor.compiles)

    @property
    def token_multiple(self) -> int:
        """The number of tokens of a pass must be a multiple of this."""
        return TOKEN_MULTIPLE if self.compiled else 1

    def apply(self, lm: Any, layers: nn.ModuleList, device: torch.device, tower: Any = None) -> None:
        """Sets up recomputation and compilation for this device.

        Call it before sharding, so that FSDP's hooks stay outside. `tower` is a vision tower that trains.
        """
        if self.compiled:
            compile_layers(layers, self.kept_share, device)
        if self.kept_share == 0.0 or not self.compiled:
            self._recompute(lm, layers)
        if tower is not None:
            self._recompute(tower, tower.blocks)

    def _recompute(self, model: Any, layers: nn.ModuleList) -> None:
        if num_recomputed := math.ceil((1.0 - self.kept_share) * len(layers)):
            # The last layers keep their activations, which are freed before the first recomputation.
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # Only reentrant recomputation needs inputs with gradients, which a frozen part computes in vain.
            model.disable_input_require_grads()
            for layer in layers[num_recomputed:]:
                layer.gradient_checkpointing = False  # type: ignore[assignment]
        if self.host_inputs is not None:
            self.host_inputs.keep_for(layers)


DEFAULT_OPTIONS = LayerOptions()
