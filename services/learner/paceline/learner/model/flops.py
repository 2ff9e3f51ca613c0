"""How much arithmetic an update is, and which share of the device's peak it ran at (MFU: PaLM, arXiv:2204.02311, appendix B)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.learner.batch.plan import RowLength
from paceline.learner.model.networks import PolicyNetwork, body_of, decoder_layers, output_head

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16 operations per second, as the vendor publishes them."""


def update_flops(network: PolicyNetwork, rows: Iterable[RowLength]) -> float:
    """Operations of one forward and backward pass over the rows; what checkpointing computes again does not count.

    Six a parameter and token in the layers, six a parameter of the head and response token, and twelve a token, layer and attention
    channel for every token that it looks back at, half of which causal attention leaves out.
    """
    layers = decoder_layers(body_of(network.lm))
    config = network.lm.config.get_text_config()  # type: ignore[union-attr, operator]
    heads = int(config.num_attention_heads)
    width = heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    per_token = 6.0 * sum(parameter.numel() for parameter in layers.parameters())
    per_response_token = 6.0 * output_head(network.lm).weight.numel()
    per_pair = 6.0 * width * len(layers)
    return sum(
        per_token * row.num_tokens
        + per_response_token * row.num_response_tokens
        + per_pair * row.num_tokens**2
        for row in rows
    )


def peak_flops(device: torch.device) -> float | None:
    """Of one device; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name.split()[-1]), None)
