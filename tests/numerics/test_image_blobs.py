"""Images of a rank's rows: fetched once, and checked against their prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import DataError, InvalidMessageError
from paceline.core.samples.images import ImageSpec
from paceline.learner.batch.blobs import fetch_rows
from paceline.learner.batch.types import PackedRow
from support.architectures import tiny_config
from support.image_ranks import published
from support.image_rows import image_rows
from support.learner_fakes import POLICY, DictBlobs

pytestmark = pytest.mark.torch


class CountingBlobs(DictBlobs):
    """Notes the keys that are asked for."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        super().__init__(blobs)
        self.asked: list[str] = []

    def get(self, keys: Any) -> list[bytes]:
        self.asked += keys
        return super().get(keys)


SPEC = ImageSpec.of(tiny_config("qwen2_5_vl"))


def test_a_rank_fetches_the_images_of_its_rows_once() -> None:
    rows = image_rows(samples=2)
    headers, blobs = published(rows)
    store = CountingBlobs(blobs)
    wanted = [6, 2, 3, 0]  # two samples of the second prompt, with one image; the fourth has three
    fetched = fetch_rows(store, headers, wanted, policy=POLICY, vocab_size=96, images=SPEC)
    assert list(fetched) == wanted
    assert len([key for key in store.asked if ":image:" in key]) == 4
    for index in wanted:
        expected = rows[index].images
        for ours, theirs in zip(fetched[index].images, expected, strict=True):
            assert (ours.start, ours.grid, ours.merge_size) == (theirs.start, theirs.grid, theirs.merge_size)
            assert np.array_equal(ours.pixels, theirs.pixels)
    assert fetched[2].images[0].hash == fetched[3].images[0].hash
    texts = CountingBlobs(blobs)
    fetch_rows(texts, headers, [0, 1], policy=POLICY, vocab_size=96)
    assert texts.asked == [headers[0].blob_key, headers[1].blob_key]


def fetch_changed(change: Any, *, spec: ImageSpec | None = SPEC) -> None:
    """Fetches a sample whose row is changed first."""
    headers, blobs = published([change(image_rows()[1])])
    fetch_rows(DictBlobs(blobs), headers, [0], policy=POLICY, vocab_size=96, images=spec)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: with_prompt(row, 5, 7), "needs 6 placeholders side by side, .*; 5 of its tokens"),
        (lambda row: with_prompt(row, 0, SPEC.token_id), "needs 6 placeholders side by side"),
        (
            lambda row: with_prompt(row, 12, SPEC.token_id),
            "has 7 placeholders of images, and its 1 images take 6",
        ),
        (lambda row: with_image(row, grid=(1, 3, 8)), "heights and widths that are multiples of 2"),
        (lambda row: with_image(row, pixels=row.images[0].pixels[:, :-1]), "1 x 4 x 6 patches of 95 numbers"),
    ],
)
def test_images_that_are_not_those_of_the_prompt_are_refused(change: Any, reason: str) -> None:
    with pytest.raises(DataError, match=rf"^trajectory train:1:0:1: .*{reason}"):
        fetch_changed(change)


def test_a_header_that_counts_other_patches_is_refused() -> None:
    headers, blobs = published(image_rows()[1:2])
    wrong = [replace(headers[0], num_patches=20)]
    with pytest.raises(DataError, match="train:1:0:1 has images of 24 patches, its header says 20"):
        fetch_rows(DictBlobs(blobs), wrong, [0], policy=POLICY, vocab_size=96, images=SPEC)


def test_a_model_of_text_alone_is_given_no_images() -> None:
    with pytest.raises(DataError, match="train:1:0:1 has images, and the model takes only text"):
        fetch_changed(lambda row: row, spec=None)


def test_pixels_of_another_image_are_refused() -> None:
    headers, blobs = published(image_rows()[1:2])
    key = next(key for key in blobs if ":image:" in key)
    blobs[key] = blobs[key][4:] + blobs[key][:4]
    with pytest.raises(InvalidMessageError, match="holds other pixels"):
        fetch_rows(DictBlobs(blobs), headers, [0], policy=POLICY, vocab_size=96, images=SPEC)


def with_prompt(row: PackedRow, place: int, token: int) -> PackedRow:
    prompt = row.prompt_token_ids.copy()
    prompt[place] = token
    return replace(row, prompt_token_ids=prompt)


def with_image(row: PackedRow, **changes: Any) -> PackedRow:
    return replace(row, images=(replace(row.images[0], **changes),))
