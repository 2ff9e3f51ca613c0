"""The images of prompts in progress: the broker holds them, by hash, while a step needs them.

prompt sent -> processed, stored unless it is there -> (fetched by hash) -> step finished: removed
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.broker import names
from paceline.broker.base import Broker
from paceline.core.samples.images import Image
from paceline.data.images import ImageReader, ImageSource
from paceline.wire import pack_pixels


class PromptImages:
    """Stores images for prompts, and removes them.

    Args:
        reader: makes an image's pixels; None if prompts have no images.
    """

    def __init__(self, broker: Broker, run_id: str, reader: ImageReader | None) -> None:
        self._broker, self._run_id, self._reader = broker, run_id, reader
        self._known: dict[str, Image] = {}
        self._needed: dict[str, int] = {}

    @property
    def expected(self) -> bool:
        """Whether the run's prompts may have images."""
        return self._reader is not None

    async def store(self, sources: Sequence[ImageSource], step: int) -> tuple[Image, ...]:
        """Stores the images at the broker until `step` is finished.

        Raises:
            DataError: an image cannot be made any more.
        """
        return tuple([await self._store(source, step) for source in sources])

    async def _store(self, source: ImageSource, step: int) -> Image:
        assert self._reader is not None, "only a reader supplies prompts with images"
        image = self._known.get(source.digest)
        if image is None or image.hash not in self._needed:
            loaded = await asyncio.to_thread(self._reader.process, source)
            image = self._known[source.digest] = loaded.image
            await self._broker.put_blob(names.image(self._run_id, image.hash), pack_pixels(loaded.pixels))
        self.note([image], step)
        return image

    def note(self, images: Sequence[Image], step: int) -> None:
        """Notes that a step needs images that the broker already holds."""
        for image in images:
            self._needed[image.hash] = max(step, self._needed.get(image.hash, 0))

    async def drop(self, before: int) -> None:
        """Removes the images that no step from `before` on needs."""
        over = [image_hash for image_hash, step in self._needed.items() if step < before]
        if over:
            await self._broker.delete_blobs([names.image(self._run_id, image_hash) for image_hash in over])
        for image_hash in over:
            del self._needed[image_hash]

    def forget(self) -> None:
        """Notes that the broker has lost all images."""
        self._needed.clear()
