"""Images at the broker: there before the prompts that name them, gone when their step is finished."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.broker.log import read_all
from paceline.controller.batch.dispatch import Ask, Dispatcher, Order
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyTag
from paceline.core.samples.images import LoadedImage
from paceline.core.samples.trajectory import SamplingSpec
from paceline.data.images import ImageSource
from paceline.wire import decode_prompt_group, image_of, unpack_pixels
from support.memory_broker import MemoryBroker
from support.sequencer_run import RUN, config, prompts


class FakeReader:
    """Makes pixels of an image's digest, and counts how often."""

    def __init__(self) -> None:
        self.processed: list[str] = []

    def process(self, source: ImageSource) -> LoadedImage:
        self.processed.append(source.digest)
        pixels = np.full((4, 6), float(source.digest), np.float32)
        return LoadedImage(image=image_of(pixels, (1, 2, 2)), pixels=pixels)


class WatchingBroker(MemoryBroker):
    """Fails where a prompt comes before an image that it names."""

    async def append(self, messages: Any, **options: Any) -> list[str]:
        for message in messages:
            assert all(await self.get_blobs(keys_of(message)))
        return await super().append(messages, **options)


def keys_of(message: Outgoing) -> list[str]:
    return [names.image(RUN, image.hash) for image in decode_prompt_group(message.payload).images]


def source(number: int) -> ImageSource:
    return ImageSource(place=b"", digest=str(number), num_tokens=1, num_patches=4)


def order(step: int, images: dict[int, list[int]], *, with_greedy: bool = False) -> Order:
    made = prompts(7).prompts
    chosen = {i: replace(made[i], images=tuple(map(source, numbers))) for i, numbers in images.items()}
    sampling = SamplingSpec(temperature=1.0, max_tokens=4)
    asks = (
        Ask(purpose=Purpose.TRAIN, num_samples=2, sampling=sampling),
        Ask(purpose=Purpose.GREEDY, num_samples=1, sampling=sampling),
    )
    return Order(
        step=step,
        policy=PolicyTag(version=step - 1, digest="0" * 16),
        prompts=chosen,
        asks=asks if with_greedy else asks[:1],
    )


def dispatcher(broker: MemoryBroker, reader: Any) -> Dispatcher:
    run: Any = SimpleNamespace(config=config(), id=RUN, journal=None)
    return Dispatcher(run, broker, reader)


async def stored(broker: MemoryBroker) -> list[str]:
    """The images at the broker, by the number that they were made of."""
    keys = sorted(key for key in broker._store.blobs if ":image:" in key)
    numbers = []
    for key, blob in zip(keys, await broker.get_blobs(keys), strict=True):
        assert blob is not None
        pixels = np.full((4, 6), np.frombuffer(blob, np.float32)[0], np.float32)
        image = image_of(pixels, (1, 2, 2))
        assert key == names.image(RUN, image.hash)
        assert unpack_pixels(image, blob).pixels.shape == (4, 6)
        numbers.append(f"{pixels[0, 0]:g}")
    return sorted(numbers)


async def test_an_image_is_processed_once_a_step_and_goes_when_its_step_is_finished() -> None:
    broker, reader = WatchingBroker(), FakeReader()
    dispatch = dispatcher(broker, reader)
    sent = await dispatch.dispatch(order(1, {0: [1, 2], 1: [2], 2: []}, with_greedy=True))
    assert sent == [0, 1, 2]
    assert (reader.processed, await stored(broker)) == (["1", "2"], ["1", "2"])
    stream = names.prompts(RUN, 0)
    groups = [decode_prompt_group(entry.payload) async for entry in read_all(broker, stream)]
    assert [len(group.images) for group in groups] == [2, 2, 1, 1, 0, 0]
    assert groups[0].images == groups[1].images == (groups[0].images[0], groups[2].images[0])
    # Further prompts of the same step, say of a refill, find what is there.
    await dispatch.dispatch(order(1, {3: [1, 3]}))
    assert (reader.processed, await stored(broker)) == (["1", "2", "3"], ["1", "2", "3"])
    await dispatch.clean_up(2)
    assert await stored(broker) == []
    await dispatch.dispatch(order(2, {4: [3]}))
    assert (reader.processed[3:], await stored(broker)) == (["3"], ["3"])
    # What is still needed stays.
    await dispatch.clean_up(2)
    assert await stored(broker) == ["3"]


async def test_a_controller_that_starts_again_sends_nothing_twice_and_leaves_nothing() -> None:
    broker = WatchingBroker()
    first = dispatcher(broker, FakeReader())
    await first.dispatch(order(1, {0: [1], 1: [2]}))
    await first.dispatch(order(2, {2: [2], 3: [3]}))
    reader = FakeReader()
    second = dispatcher(broker, reader)
    await second.recall(1)
    await second.clean_up(2)
    assert await stored(broker) == ["2", "3"]
    assert await second.dispatch(order(2, {2: [2], 3: [3], 4: [4]})) == [4]
    assert (reader.processed, await stored(broker)) == (["4"], ["2", "3", "4"])
    await second.clean_up(3)
    assert await stored(broker) == []


async def test_what_the_broker_has_lost_is_stored_again() -> None:
    broker, reader = WatchingBroker(), FakeReader()
    dispatch = dispatcher(broker, reader)
    await dispatch.dispatch(order(1, {0: [1]}))
    await broker.purge(names.prefix(RUN))
    dispatch.forget()
    await dispatch.dispatch(order(1, {0: [1]}))
    assert (reader.processed, await stored(broker)) == (["1", "1"], ["1"])


async def test_a_run_without_images_stores_none() -> None:
    broker = WatchingBroker()
    dispatch = dispatcher(broker, None)
    await dispatch.dispatch(order(1, {0: [], 1: []}))
    await dispatch.clean_up(2)
    assert await stored(broker) == []
