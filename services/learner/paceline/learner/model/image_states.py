"""Turns the images of a micro-batch into inputs of the decoder, by the model's vision tower.

tokens -> embeddings, with the tower's states in place of an image's tokens
       -> features that the first decoder layers add to their states (DeepStack, arXiv:2406.04334)

A tower that trains also computes where a micro-batch has no images: every rank must have a gradient for each
parameter that trains, since FSDP reduces all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ModelError
from paceline.core.policy import TrainedVision
from paceline.core.samples.images import ImageSpec
from paceline.learner.batch.types import PackedImages
from paceline.learner.model.decoder.rows import take_rows


def vision_tower(body: nn.Module) -> nn.Module | None:
    """Returns the module that turns images into token states; None in a text-only model."""
    return getattr(body, "visual", None)


def projectors(tower: Any) -> list[nn.Module]:
    """Returns the mergers: the parts that project patches' states to the width of the decoder."""
    return [tower.merger, *getattr(tower, "deepstack_merger_list", ())]


def train_tower(body: nn.Module, part: TrainedVision) -> None:
    """Freezes the vision tower, if the model has one, except for the part that trains.

    Raises:
        ModelError: a part shall train, and the model has no vision tower.
    """
    tower = vision_tower(body)
    if tower is None:
        if part != "none":
            raise ModelError(
                f"model.vision.train is {part}, and {type(body).__name__} has no vision tower; take a model "
                "with one (docs/models.md), or leave model.vision out"
            )
        return
    tower.requires_grad_(part == "all")
    for module in projectors(tower) if part == "projector" else ():
        module.requires_grad_(True)


def is_trained(module: nn.Module) -> bool:
    """Returns whether any parameter of a module trains."""
    return any(parameter.requires_grad for parameter in module.parameters())


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


def embed_with_images(
    body: nn.Module, input_ids: Tensor, images: PackedImages | None
) -> EmbeddedTokens | None:
    """Embeds tokens (1, T), and the images among them; None if the decoder can embed the tokens itself.

    Raises:
        ModelError: there are images, and the model has no vision tower.
    """
    tower: Any = vision_tower(body)
    trains = tower is not None and is_trained(tower)
    if images is None:
        if not trains:
            return None
        images = _filler(ImageSpec.of(body.config), input_ids.device)
    if tower is None:
        raise ModelError(
            f"{type(body).__name__} has no vision tower, and a prompt has images; take a model with one "
            "(docs/models.md), or prompts without images"
        )
    embed: Any = body.get_input_embeddings()  # type: ignore[operator]
    # Attention chooses its kernel by whether there is a gradient. Scoring must choose as the update does, so
    # it builds a graph, too, and drops it.
    with torch.set_grad_enabled(trains):
        pixels = images.pixels.to(next(tower.parameters()).dtype)
        output = tower(pixels, grid_thw=images.grids)
    embeddings: Tensor = embed(input_ids)[0]
    states, *features = (
        take_rows(part, images.states).to(embeddings.dtype)
        for part in (output.pooler_output, *getattr(output, "deepstack_features", ()))
    )
    return EmbeddedTokens(
        embeddings=embeddings.index_copy(0, images.places, states).unsqueeze(0),
        places=images.places,
        features=tuple(features),
    )


def _filler(spec: ImageSpec, device: torch.device) -> PackedImages:
    """Returns the smallest image, of zeros, in place of no token: all its gradients are 0."""
    nowhere = torch.empty(0, dtype=torch.int64, device=device)
    return PackedImages(
        pixels=torch.zeros(spec.merge_size**2, spec.width, device=device),
        grids=torch.tensor([[1, spec.merge_size, spec.merge_size]], device=device),
        places=nowhere,
        states=nowhere,
    )
