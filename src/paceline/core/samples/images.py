"""The images of a prompt: their description in messages, their patches, and their placeholders.

Messages carry an image's hash and grid; the patches travel separately, by hash. The prompt's token ids hold
one placeholder for each of the image's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An image as messages carry it.

    `hash` is a sha256 over its grid and its patches' pixels, in hexadecimal. `grid` counts patches: in time,
    height and width.
    """

    hash: str
    grid: tuple[int, int, int]

    @property
    def num_patches(self) -> int:
        """Number of the image's patches, which are the rows of `pixels`."""
        time, height, width = self.grid
        return time * height * width


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedImage:
    """An image with the pixels of its patches, (patches, width), made by the model's image processor."""

    image: Image
    pixels: npt.NDArray[np.float32]


class PlaceholderRange(NamedTuple):
    """The placeholders of an image, side by side in a prompt's token ids."""

    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpec:
    """What a model's configuration says about images.

    Attributes:
        merge_size: number of patches along height, and along width, that one token stands for.
        width: numbers per patch.
    """

    token_id: int
    merge_size: int
    width: int

    @classmethod
    def of(cls, config: Any) -> ImageSpec:
        """Reads the sizes from the transformers configuration of a model with a vision tower."""
        vision = config.vision_config
        return cls(
            token_id=int(config.image_token_id),
            merge_size=int(vision.spatial_merge_size),
            width=int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2),
        )


def placeholder_ranges(
    prompt_token_ids: npt.ArrayLike, images: Sequence[LoadedImage], spec: ImageSpec
) -> tuple[PlaceholderRange, ...]:
    """Returns the placeholders of each image in the prompt, in the order of the images.

    Raises:
        DataError: the prompt's placeholders do not match the images, or an image was prepared for another
            model.
    """
    places = np.flatnonzero(np.asarray(prompt_token_ids) == spec.token_id)
    ranges, taken = [], 0
    for number, loaded in enumerate(images):
        (time, height, width), merge = loaded.image.grid, spec.merge_size
        if height % merge or width % merge or loaded.pixels.shape[1] != spec.width:
            raise DataError(
                f"image {number} of the prompt ({loaded.image.hash[:12]}) has {time} x {height} x {width} "
                f"patches of {loaded.pixels.shape[1]} numbers; the model takes heights and widths that are "
                f"multiples of {merge}, and {spec.width} numbers: was it prepared for another model?"
            )
        length = loaded.image.num_patches // merge**2
        own = places[taken : taken + length]
        if len(own) < length or own[-1] - own[0] != length - 1:
            raise DataError(
                f"image {number} of the prompt ({loaded.image.hash[:12]}) needs {length} placeholders side "
                f"by side, and the prompt has no such run; {len(places)} of its tokens are placeholders"
            )
        ranges.append(PlaceholderRange(int(own[0]), length))
        taken += length
    if taken < len(places):
        raise DataError(
            f"the prompt has {len(places)} placeholders of images, and its {len(images)} images take {taken}"
        )
    return tuple(ranges)
