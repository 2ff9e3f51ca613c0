"""Images of prompts on a rollout server: fetched by hash, handed to the engine, named in the trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.broker import names
from paceline.core.errors import InvalidMessageError, LostDataError
from paceline.core.samples.images import Image
from paceline.rollout.images import Images
from paceline.wire import image_of, pack_pixels
from support.memory_broker import MemoryBroker
from support.rollout_bench import LIMITS, RUN, V0, bench, group


class CountingBroker(MemoryBroker):
    """Counts the images that are fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    async def get_blobs(self, keys: Sequence[str]) -> list[bytes | None]:
        self.fetched += [key for key in keys if ":image:" in key]
        return await super().get_blobs(keys)


def pixels(seed: int, num_patches: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_patches, 6)).astype(np.float32)


async def stored(broker: MemoryBroker, seed: int) -> Image:
    image = image_of(pixels(seed), (1, 2, 2))
    await broker.put_blob(names.image(RUN, image.hash), pack_pixels(pixels(seed)))
    return image


async def test_a_group_is_drawn_with_its_images_and_the_trajectory_names_them() -> None:
    async with bench(broker=CountingBroker()) as b:
        await b.push(V0)
        first, second = await stored(b.broker, 1), await stored(b.broker, 2)
        wanted = {7: (first, second), 8: (second, first), 9: (second,)}
        drawn: dict[int, list[list[int]]] = {}
        for prompt_id, images in wanted.items():
            await b.ask(replace(group(7), prompt_id=prompt_id, images=images))
            blobs = [await b.blob(header) for header in await b.headers(4)]
            assert [blob.images for blob in blobs] == [images] * 4
            drawn[prompt_id] = sorted(blob.response_token_ids.tolist() for blob in blobs)
        # The fake engine's samples follow from the pixels, in their order.
        assert drawn[7] != drawn[8] != drawn[9] != drawn[7]
        assert b.broker.fetched == [names.image(RUN, image.hash) for image in (first, second)]


async def test_a_group_whose_image_is_gone_is_given_back_and_others_are_drawn() -> None:
    async with bench(limits=replace(LIMITS, lease_s=1.5)) as b:
        await b.push(V0)
        lost = image_of(pixels(1), (1, 2, 2))
        await b.ask(group(1, images=(lost,)), group(2))
        assert {header.trajectory_id.prompt_id for header in await b.headers(4)} == {2}
        [refusal] = await b.refusals(1)
        assert (refusal.prompt_id, refusal.reason) == (1, "image_lost")
        assert f"image {lost.hash[:12]} is not at the broker" in refusal.message


async def test_a_blob_with_other_pixels_is_refused_at_once() -> None:
    async with bench() as b:
        await b.push(V0)
        image = await stored(b.broker, 1)
        await b.broker.put_blob(names.image(RUN, image.hash), pack_pixels(pixels(2)))
        await b.ask(group(1, images=(image,)))
        [refusal] = await b.refusals(1)
        assert (refusal.reason, refusal.deliveries) == ("inconsistent", 1)
        assert "holds other pixels" in refusal.message


async def test_what_is_kept_is_bounded_and_the_last_used_stay() -> None:
    broker = CountingBroker()
    first, second, third = [await stored(broker, seed) for seed in range(3)]
    images = Images(broker, RUN, max_kept_bytes=2 * pixels(0).nbytes)
    for wanted, fetched in [(first, 1), (second, 2), (first, 2), (third, 3), (first, 3), (second, 4)]:
        [loaded] = await images.fetch([wanted])
        assert loaded.image == wanted
        assert len(broker.fetched) == fetched
    # More than may be kept is fetched all the same.
    assert [each.image for each in await images.fetch([third, second, first, third])] == [
        third, second, first, third,
    ]  # fmt: skip


async def test_errors_name_the_image() -> None:
    broker = MemoryBroker()
    images = Images(broker, RUN)
    image = image_of(pixels(1), (1, 2, 2))
    with pytest.raises(LostDataError, match=f"image {image.hash[:12]} is not at the broker"):
        await images.fetch([image])
    await broker.put_blob(names.image(RUN, image.hash), b"\0" * 17)
    with pytest.raises(InvalidMessageError, match="17 bytes"):
        await images.fetch([image])
