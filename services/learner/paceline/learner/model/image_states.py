"""Turns the images of a micro-batch into inputs of the decoder, by the model's frozen vision tower.

tokens -> embeddings, with the tower's states in place of an image's tokens
       -> features that the first decoder layers add to their states (DeepStack, arXiv:2406.04334)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ModelError
from paceline.learner.batch.types import PackedImages


def vision_tower(body: nn.Module) -> nn.Module | None:
    """Returns the module that turns images into token states; None in a text-only model."""
    return getattr(body, "visual", None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmbeddedTokens:
    """The inputs of the decoder for T tokens, some of which stand for parts of images.

    Attributes:
        embeddings: (1, T, H).
        places: (m,), the image tokens' positions in T, in ascending order.
        features: one (m, H) for each of the first decoder layers, which is added to its output at `places`;
            most models have none.
    """

    embeddings: Tensor
    places: Tensor
    features: tuple[Tensor, ...]

    def part(self, start: int, length: int) -> dict[str, Any]:
        """Returns the decoder's arguments for the tokens from `start` on."""
        stop = start + length
        inputs: dict[str, Any] = {"inputs_embeds": self.embeddings[:, start:stop]}
        if self.features:
            inside = (self.places >= start) & (self.places < stop)
            are_images = torch.zeros(1, length, dtype=torch.bool, device=self.places.device)
            are_images[0, self.places[inside] - start] = True
            inputs["visual_pos_masks"] = are_images
            inputs["deepstack_visual_embeds"] = [feature[inside] for feature in self.features]
        return inputs


def embed_with_images(body: nn.Module, input_ids: Tensor, images: PackedImages) -> EmbeddedTokens:
    """Embeds tokens (1, T), and the images among them.

    Raises:
        ModelError: the model has no vision tower.
    """
    tower: Any = vision_tower(body)
    if tower is None:
        raise ModelError(
            f"{type(body).__name__} has no vision tower, and a prompt has images; take a model with one "
            "(docs/models.md), or prompts without images"
        )
    embed: Any = body.get_input_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        pixels = images.pixels.to(next(tower.parameters()).dtype)
        output = tower(pixels, grid_thw=images.grids)
    embeddings: Tensor = embed(input_ids)[0]
    states, *features = (
        part.index_select(0, images.states).to(embeddings.dtype)
        for part in (output.pooler_output, *getattr(output, "deepstack_features", ()))
    )
    return EmbeddedTokens(
        embeddings=embeddings.index_copy(0, images.places, states).unsqueeze(0),
        places=images.places,
        features=tuple(features),
    )
