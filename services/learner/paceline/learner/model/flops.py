"""Computes an update's arithmetic and a device's peak for MFU (PaLM, arXiv:2204.02311, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.cards import card_of
from paceline.learner.batch.planning.arithmetic import Arithmetic
from paceline.learner.model.decoder.experts import active_parameters
from paceline.learner.model.image_states import is_trained, projectors, vision_tower
from paceline.learner.model.lora import adapter_names
from paceline.learner.model.networks import (
    PolicyNetwork,
    ValueNetwork,
    body_of,
    decoder_layers,
    output_head,
)


def arithmetic_of(network: PolicyNetwork | ValueNetwork) -> Arithmetic:
    """Returns the operations of a forward and backward pass, without activation recomputation.

    Each token takes 6 operations per parameter of the layers that it uses, and each response token 6 per
    parameter of the head. Attention takes 12 per layer, channel and pair of tokens, half of them for keys and
    half for values (whose heads have another size in latent attention); causal attention halves the pairs. A
    frozen parameter takes 4, since it has no gradient of its own; an adapter's parameter 4, since only the
    backward pass goes through it. A vision tower takes 2 per patch and parameter that is frozen, because
    no gradient goes through it, and 6 per one that trains.
    """
    body: Any = body_of(network.lm) if isinstance(network, PolicyNetwork) else network.body
    head = output_head(network.lm).weight if isinstance(network, PolicyNetwork) else network.value_head.weight
    layers, config = decoder_layers(body), body.config.get_text_config()
    trained, frozen = (active_parameters(layers, config, trained=trains) for trains in (True, False))
    per_patch, per_patch_pair = _of_tower(vision_tower(body))
    return Arithmetic(
        per_token=(4 if adapter_names(layers) else 6) * trained + 4 * frozen,
        per_response_token=(6 if head.requires_grad else 4) * head.numel(),
        per_pair=3 * sum(map(_channels, _by_layer(config, len(layers)))),
        per_patch=per_patch,
        per_patch_pair=per_patch_pair,
    )


def _by_layer(config: Any, num_layers: int) -> Sequence[Any]:
    """Returns the configuration of each layer with attention.

    Configurations differ only if layers differ. Layers with a state are left out: they have no pairs of
    tokens.
    """
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * (num_layers - (getattr(config, "layer_types", None) or []).count("linear_attention"))


def _channels(config: Any) -> int:
    """Returns the size of the keys and values of all heads in a layer with this configuration."""
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    keys, values = (int(getattr(config, name, None) or width) for name in ("qk_head_dim", "v_head_dim"))
    return heads * (keys + values)


def _of_tower(tower: Any) -> tuple[int, int]:
    """Returns operations per patch, and per pair of patches in layers without windows."""
    if tower is None:
        return 0, 0
    config = tower.config
    patches_per_token = config.spatial_merge_size**2
    merger = sum(parameter.numel() for part in projectors(tower) for parameter in part.parameters())
    rest = sum(parameter.numel() for parameter in tower.parameters()) - merger
    passes, merger_passes = (3 if is_trained(part) else 1 for part in (tower.blocks, tower.merger))
    pair = passes * 4 * config.hidden_size
    products = 2 * passes * rest + 2 * merger_passes * merger // patches_per_token
    global_layers = getattr(config, "fullatt_block_indexes", None)
    if global_layers is None:  # all layers see all pairs; position embeddings are looked up
        return products - 2 * passes * tower.pos_embed.weight.numel(), pair * config.depth
    window = (config.window_size // config.patch_size) ** 2
    return products + pair * window * (config.depth - len(global_layers)), pair * len(global_layers)


def peak_flops(device: torch.device) -> float | None:
    """Returns the peak operations per second of a device; None if unknown."""
    if device.type != "cuda":
        return None
    card = card_of(torch.cuda.get_device_name(device))
    return None if card is None else card.flops
