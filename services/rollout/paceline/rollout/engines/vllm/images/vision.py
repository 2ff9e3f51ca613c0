"""Passes prompts with images to vLLM as processed inputs.

vLLM's own processing would expand the placeholders a second time. vLLM gets the same as the learner: the
tokens, and the patches of each image. An image's patches are sent to the engine's process once.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceline.core.errors import DataError
from paceline.core.samples.images import ImageSpec, placeholder_ranges
from paceline.core.samples.images import PlaceholderRange as TokenRange
from paceline.models.facts import config_tree
from paceline.rollout.engines.base import SampleRequest, refused

LATER: Final = ("mm_device_do_normalize",)
"""Arguments that vLLM 0.24 lacks, together with the features that they switch off."""

KEPT_GIB: Final = 0.25
"""Size of the patches that the engine's process keeps; a single image has at most a quarter of it."""


def has_tower(folder: Path) -> bool:
    """Returns whether the model in this folder turns images into tokens."""
    return "vision_config" in config_tree(folder)


def arguments(*, on_cpu: bool) -> dict[str, Any]:
    """Returns arguments of AsyncEngineArgs for a model with a vision tower."""
    chosen: dict[str, Any] = {
        # vLLM creates its image processor at the start, although it is not used.
        "skip_tokenizer_init": False,
        # Since 0.32 vLLM would normalise the pixels, which are already normalised.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": KEPT_GIB,
        "limit_mm_per_prompt": {"video": 0},
    }
    # Profiling processes an image to measure its memory, which is useful only on a GPU.
    return chosen | ({"skip_mm_profiling": True} if on_cpu else {})


def write_processor(folder: Path) -> None:
    """Writes the processor's files: vLLM loads them with models that take images, but never uses them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<|image_pad|>": 1, "<|video_pad|>": 2}
    words = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    tower = config_tree(folder)["vision_config"]
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
    """Returns vLLM's input for a prompt with images.

    Raises:
        InvalidMessageError: the placeholders are not those of the images, or the model takes none.
    """
    import torch
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    ranges = _ranges(request, config)
    grids = torch.tensor([loaded.image.grid for loaded in request.images])
    pixels = torch.from_numpy(np.concatenate([loaded.pixels for loaded in request.images]))
    items = MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": pixels, "image_grid_thw": grids},
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )
    return mm_input(
        list(request.prompt_token_ids),
        items,
        # The keys by which vLLM caches the tower's output for other requests with the same image.
        {"image": [f"{loaded.image.hash}{request.cache_salt}" for loaded in request.images]},
        {"image": [PlaceholderRange(offset=first, length=length) for first, length in ranges]},
        cache_salt=request.cache_salt or None,
    )


class ImageSender:
    """Sends prompts with images to the engine's process; sends patches only if they are not cached there.

    vLLM has a cache of patches in that process and a list of its contents in this one. Both evict the least
    recently used image, so they agree as long as they see the same requests in the same order. If the list
    lacks an image, the image is only sent again.
    """

    def __init__(self) -> None:
        self._order = asyncio.Lock()

    async def send(self, llm: Any, request_id: str, prompt: Any, params: Any) -> Any:
        """Calls AsyncLLM's `add_request`, without the patches that the engine's process has."""
        async with self._order:
            listed = llm.renderer.mm_processor_cache
            # Looks up all images before adding one, as the engine does, because adding may evict another.
            for image_hash in prompt["mm_hashes"]["image"] if listed is not None else ():
                listed.touch_sender_cache_item(image_hash)
            llm.input_processor.inject_into_mm_cache(prompt["mm_hashes"], prompt["mm_kwargs"])
            return await llm.add_request(request_id, prompt, params)

    def forget(self, llm: Any) -> None:
        """Forgets which images were sent, because after a failure the engine's cache is not known."""
        llm.renderer.clear_mm_cache()


def _ranges(request: SampleRequest, config: Any) -> tuple[TokenRange, ...]:
    """Returns each image's placeholders; checks shapes, because wrong ones would end the entire engine.

    Raises:
        InvalidMessageError: the images do not fit the prompt or the model.
    """
    if getattr(config, "vision_config", None) is None:
        raise refused(request, f"its prompt has images, but a model of type {config.model_type} takes none")
    try:
        return placeholder_ranges(request.prompt_token_ids, request.images, ImageSpec.of(config))
    except DataError as error:
        raise refused(request, error) from error
