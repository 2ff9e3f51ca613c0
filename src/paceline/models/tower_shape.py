"""The sizes of a vision tower that matter for memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.policy import TrainedVision

_FLOAT32_STATES = 9
"""Number of float32 tensors, as wide as the states, that the tower's rotary embedding creates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShape:
    """The sizes of a vision tower, Qwen2.5-VL's or Qwen3-VL's.

    Attributes:
        width: numbers per patch.
        out: numbers per image token.
        num_positions: number of learned positions, which only Qwen3-VL's tower has.
        num_features: number of decoder layers to which the tower also gives states.
    """

    hidden: int
    intermediate: int
    num_layers: int
    width: int
    merge_size: int
    out: int
    num_positions: int = 0
    num_features: int = 0

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> TowerShape:
        """Reads the tower from the `vision_config` of config.json.

        Missing entries get transformers' defaults.

        Raises:
            KeyError, TypeError, ValueError: it has other names for its sizes.
        """
        channels = int(tree.get("in_channels") or tree.get("in_chans") or 3)
        patch_size = int(tree.get("patch_size", 14))
        return cls(
            hidden=int(tree["hidden_size"]),
            intermediate=int(tree["intermediate_size"]),
            num_layers=int(tree["depth"]),
            width=channels * int(tree.get("temporal_patch_size", 2)) * patch_size**2,
            merge_size=int(tree.get("spatial_merge_size", 2)),
            out=int(tree["out_hidden_size"]),
            num_positions=int(tree.get("num_position_embeddings") or 0),
            num_features=len(tree.get("deepstack_visual_indexes") or ()),
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters of patch embedding, layers and mergers.

        Qwen2.5-VL's MLPs have a gate, and its norms and patch embedding no biases.
        """
        attention = 4 * self.hidden * (self.hidden + 1)
        if self.num_positions:
            mlp = 2 * self.hidden * self.intermediate + self.intermediate + self.hidden
            layers = self.num_layers * (attention + mlp + 4 * self.hidden)
            embedding = (self.width + 1 + self.num_positions) * self.hidden
            return embedding + layers + self.num_in_projectors
        mlp = 3 * self.hidden * self.intermediate + 2 * self.intermediate + self.hidden
        layers = self.num_layers * (attention + mlp + 2 * self.hidden)
        return self.width * self.hidden + layers + self.num_in_projectors

    @property
    def num_in_projectors(self) -> int:
        """Number of parameters of the mergers with their norms."""
        merged = self.hidden * self.patches_per_token
        merger = merged * (merged + 1) + (merged + 1) * self.out
        if self.num_positions:
            return merger + 2 * self.hidden + self.num_features * (merger + 2 * merged)
        return merger + self.hidden

    def num_trained(self, part: TrainedVision) -> int:
        """Returns the number of parameters of the part that trains."""
        return {"none": 0, "projector": self.num_in_projectors, "all": self.num_parameters}[part]

    @property
    def patches_per_token(self) -> int:
        """Number of patches that one image token represents."""
        return self.merge_size**2

    def activations(self, num_patches: int, bytes_per_number: int) -> int:
        """Returns the bytes of a forward pass over `num_patches` patches without a backward pass.

        The result is the maximum over three parts: the patch embedding, which copies the pixels; rotary
        embedding and attention; the MLP. The float32 pixels themselves stay on the GPU, as do the states for
        decoder layers.
        """
        embedding = 4 * self.width * bytes_per_number
        attention = (5 * bytes_per_number + 4 * _FLOAT32_STATES) * self.hidden
        mlp = (3 * self.intermediate + 2 * self.hidden) * bytes_per_number
        features = self.num_features * self.out * bytes_per_number // self.patches_per_token
        return num_patches * (4 * self.width + max(embedding, attention, mlp) + features)

    def kept(
        self, num_patches: int, bytes_per_number: int, part: TrainedVision, kept_share: float = 1.0
    ) -> int:
        """Returns the bytes that a forward pass over `num_patches` patches keeps for the backward pass.

        Args:
            part: the part that trains.
            kept_share: share of the layers that keep their activations; the others keep their input, and one
                of them is computed again at a time.
        """
        if part == "none":
            return 0
        # Qwen2.5-VL's norms compute in float32, and its MLPs have a gate.
        inner, states, merger = (2, 14, 8) if self.num_positions else (4, 22, 14)
        numbers = merger * (1 + self.num_features) * self.hidden
        if part == "all":
            layer = inner * self.intermediate + states * self.hidden
            recomputed = math.ceil((1.0 - kept_share) * self.num_layers)
            numbers += self.width + recomputed * self.hidden
            numbers += (self.num_layers - recomputed + (1 if recomputed else 0)) * layer
        return num_patches * numbers * bytes_per_number
