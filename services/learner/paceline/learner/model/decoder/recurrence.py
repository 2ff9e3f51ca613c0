"""Runs layers that pass a state from token to token (Gated DeltaNet) over packed sequences.

Such a layer does not know where sequences begin: over a packed row, it would carry a sequence's state into
the next. So it runs over padded batches, with one sequence per row and an empty initial state. Padding after
a sequence does not change the sequence. A prefix, such as a shared prompt, is computed again for each of its
sequences; padding before it moves to the row's end. On a GPU with flash-linear-attention, nothing is
padded or computed twice (`recurrence_kernel`).
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ModelError
from paceline.learner.batch.padded import PaddedBatch
from paceline.learner.batch.types import PackedSequences
from paceline.learner.model.architectures import recurrent_layers
from paceline.learner.model.decoder import recurrence_kernel
from paceline.learner.model.decoder.rows import take_rows

_FUNCTIONS = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
"""Names in transformers' modules that may refer to functions of another package."""


def use_packed_recurrence(lm: nn.Module) -> None:
    """Makes Gated DeltaNets start from an empty state at every sequence of a packed row."""
    for module in recurrent_layers(lm):
        kind: Any = type(module)
        module.__class__ = _packed_kind(kind)
        _without_kernels(kind.__module__)


@cache
def _without_kernels(module_name: str) -> None:
    """Makes the layers of this module run transformers' own code everywhere.

    If flash-linear-attention or causal-conv1d is installed, transformers also calls it on a CPU, where it
    does not run.
    """
    module = sys.modules[module_name]
    for name in _FUNCTIONS:
        plain = getattr(getattr(module, name, None), "__wrapped__", None)
        if plain is not None:
            setattr(module, name, plain)


# One class for all layers.
@cache
def _packed_kind(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(
        self: nn.Module, hidden_states: Tensor, *, packed: PackedSequences | None = None, **others: Any
    ) -> Tensor:
        if packed is None:
            raise ModelError(
                f"{kind.__name__}'s model does not tell its layers where sequences begin; use one of "
                "the architectures of docs/models.md"
            )
        if (rule := recurrence_kernel.rule_for(hidden_states.device)) is not None:
            return recurrence_kernel.run_layer(self, hidden_states, packed, rule)
        plain: Any = kind.forward
        return _by_sequence(lambda rows: plain(self, rows), hidden_states, packed)

    return type(kind.__name__, (kind,), {"forward": forward})


def _by_sequence(layer: Any, hidden: Tensor, packed: PackedSequences) -> Tensor:
    """Runs a layer on each sequence by itself, (1, T, H); `layer` takes and returns (N, K, H)."""
    padded, outputs = packed.padded, []
    counts = [batch.num_sequences * batch.num_keys for batch in padded.batches]
    for batch, part in zip(
        padded.batches, torch.split(take_rows(hidden[0], padded.keys), counts), strict=True
    ):
        rows = part.view(batch.num_sequences, batch.num_keys, -1)
        places = torch.arange(batch.num_keys, device=rows.device).unsqueeze(0)
        free = _free_places(batch)
        if free is not None:
            rows = torch.take_along_dim(rows, ((places + free) % batch.num_keys).unsqueeze(-1), 1)
        out: Tensor = layer(rows)
        first = batch.num_keys - batch.num_queries
        if free is None:
            out = out[:, first:]
        else:
            out = torch.take_along_dim(out, (places[:, first:] - free).unsqueeze(-1), 1)
        outputs.append(out.flatten(0, 1))
    return take_rows(torch.cat(outputs), padded.order).unsqueeze(0)


def _free_places(batch: PaddedBatch) -> Tensor | None:
    """Returns the number of free places before each prefix, (N, 1); None if there are none."""
    if batch.mask is None or batch.mask.ndim == 2:
        return None
    return (~batch.mask[:, 0, -1]).sum(-1, keepdim=True)
