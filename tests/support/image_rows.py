"""Rows whose prompts have images of drawn pixels, and their log-probs by transformers itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from paceline.learner.batch.types import PackedRow, PromptImage
from support.architectures import tiny_config

KIND = "qwen2_5_vl"
Grid = tuple[int, int, int]
Part = int | Grid
"""A number of text tokens, or an image's grid in patches; its tokens stand between two of their own."""

PROMPTS: tuple[tuple[Part, ...], ...] = (
    (5,),
    (3, (1, 4, 6), 4),
    ((1, 8, 4), (1, 2, 2), 3),
    (2, (1, 4, 4), (1, 4, 4), 1, (1, 6, 10), 2),
    (9,),
    ((1, 2, 8),),
)
"""None, one, several in a row, one at each end."""


def write_tiny_vl(folder: Path, *, kind: str = KIND, seed: int = 0, **changes: Any) -> Path:
    """A tiny model of this kind as transformers writes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForImageTextToText.from_config(tiny_config(kind, **changes))
        for parameter in model.model.visual.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
    model.save_pretrained(folder)
    return folder


def image_rows(
    prompts: Sequence[Sequence[Part]] = PROMPTS, *, config: Any = None, samples: int = 1, seed: int = 0
) -> list[PackedRow]:
    """Rows of several samples per prompt. A response may contain the image's token, which is text there."""
    config = tiny_config(KIND) if config is None else config
    rng, rows = np.random.default_rng(seed), list[PackedRow]()
    for parts in prompts:
        tokens, images = _prompt(parts, config, rng)
        for _ in range(samples):
            length = int(rng.integers(2, 8))
            response = rng.integers(2, config.image_token_id, length).astype(np.int32)
            response[length // 2] = config.image_token_id
            mask = np.ones(length, np.uint8)
            rows.append(
                PackedRow(
                    index=len(rows),
                    prompt_token_ids=tokens,
                    response_token_ids=response,
                    response_mask=mask,
                    response_log_probs=np.full(length, -1.0, np.float32),
                    images=images,
                )
            )
    return rows


def _prompt(
    parts: Sequence[Part], config: Any, rng: np.random.Generator
) -> tuple[np.ndarray[Any, np.dtype[np.int32]], tuple[PromptImage, ...]]:
    vision = config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    tokens, images = list[int](), list[PromptImage]()
    for part in parts:
        if isinstance(part, int):
            tokens += rng.integers(2, config.image_token_id, part).tolist()
            continue
        pixels = rng.normal(size=(part[0] * part[1] * part[2], width)).astype(np.float32)
        tokens.append(config.vision_start_token_id)
        image = PromptImage(
            hash=hashlib.sha256(pixels.tobytes()).hexdigest(),
            start=len(tokens),
            grid=part,
            merge_size=vision.spatial_merge_size,
            pixels=pixels,
        )
        images.append(image)
        tokens += [config.image_token_id] * image.num_tokens
        tokens.append(config.vision_end_token_id)
    return np.array(tokens, np.int32), tuple(images)


def reference_positions(lm: Any, row: PackedRow) -> Tensor:
    """(3, T) positions of prompt and response, by transformers."""
    ids, kinds, grids = _inputs(row)
    positions, _ = lm.model.get_rope_index(ids, kinds, image_grid_thw=grids)
    return torch.as_tensor(positions[:, 0])


def reference_log_probs(lm: Any, row: PackedRow, temperature: float = 1.0) -> Tensor:
    """Log-probs of the response, by transformers' own forward pass of one row."""
    ids, kinds, grids = _inputs(row)
    pixels = torch.from_numpy(np.concatenate([image.pixels for image in row.images])) if row.images else None
    start = len(row.prompt_token_ids)
    logits = reference_logits(lm, ids, kinds, pixels, grids)[start - 1 : -1]
    scores = (logits / temperature).log_softmax(-1)
    return scores.gather(-1, ids[0, start:, None]).squeeze(-1)


def reference_logits(
    lm: Any, ids: Tensor, kinds: Tensor, pixels: Tensor | None, grids: Tensor | None
) -> Tensor:
    """Logits (T, V) by transformers' own forward pass of one sequence (1, T); `kinds` is 1 for images.

    Its own search for placeholders would take those of the response, too, which are text.
    """
    places = (kinds == 1).unsqueeze(-1)
    images = {} if pixels is None else {"pixel_values": pixels, "image_grid_thw": grids}
    masks = (places, torch.zeros_like(places))
    with mock.patch.object(lm.model, "get_placeholder_mask", return_value=masks):
        return lm(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **images).logits[0]


def _inputs(row: PackedRow) -> tuple[Tensor, Tensor, Tensor | None]:
    """Token ids (1, T), their kinds (1, T), 1 for images, and the images' grids."""
    ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.response_token_ids]).astype(np.int64))
    kinds = torch.zeros_like(ids)
    for image in row.images:
        kinds[image.start : image.start + image.num_tokens] = 1
    grids = torch.tensor([image.grid for image in row.images]) if row.images else None
    return ids[None], kinds[None], grids
