"""Turns corrections of router scores (DeepSeek-V3's `e_score_correction_bias`) into parameters.

A correction is a float32 number per expert, added to the score only to choose a token's experts. It therefore
has no gradient, and transformers keeps it as a buffer. As a parameter it is loaded, sharded, saved and pushed
like all others. Pushes may round parameters to bfloat16, which could change the choice of experts; so the
parameter stores a sum of three numbers, each of which bfloat16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from paceline.models.facts import family_of

BUFFER: Final = ".e_score_correction_bias"
"""Ending of a correction's name in checkpoints."""

PARTS: Final = ".e_score_correction_parts"
"""Ending of the parameter's name."""

FACTOR: Final = ".layer_scalar"
"""Ending of the name of a decoder layer's constant factor (Gemma 4).

transformers and engines keep it as a buffer; here it is a frozen parameter.
"""

NUM_PARTS: Final = 3
"""Each part holds eight significant bits; a float32 number has 24."""


def missing_keys(config: Mapping[str, Any]) -> dict[str, str | float]:
    """Finds the missing keys by which engines know how a model computes; transformers does not write them."""
    keys = family_of(config.get("model_type")).keys_for_engines
    return {key: value for key, value in keys if key not in config}


def use_factor_parameters(model: nn.Module) -> None:
    """Makes the factors of layers frozen parameters."""
    name = FACTOR.removeprefix(".")
    for module in model.modules():
        if (factor := module._buffers.pop(name, None)) is not None:
            module.register_parameter(name, nn.Parameter(factor, requires_grad=False))


def split(correction: Tensor) -> Tensor:
    """Splits (E,) in float32 into (E, 3), whose rows add up to it."""
    rest, parts = correction.float(), []
    for _ in range(NUM_PARTS):
        parts.append(rest.bfloat16().float())
        rest = rest - parts[-1]
    return torch.stack(parts, dim=-1)


def join(parts: Tensor) -> Tensor:
    """Joins (E, 3) of any type into (E,) in float32, with exactly the bits that `split` got."""
    first, second, third = parts.float().unbind(-1)
    return first + (second + third)  # the largest last, or bits are lost


def as_stored(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors by name, with corrections in checkpoint form and all others unchanged."""
    for name, tensor in tensors:
        if name.endswith(PARTS):
            yield name.removesuffix(PARTS) + BUFFER, join(tensor)
        else:
            yield name, tensor
