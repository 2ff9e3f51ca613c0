"""Fetches the images of prompts: each once, by its hash; the ones used last are kept."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from paceline.broker import names
from paceline.broker.base import Broker
from paceline.core.errors import LostDataError
from paceline.core.samples.images import Image, LoadedImage
from paceline.wire import unpack_pixels

MAX_KEPT_BYTES = 256 * 2**20


class Images:
    """The images of a run's prompts.

    Args:
        max_kept_bytes: most bytes of pixels kept for repeated prompts (greedy answers, further deliveries).
    """

    def __init__(self, broker: Broker, run_id: str, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._broker, self._run_id, self._max_kept_bytes = broker, run_id, max_kept_bytes
        self._kept: OrderedDict[Image, LoadedImage] = OrderedDict()
        self._kept_bytes = 0

    async def fetch(self, images: Sequence[Image]) -> tuple[LoadedImage, ...]:
        """Returns the images with their pixels, in order.

        Raises:
            LostDataError: the broker lacks an image.
            InvalidMessageError: a blob holds other pixels.
        """
        loaded = {image: self._kept[image] for image in images if image in self._kept}
        missing = [image for image in dict.fromkeys(images) if image not in loaded]
        if missing:
            blobs = await self._broker.get_blobs([names.image(self._run_id, image.hash) for image in missing])
            for image, blob in zip(missing, blobs, strict=True):
                if blob is None:
                    raise LostDataError(
                        f"image {image.hash[:12]} is not at the broker: its step is over, or the broker has "
                        "lost the run's data"
                    )
                loaded[image] = await asyncio.to_thread(unpack_pixels, image, blob)
        for image in loaded:
            self._keep(loaded[image])
        return tuple(loaded[image] for image in images)

    def _keep(self, loaded: LoadedImage) -> None:
        if self._kept.pop(loaded.image, None) is None:
            self._kept_bytes += loaded.pixels.nbytes
        self._kept[loaded.image] = loaded
        while self._kept_bytes > self._max_kept_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.pixels.nbytes
