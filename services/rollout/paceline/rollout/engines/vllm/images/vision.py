"""Passes prompts with images to vLLM as processed inputs.

vLLM's own processing would expand the placeholders a second time. What is passed on is what the learner sees,
too: the tokens, and the patches of each image. An image's patches are sent to the engine's process once.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import numpy as np

from paceline.core.errors import DataError, InvalidMessageError
from paceline.core.samples.images import ImageSpec, PlaceholderRange, placeholder_ranges
from paceline.rollout.engines.base import SampleRequest

LATER: Final = ("mm_device_do_normalize",)
"""Arguments that vLLM 0.24 lacks, together with the features that they switch off."""

KEPT_GIB: Final = 0.25
"""Patches of images that the engine's process keeps; a single image has at most a quarter of that."""


def has_tower(folder: Path) -> bool:
    """Whether the model in this folder turns images into tokens."""
    try:
        return "vision_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def arguments(*, on_cpu: bool) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs for a model with a vision tower."""
    chosen: dict[str, Any] = {
        # vLLM makes its processor of images at the start, though nothing is given to it.
        "skip_tokenizer_init": False,
        # Since 0.32 vLLM would normalise pixels that are normalised already.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": KEPT_GIB,
        "limit_mm_per_prompt": {"video": 0},
    }
    # Profiling processes an image to measure its memory, which is useful only on a GPU.
    return chosen | ({"skip_mm_profiling": True} if on_cpu else {})


def write_processor(folder: Path) -> None:
    """Writes what vLLM loads beside a model that takes images; nothing is processed with it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<|image_pad|>": 1, "<|video_pad|>": 2}
    words = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    tower = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vision_config"]
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": tower["patch_size"],
        "temporal_patch_size": tower["temporal_patch_size"],
        "merge_size": tower["spatial_merge_size"],
        "min_pixels": (tower["patch_size"] * tower["spatial_merge_size"]) ** 2,
        "max_pixels": 64 * (tower["patch_size"] * tower["spatial_merge_size"]) ** 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def prompt_with_images(request: SampleRequest, config: Any) -> Any:
    """vLLM's input for a prompt with images.

    Args:
        config: the model's Hugging Face configuration.

    Raises:
        InvalidMessageError: the placeholders are not those of the images, or the model takes none.
    """
    vllm, ranges = _vllm(), _ranges(request, config)
    grids = vllm.torch.tensor([loaded.image.grid for loaded in request.images])
    pixels = vllm.torch.from_numpy(np.concatenate([loaded.pixels for loaded in request.images]))
    items = vllm.MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": pixels, "image_grid_thw": grids},
        {
            "pixel_values": vllm.MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "image_grid_thw": vllm.MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )
    return vllm.mm_input(
        list(request.prompt_token_ids),
        items,
        # The keys by which vLLM caches the tower's output for other requests with the same image.
        {"image": [f"{loaded.image.hash}{request.cache_salt}" for loaded in request.images]},
        {"image": [vllm.PlaceholderRange(offset=first, length=length) for first, length in ranges]},
        cache_salt=request.cache_salt or None,
    )


class ImageSender:
    """Sends prompts with images to the engine's process, each image's patches once while they are kept there.

    vLLM has a cache of patches in that process and a list of its contents in this one. Both drop what was
    used least recently, so they agree as long as they see the same requests in the same order. A list that
    lacks an image does no harm: the image is sent again.
    """

    def __init__(self) -> None:
        self._order = asyncio.Lock()

    async def send(self, llm: Any, request_id: str, prompt: Any, params: Any) -> Any:
        """AsyncLLM's `add_request`; takes patches that the engine's process has out of the prompt."""
        async with self._order:
            listed = llm.renderer.mm_processor_cache
            # Look up all before adding one, as on the other side, because adding one may drop another.
            for image_hash in prompt["mm_hashes"]["image"] if listed is not None else ():
                listed.touch_sender_cache_item(image_hash)
            llm.input_processor.inject_into_mm_cache(prompt["mm_hashes"], prompt["mm_kwargs"])
            return await llm.add_request(request_id, prompt, params)

    def forget(self, llm: Any) -> None:
        """Has each image sent again from now on: after a failure it is not known what the other side has."""
        llm.renderer.clear_mm_cache()


def _ranges(request: SampleRequest, config: Any) -> tuple[PlaceholderRange, ...]:
    """Each image's placeholders; wrong shapes would end the engine, and not only the request.

    Raises:
        InvalidMessageError: the images do not fit the prompt or the model.
    """
    if getattr(config, "vision_config", None) is None:
        _refuse(request, f"its prompt has images, and a model of type {config.model_type} takes none")
    try:
        return placeholder_ranges(request.prompt_token_ids, request.images, ImageSpec.of(config))
    except DataError as error:
        _refuse(request, str(error), error)


def _refuse(request: SampleRequest, why: str, cause: Exception | None = None) -> NoReturn:
    raise InvalidMessageError(
        f"the engine refuses request {request.request_id}: {why}", reason="refused_by_engine"
    ) from cause


@cache
def _vllm() -> Any:
    """The parts of vLLM that a prompt with images needs; imported where there is one."""
    import torch
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    return SimpleNamespace(
        torch=torch,
        mm_input=mm_input,
        MultiModalFieldConfig=MultiModalFieldConfig,
        MultiModalKwargsItems=MultiModalKwargsItems,
        PlaceholderRange=PlaceholderRange,
    )
