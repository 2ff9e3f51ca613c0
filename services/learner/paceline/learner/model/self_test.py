"""Tests a model: do log-probs over packed sequences equal those of each sequence alone?

config.json -> a small model of the same kind with drawn weights -> packed log-probs, twice
            -> log-probs by transformers' own `ForCausalLM`, a sequence at a time -> the largest difference

The small model can be kept to compare an engine with it. If the model takes images, some rows have images.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.core.errors import ModelError
from paceline.data.frozen_networks import check_frozen_networks
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow, PromptImage
from paceline.learner.model import architectures
from paceline.learner.model.loading import check_stored, draw_normal, empty_lm, give_storage, read_config
from paceline.learner.model.networks import PolicyNetwork
from paceline.models.facts import family_of
from paceline.weights import corrections

TOLERANCE = 1e-4
"""Largest difference of a log-prob in float32: rounding makes 1e-6 to 1e-5, a wrong layer 0.1 and more."""

_LENGTHS = ((3, 2), (9, 4), (5, 6), (5, 6), (14, 10))
_WINDOW = 8
_CHUNK = 32
"""Blocks of keys and values in an engine, into which a chunk is divided, are no smaller on a CPU."""
_BEYOND_CHUNK = (30, 10)
"""Prompt and response of one more row, for a model with chunks."""
_SMALL = {
    "vocab_size": 256,
    "vocab_size_per_layer_input": 256,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "sliding_window": _WINDOW,
    "attention_chunk_size": _CHUNK,
    "floor_scale": _WINDOW,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
}
"""Upper bounds for sizes that do not affect the test, and for windows and the like, which its rows exceed."""

_NOT_BY_LAYER = ("token_id", "moe_layers")
"""Ends of names of lists that have no entry per layer, however long they are."""

_NUM_FEATURES = 2
"""Number of the tower's layers, all of which give states to the decoder if the model has DeepStack."""

_IMAGES = {1: ((2, (1, 6, 4)),), 4: ((0, (1, 4, 2)), (3, (1, 6, 6)))}
"""Images by row: where each begins in the prompt, and its grid in patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """The outcome of a test that passed."""

    architecture: str
    num_layers: int
    largest_error: float
    seconds: float
    passes_differ_by: float = 0.0
    has_images: bool = False

    def __str__(self) -> str:
        images = ", in prompts with images, too" if self.has_images else ""
        apart = f"differ by {self.passes_differ_by:.1e}" if self.passes_differ_by else "are equal"
        return (
            f"{self.architecture}, {self.num_layers} layers: packed log-probs are those of each sequence "
            f"alone{images} (largest difference {self.largest_error:.1e}, at most {TOLERANCE:g}), two passes "
            f"{apart}, no random numbers are used; {self.seconds:.1f} s"
        )


def check_models(config: RunConfig, *, keep: Path | None = None) -> list[SelfTest]:
    """Tests the models of a run: its policy, and critic and frozen networks from other folders.

    Args:
        keep: folder for the policy's small model, as in `check_model`.

    Raises:
        ModelError: a model is refused, its numbers are wrong, or its tokens differ from the policy's.
    """
    check_frozen_networks(config)
    critic = [config.critic.path] if "critic" in config.needs and config.critic.path else []
    folders = [config.model.path, *(network.path for network in config.algorithm.networks.values()), *critic]
    outcomes = [
        check_model(
            folder,
            longest=config.max_model_len,
            trust_architecture=config.model.trust_architecture,
            keep=keep if index == 0 else None,
        )
        for index, folder in enumerate(folders)
    ]
    if config.model.load_format != "random":
        for index, folder in enumerate(folders):
            check_stored(folder, needs_head=index < len(folders) - len(critic))
    return outcomes


def check_model(
    folder: str | Path, *, longest: int, trust_architecture: bool, keep: Path | None = None
) -> SelfTest:
    """Tests whether a model can be trained correctly; reads only its config.json.

    Args:
        longest: prompt and response tokens of the longest row of the run.
        trust_architecture: accept an architecture outside the table if the test passes.
        keep: folder for the small model in transformers' form, and `scored_rows.json` with the rows' tokens,
            images and log-probs. The images' pixels are in `images.npz`, by hash.

    Raises:
        ModelError: the model is refused, or its numbers are wrong.
    """
    config = read_config(folder)
    architectures.require_length(config, longest)
    try:
        architectures.require_known(config, trust_architecture=trust_architecture)
    except ModelError:
        # The layers' error is more specific than "not in the table".
        architectures.require_layers(empty_lm(shrink(config)))
        raise
    return run(config, keep=keep)


def run(config: Any, *, keep: Path | None = None) -> SelfTest:
    """Runs the test on a small model of the configuration's kind; keeps the model in `keep` if given.

    Raises:
        ModelError: the model is refused, or its numbers are wrong.
    """
    began = time.perf_counter()
    small = shrink(config)
    lm = _drawn(small)
    rows = _rows(small)
    name = type(lm).__name__
    with torch.no_grad():
        first, apart = _two_alike(lm, rows)
        reference = _reference(lm, small)
        error = _apart(first, _one_by_one(reference, rows))
    if not error <= TOLERANCE:
        raise ModelError(
            f"{name}: log-probs over packed sequences differ from those of each sequence alone by up to "
            f"{error:.2g} nats (allowed {TOLERANCE:g}), so it would be trained on wrong numbers; use one of "
            "the architectures of docs/models.md"
        )
    if keep is not None:
        _keep(reference, rows, first, keep)
    return SelfTest(
        architecture=name,
        num_layers=int(small.get_text_config().num_hidden_layers),
        largest_error=error,
        seconds=time.perf_counter() - began,
        passes_differ_by=apart,
        has_images=any(row.images for row in rows),
    )


def _two_alike(lm: Any, rows: Sequence[PackedRow]) -> tuple[Tensor, float]:
    """Returns the log-probs of a pass that a later one confirms, and how far the first two are apart.

    Not compared bit for bit, and one pass of three may differ: at two of many hundred starts, on busy
    machines with 16 and 32 cores, a single pass was off by 7e-5 and 3e-4.

    Raises:
        ModelError: random numbers were drawn, or no two passes agree.
    """
    generator = torch.random.get_rng_state()
    passes = [_packed(lm, rows) for _ in range(2)]
    apart = _apart(*passes)
    if not apart <= TOLERANCE:
        passes.append(_packed(lm, rows))
    confirmed = [log_probs for log_probs in passes[:-1] if _apart(log_probs, passes[-1]) <= TOLERANCE]
    if not confirmed or not torch.equal(generator, torch.random.get_rng_state()):
        raise ModelError(
            f"{type(lm).__name__}: two forward passes over the same tokens differ by up to {apart:.2g} nats "
            f"(allowed {TOLERANCE:g} and no random numbers), so no ratio could be trusted; the model draws "
            "random numbers somewhere; use another model (docs/models.md)"
        )
    return confirmed[0], apart


def _apart(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())


def shrink(config: Any) -> Any:
    """Returns a small configuration: a layer of each kind, at least two or three; small vocabulary and MLPs.

    Hidden size and heads stay, because many architectures tie them to each other.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    num_layers = int(text.num_hidden_layers)
    per_layer = {
        name: list(value)
        for name, value in vars(text).items()
        if isinstance(value, list | tuple) and len(value) == num_layers and not name.endswith(_NOT_BY_LAYER)
    }
    shares_keys = num_layers - int(getattr(text, "num_kv_shared_layers", 0) or 0)  # first to share keys
    sparse = getattr(text, "moe_layers", None)
    sorts: dict[tuple[str, ...], int] = {}
    for layer in range(num_layers):
        own = (str(layer >= shares_keys), str(sparse is None or layer in sparse))
        sorts.setdefault((*own, *(repr(values[layer]) for values in per_layer.values())), layer)
    chosen = sorted(sorts.values())
    if sparse is not None:  # engines count layers to tell those with experts
        chosen = list(range(chosen[-1] + 1))
    # Layers to which the tower gives states have another one above them.
    least = 1 + (_NUM_FEATURES if _gives_features(config) else 1)
    while len(chosen) < min(least, num_layers):
        chosen.append(chosen[-1])
    for name, values in per_layer.items():
        setattr(text, name, [values[layer] for layer in chosen])
    _keep_layers(text, chosen)
    for name, most in _SMALL.items():
        value = getattr(text, name, None)
        if name == "sliding_window" and family_of(config.model_type).has_longer_window_in_engines:
            continue  # no row of a run exceeds it
        if isinstance(value, int) and value > most:
            setattr(text, name, most)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    if family_of(config.model_type).takes_images:
        _shrink_tower(small)
    return small


def _gives_features(config: Any) -> bool:
    """Returns whether the vision tower gives states to decoder layers, too (DeepStack)."""
    return bool(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None))


def _keep_layers(text: Any, chosen: Sequence[int]) -> None:
    """Adapts settings that count or number layers to the kept layers."""
    if num_shared := getattr(text, "num_kv_shared_layers", 0):
        first = text.num_hidden_layers - num_shared
        text.num_kv_shared_layers = sum(layer >= first for layer in chosen)
    own = text.to_dict().get("per_layer_config") or {}
    if sparse := getattr(text, "moe_layers", None):
        text.moe_layers = [new for new, layer in enumerate(chosen) if layer in sparse]
    text.num_hidden_layers = len(chosen)
    if own:
        own = {int(layer): values for layer, values in own.items()}
        text.per_layer_config = {new: own[layer] for new, layer in enumerate(chosen) if layer in own}


def _shrink_tower(small: Any) -> None:
    """Keeps a layer with windows, which the images exceed, and one without; lowers image token ids.

    Both layers give features to the decoder if some layers did.
    """
    vision, most = small.vision_config, small.get_text_config().vocab_size
    vision.update(
        {
            "depth": _NUM_FEATURES,
            "fullatt_block_indexes": [1],
            "window_size": 2 * vision.spatial_merge_size * vision.patch_size,
            "intermediate_size": min(vision.intermediate_size, _SMALL["intermediate_size"]),
        }
    )
    if _gives_features(small):
        vision.deepstack_visual_indexes = list(range(_NUM_FEATURES))
    tokens = ("image", "video", "vision_start", "vision_end")
    small.update({f"{token}_token_id": most - 1 - place for place, token in enumerate(tokens)})


def _drawn(config: Any) -> Any:
    """Returns the learner's form of a model; its weights keep states and logits near 1, so errors show."""
    lm = empty_lm(config)
    architectures.require_layers(lm)
    give_storage(lm, lm, torch.device("cpu"), torch.float32)
    lm.tie_weights()
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if name.endswith(corrections.PARTS):
                parameter.copy_(corrections.split(draw_normal(parameter.shape[:1], 0.1, 0, name)))
            elif parameter.ndim > 1:
                parameter.copy_(draw_normal(parameter.shape, parameter.shape[-1] ** -0.5, 0, name))
            else:
                parameter.copy_(draw_normal(parameter.shape, 0.1, 0, name).add_(1.0))
    return lm


def _reference(lm: Any, config: Any) -> Any:
    """Returns transformers' own form of the same model, with the same weights."""
    kind = architectures.model_class(config)
    with torch.random.fork_rng(devices=[]):
        reference = kind.from_config(config, attn_implementation="eager", dtype=torch.float32)
    reference.load_state_dict(dict(corrections.as_stored(lm.named_parameters())), strict=False)
    return reference.eval()


def _rows(config: Any) -> list[PackedRow]:
    rng, vocab_size = np.random.default_rng(0), config.get_text_config().vocab_size
    lengths = (*_LENGTHS, _BEYOND_CHUNK) if getattr(config, "attention_chunk_size", None) else _LENGTHS
    has_images = family_of(config.model_type).takes_images
    if has_images:
        vocab_size = config.video_token_id  # below the ids of images
    rows = [
        PackedRow.unsampled(index, *(rng.integers(0, vocab_size, n).astype(np.int32) for n in own))
        for index, own in enumerate(lengths)
    ]
    return [_with_images(row, config, rng) for row in rows] if has_images else rows


def _with_images(row: PackedRow, config: Any, rng: np.random.Generator) -> PackedRow:
    vision, tokens = config.vision_config, row.prompt_token_ids.copy()
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    images = []
    for start, grid in _IMAGES.get(row.index, ()):
        image = PromptImage(
            hash=f"{row.index}-{start}",
            start=start,
            grid=grid,
            merge_size=vision.spatial_merge_size,
            pixels=rng.normal(size=(math.prod(grid), width)).astype(np.float32),
        )
        tokens[start : start + image.num_tokens] = config.image_token_id
        images.append(image)
    return replace(row, prompt_token_ids=tokens, images=tuple(images))


def _packed(lm: Any, rows: Sequence[PackedRow]) -> Tensor:
    try:
        log_probs: Tensor = PolicyNetwork(lm)(pack(rows, torch.device("cpu"))).log_probs
    except ModelError:
        raise
    except (TypeError, KeyError, AttributeError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"{type(lm).__name__} does not run over packed sequences ({type(error).__name__}: {error}); use "
            "one of the architectures of docs/models.md"
        ) from error
    return log_probs


def _keep(reference: Any, rows: Sequence[PackedRow], log_probs: Tensor, folder: Path) -> None:
    reference.save_pretrained(folder)
    parts = torch.split(log_probs, [len(row.response_token_ids) for row in rows])
    scored = [
        {
            "prompt": row.prompt_token_ids.tolist(),
            "response": row.response_token_ids.tolist(),
            "log_probs": part.tolist(),
            "images": [{"hash": image.hash, "grid": image.grid} for image in row.images],
        }
        for row, part in zip(rows, parts, strict=True)
    ]
    pixels = {image.hash: image.pixels for row in rows for image in row.images}
    if pixels:
        np.savez(folder / "images.npz", **pixels)  # type: ignore[arg-type]
    (folder / "scored_rows.json").write_text(json.dumps(scored), encoding="utf-8")


def _one_by_one(lm: Any, rows: Sequence[PackedRow]) -> Tensor:
    """Returns log-probs of the model's own forward pass, one sequence at a time."""
    log_probs = []
    for row in rows:
        tokens = np.concatenate([row.prompt_token_ids, row.response_token_ids]).astype(np.int64)
        ids, start = torch.from_numpy(tokens), len(row.prompt_token_ids)
        arguments = _image_arguments(row, ids, lm.config) if row.images else {}
        logits = lm(input_ids=ids[None], use_cache=False, **arguments).logits[0, start - 1 : -1]
        log_probs.append(logits.float().log_softmax(-1).gather(-1, ids[start:, None]).squeeze(-1))
    return torch.cat(log_probs)


def _image_arguments(row: PackedRow, ids: Tensor, config: Any) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.from_numpy(np.concatenate([image.pixels for image in row.images])),
        "image_grid_thw": torch.tensor([image.grid for image in row.images]),
        "mm_token_type_ids": (ids == config.image_token_id).int()[None],
    }
