"""Where an image's placeholders stand in its prompt: what the engine and the learner both go by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import DataError
from paceline.core.samples.images import Image, ImageSpec, LoadedImage, placeholder_ranges

P = 99
SPEC = ImageSpec(token_id=P, merge_size=2, width=6)


def image(*grid: int, width: int = 6) -> LoadedImage:
    time, height, columns = grid
    made = Image(hash="ab" * 32, grid=(time, height, columns))
    return LoadedImage(image=made, pixels=np.zeros((made.num_patches, width), np.float32))


@pytest.mark.parametrize(
    ("ids", "images", "ranges"),
    [
        ([1, 2], [], []),
        ([P], [image(1, 2, 2)], [(0, 1)]),
        ([7, P, P, P, 8], [image(1, 2, 6)], [(1, 3)]),
        ([P, P, 7, 8, P, 9], [image(1, 4, 2), image(1, 2, 2)], [(0, 2), (4, 1)]),
        # Nothing between two images: their own sizes part them.
        ([7, P, P, P, P], [image(1, 2, 2), image(1, 2, 6)], [(1, 1), (2, 3)]),
        ([P, P, P, P, 7], [image(2, 4, 2)], [(0, 4)]),
    ],
)
def test_each_image_has_its_run_of_placeholders_in_order(ids: Any, images: Any, ranges: Any) -> None:
    assert list(placeholder_ranges(ids, images, SPEC)) == ranges
    assert list(placeholder_ranges(np.array(ids, np.int32), images, SPEC)) == ranges


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ([P, P], [image(1, 2, 6)], "image 0 .* needs 3 placeholders side by side"),
        ([P, 7, P, P], [image(1, 2, 6)], "image 0 .* needs 3 placeholders side by side"),
        ([P, P, 7], [image(1, 4, 2), image(1, 2, 2)], "image 1 .* needs 1 placeholders .*; 2 of its tokens"),
        ([P, P, 7, P], [image(1, 4, 2)], "has 3 placeholders of images, and its 1 images take 2"),
        ([P], [], "has 1 placeholders of images, and its 0 images take 0"),
        ([P], [image(1, 3, 2)], "1 x 3 x 2 patches of 6 numbers; .* multiples of 2"),
        ([P], [image(1, 2, 3)], "1 x 2 x 3 patches"),
        ([P], [image(1, 2, 2, width=5)], "patches of 5 numbers; .* 6 numbers: was it prepared for another"),
    ],
)
def test_placeholders_that_are_not_those_of_the_images_are_refused(
    ids: Any, images: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        placeholder_ranges(ids, images, SPEC)


def test_the_spec_comes_from_the_models_configuration() -> None:
    vision = SimpleNamespace(spatial_merge_size=3, in_channels=5, temporal_patch_size=2, patch_size=7)
    assert ImageSpec.of(SimpleNamespace(image_token_id=8, vision_config=vision)) == ImageSpec(
        token_id=8, merge_size=3, width=5 * 2 * 49
    )
