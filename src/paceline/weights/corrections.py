"""Corrections of routers' scores (DeepSeek-V3's `e_score_correction_bias`) as parameters.

A correction is a float32 number per expert that decides which experts a token meets. It is added to the score
for that choice alone, so it has no gradient: transformers keeps it as a buffer. As a parameter it is loaded,
sharded, saved and pushed like all others. Those may be rounded to bfloat16 on their way, which would change
choices; so the parameter is a sum of three numbers, each of which bfloat16 holds exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from paceline.models.facts import family_of

BUFFER: Final = ".e_score_correction_bias"
"""How a correction's name ends in checkpoints."""

PARTS: Final = ".e_score_correction_parts"
"""How the name of the parameter ends."""

FACTOR: Final = ".layer_scalar"
"""How the name of a decoder layer's constant factor ends (Gemma 4).

transformers and engines keep it as a buffer; here it is a parameter that does not train.
"""

NUM_PARTS: Final = 3
"""Eight bits each: a float32 number has 24."""


def missing_keys(config: Mapping[str, Any]) -> dict[str, str | bool]:
    """Finds the lacking keys of config.json by which engines know a model with corrections.

    transformers does not write them. Without them an engine would choose experts by softmax, without a
    correction.
    """
    keys = family_of(config.get("model_type")).keys_for_engines
    return {key: value for key, value in keys if key not in config}


def use_factor_parameters(model: nn.Module) -> None:
    """Makes the factors of layers parameters, which do not train."""
    name = FACTOR.removeprefix(".")
    for module in model.modules():
        if (factor := module._buffers.pop(name, None)) is not None:
            module.register_parameter(name, nn.Parameter(factor, requires_grad=False))


def split(correction: Tensor) -> Tensor:
    """(E,) in float32 to (E, 3), whose rows add up to it."""
    rest, parts = correction.float(), []
    for _ in range(NUM_PARTS):
        parts.append(rest.bfloat16().float())
        rest = rest - parts[-1]
    return torch.stack(parts, dim=-1)


def join(parts: Tensor) -> Tensor:
    """(E, 3) of any type to (E,) in float32: what `split` was given, to the bit."""
    first, second, third = parts.float().unbind(-1)
    return first + (second + third)  # the large one last, or bits are lost


def as_stored(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, corrections as checkpoints have them; every other tensor passes as it is."""
    for name, tensor in tensors:
        if name.endswith(PARTS):
            yield name.removesuffix(PARTS) + BUFFER, join(tensor)
        else:
            yield name, tensor
