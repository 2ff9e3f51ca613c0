"""Reads the images of prompts: finds them in rows, counts their tokens, makes their pixels.

row -> sources (path or bytes) -> opened: number of tokens -> (when the prompt is sent) processed: pixels

The model's image processor makes the pixels once, in the controller: if two processors disagreed, policy and
learner would see different images. It needs Pillow and numpy, but not torchvision.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from paceline.core.errors import DataError, EnvironmentLackError, ModelError
from paceline.core.samples.images import LoadedImage
from paceline.data.rows import Row, value_at
from paceline.models.facts import MODELS_WITH_IMAGES, family_of
from paceline.wire import LIMITS, image_of

if TYPE_CHECKING:
    from paceline.config.data import DataConfig
    from paceline.config.training.tuning import PairDataConfig

_CHANNELS = 3

PLACEHOLDER = "<image>"
"""Marks the place of an image in a prompt's text"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSource:
    """An image of a row: a file or its bytes. `digest` is a sha256 over the bytes."""

    place: Path | bytes
    digest: str
    num_tokens: int
    num_patches: int


class ImageReader:
    """Reads the images of rows for one model.

    Args:
        image_token_id: token id that stands in a prompt for each token of an image.
    """

    def __init__(self, column: str, processor: Any, image_token_id: int) -> None:
        self.column, self.image_token_id = column, image_token_id
        self._processor = processor

    @classmethod
    def load(cls, config: DataConfig | PairDataConfig, folder: str | Path) -> ImageReader | None:
        """Returns the reader for `data.image_key` and the model in `folder`; None without images.

        Raises:
            ModelError: the model takes no images, or its folder has no image processor.
            EnvironmentLackError: Pillow is not installed.
        """
        if config.image_key is None:
            return None
        path = Path(folder)
        tree = json.loads((path / "config.json").read_text(encoding="utf-8"))
        kind = tree.get("model_type")
        if "vision_config" not in tree or not family_of(kind).takes_images:
            what = "has no vision tower" if "vision_config" not in tree else "is not supported with images"
            raise ModelError(
                f"data.image_key is {config.image_key!r}, and the model in {path} ({kind}) {what}; "
                f"take a model of type {' or '.join(MODELS_WITH_IMAGES)}, or leave data.image_key out"
            )
        if not (path / "preprocessor_config.json").is_file():
            raise ModelError(
                f"model folder {path} has no preprocessor_config.json, which says how images become patches; "
                "copy it from the model's source"
            )
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise EnvironmentLackError(
                "data.image_key needs Pillow: pip install 'paceline[images]'"
            ) from error
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(str(path), backend="pil", local_files_only=True)
        if config.max_pixels is not None:
            processor.size = {**dict(processor.size), "longest_edge": config.max_pixels}
        return cls(config.image_key, processor, int(tree["image_token_id"]))

    def sources(self, row: Row, folder: Path) -> tuple[ImageSource, ...]:
        """Opens the images of a row; paths are relative to `folder`.

        Raises:
            DataError: an image is missing or invalid.
        """
        value = value_at(row, self.column)
        if value is None:
            return ()
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(self._source(number, each, folder) for number, each in enumerate(values))

    def _source(self, number: int, value: Any, folder: Path) -> ImageSource:
        where = f"image {number} of column {self.column!r}"
        if isinstance(value, Mapping):
            # Hugging Face's data sets hold bytes, or the path of a file.
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            place: Path | bytes = folder / value
        elif isinstance(value, bytes):
            place = value
        else:
            raise DataError(
                f"{where} is a {type(value).__name__}; give the path of a file, its bytes, or {{bytes, path}}"
            )
        content = _content(place, where)
        width, height = _opened(content, where).size
        try:
            num_patches = self._processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise DataError(f"{where} has {width} x {height} pixels: {error}") from error
        patch = _CHANNELS * self._processor.temporal_patch_size * self._processor.patch_size**2
        _check_size(where, 4 * num_patches * patch)
        return ImageSource(
            place=place,
            digest=hashlib.sha256(content).hexdigest(),
            num_tokens=num_patches // self._processor.merge_size**2,
            num_patches=num_patches,
        )

    def process(self, source: ImageSource) -> LoadedImage:
        """Returns the image's pixels in the model's form.

        Raises:
            DataError: the file has changed since the rows were read, or cannot be decoded.
        """
        where = str(source.place) if isinstance(source.place, Path) else "an image in the data"
        content = _content(source.place, where)
        if hashlib.sha256(content).hexdigest() != source.digest:
            raise DataError(f"{where} has changed since the run has read it; leave a run's data unchanged")
        try:
            output = self._processor([_opened(content, where).convert("RGB")])
        except OSError as error:
            _broken(where, error)
        pixels = np.asarray(output["pixel_values"], dtype=np.float32)
        _check_size(where, pixels.nbytes)
        time, height, width = (int(size) for size in output["image_grid_thw"][0])
        return LoadedImage(image=image_of(pixels, (time, height, width)), pixels=pixels)


def with_images(value: object, num_images: int) -> list[dict[str, Any]]:
    """Returns chat messages with images as content parts, as chat templates of such models expect.

    `<image>` in a text, or a part of type image, marks an image's place. Without marks, the images come
    before the text of the first user message.

    Raises:
        DataError: the prompt is plain text, or marks another number of images.
    """
    if not isinstance(value, list):
        raise DataError(
            "with data.image_key a prompt must be chat messages: set data.prompt_format: chat, or write a "
            "list of {role, content}"
        )
    messages = [{**message, "content": _parts(message.get("content"))} for message in value]
    shown = sum(part["type"] == "image" for message in messages for part in message["content"])
    if not shown and num_images:
        first = next((message for message in messages if message.get("role") == "user"), messages[0])
        first["content"][:0] = [{"type": "image"}] * num_images
        shown = num_images
    if shown != num_images:
        raise DataError(
            f"the prompt has {shown} places for images ({PLACEHOLDER}, or parts of type image), and the row "
            f"{num_images} images; give as many images as places"
        )
    return messages


def _parts(content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        first, *rest = content.split(PLACEHOLDER)
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
        for text in rest:
            parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
        return parts
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise DataError(f"a message's content is a {type(content).__name__}; write text or a list of parts")
    kinds = {part.get("type") for part in content}
    if not kinds <= {"text", "image"}:
        raise DataError(f"a message has parts of type {', '.join(map(str, kinds))}; text and image are known")
    # Parquet fills in null fields, as in {type: text, text: ..., image: null}; templates would see an image.
    return [
        {"type": "image"}
        if part["type"] == "image"
        else {"type": "text", "text": str(part.get("text") or "")}
        for part in content
    ]


def expanded(token_ids: Sequence[int], image_token_id: int, sources: Sequence[ImageSource]) -> list[int]:
    """Repeats each image's placeholder once per token of the image.

    Raises:
        DataError: there are more or fewer placeholders than images.
    """
    placeholders = sum(token == image_token_id for token in token_ids)
    if placeholders != len(sources):
        raise DataError(
            f"the rendered prompt has {placeholders} image tokens for {len(sources)} images: the text holds "
            "the model's own image token, or the chat template makes another number; change the text, "
            "or take the model's own template"
        )
    counts = iter(source.num_tokens for source in sources)
    ids: list[int] = []
    for token in token_ids:
        ids += [token] * (next(counts) if token == image_token_id else 1)
    return ids


def _content(place: Path | bytes, where: str) -> bytes:
    if isinstance(place, bytes):
        return place
    try:
        return place.read_bytes()
    except OSError as error:
        raise DataError(
            f"{where}: {place} cannot be read ({error.strerror}); paths are relative to the data file"
        ) from error


def _check_size(where: str, num_bytes: int) -> None:
    if num_bytes > LIMITS.max_bytes:
        raise DataError(
            f"{where} takes {num_bytes >> 20} MiB as patches, at most {LIMITS.max_bytes >> 20} MiB "
            "travel; lower data.max_pixels"
        )


def _opened(content: bytes, where: str) -> Any:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(content))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        _broken(where, error)


def _broken(where: str, error: Exception) -> NoReturn:
    raise DataError(f"{where} cannot be decoded ({error}); make it again, or drop the row") from error
