"""Divides the matrices of a layer over the ranks that share its tokens, as in Megatron-LM (arXiv:2205.05198).

    tokens (T/n, H) -- gathered --> (T, H) -> columns of the first matrices: 1/n of the heads, or of the MLP's
    width -> rows of the last matrix: this rank's summands, (T, H) -- added up --> (T/n, H)

Outside of attention and MLP a rank computes its own T/n tokens, as `context` describes. A rank's matrices
see the tokens of all n ranks, so their gradients are sums over these already.

What is added to a divided matrix as a whole, such as the bias of the last one, is a copy on each rank, and
its gradient a sum over the ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from paceline.core.errors import ConfigError
from paceline.learner.distributed.context import copied, differentiable
from paceline.learner.distributed.mesh import RankGroup
from paceline.learner.distributed.shards import OwnPart
from paceline.learner.model.decoder.opaque import opaque

# By the dimension of the weight that is divided: the parameters that are divided with it, and along which
# dimension.
_DIVIDED: Final[Mapping[int, Mapping[str, int]]] = {
    0: {"weight": 0, "bias": 0, "lora_b": 0},
    1: {"weight": 1, "lora_a": 1},
}
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLPS: Final = ({"gate_proj", "up_proj", "down_proj"}, {"up_proj", "down_proj"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedPart:
    """An attention module or MLP of a layer whose matrices are divided.

    Attributes:
        columns: its first matrices, divided by their outputs.
        rows: its last one, divided by its inputs.
    """

    module: nn.Module
    columns: tuple[nn.Linear, ...]
    rows: nn.Linear

    @property
    def matrices(self) -> tuple[nn.Linear, ...]:
        """The matrices in the order in which they are applied."""
        return (*self.columns, self.rows)


def divide_matrices(layer: nn.Module, num_ranks: int) -> list[DividedPart]:
    """Leaves each rank its part of a layer's matrices, before the layer has storage.

    Keys and values stay whole if there are fewer of their heads than ranks. So does everything that is not an
    attention module or an MLP of a known form: experts, projections in one matrix, norms over all heads.

    Returns:
        The parts of which `spread_matrices` makes those of a group.

    Raises:
        ConfigError: nothing in the layer can be divided.
    """
    parts = [
        part
        for name, module in layer.named_modules()
        if "experts" not in name.split(".") and (part := _part_of(module, num_ranks)) is not None
    ]
    if not parts:
        raise ConfigError(
            f"{type(layer).__name__} has no matrices that can be divided over {num_ranks} ranks; set "
            "learner.tensor_parallel: 1"
        )
    for part in parts:
        for linear in part.columns:
            _keep_part(linear, 0, num_ranks)
        _keep_part(part.rows, 1, num_ranks)
    return parts


def _part_of(module: nn.Module, num_ranks: int) -> DividedPart | None:
    """Returns a module's matrices, if they can be divided over this number of ranks."""
    kinds = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    if {*kinds} in _MLPS and kinds["down_proj"].in_features % num_ranks == 0:
        columns = tuple(linear for name, linear in kinds.items() if name != "down_proj")
        return DividedPart(module=module, columns=columns, rows=kinds["down_proj"])
    if not all(name in kinds for name in _ATTENTION) or not _is_by_head(module):
        return None
    head_dim: int = module.head_dim  # type: ignore[assignment]
    num_heads = kinds["o_proj"].in_features // head_dim
    num_keys = kinds["k_proj"].out_features // head_dim
    if num_heads % num_ranks:
        return None
    names = ("q_proj",) if num_keys % num_ranks else _ATTENTION[:3]
    return DividedPart(module=module, columns=tuple(kinds[name] for name in names), rows=kinds["o_proj"])


def _is_by_head(attention: nn.Module) -> bool:
    """Returns whether heads are computed separately, from one (cos, sin) for all of them."""
    head_dim = getattr(attention, "head_dim", None)
    weights = [getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    is_llama4 = hasattr(attention, "chunk_size") or hasattr(attention, "temperature")
    has_own_norms = all(weight is None or weight.numel() == head_dim for weight in weights)
    return bool(head_dim) and has_own_norms and not is_llama4


def _keep_part(linear: nn.Linear, dim: int, num_ranks: int) -> None:
    for name, parameter in list(linear.named_parameters(recurse=False)):
        if (along := _DIVIDED[dim].get(name)) is not None:
            own = torch.empty_like(parameter.narrow(along, 0, parameter.shape[along] // num_ranks))
            setattr(linear, name, nn.Parameter(own, requires_grad=parameter.requires_grad))


def spread_matrices(parts: Sequence[DividedPart], mesh: DeviceMesh, group: RankGroup) -> list[nn.Linear]:
    """Makes each rank compute its part for the tokens of all ranks of a mesh.

    Parameters become tensors of the whole matrices, sharded over the mesh, so that checkpoints and pushes
    know which part a rank has.

    Args:
        parts: parts of `divide_matrices`, with storage.
        mesh: the ranks over which the matrices are divided, in one dimension.
        group: the same ranks, which share the tokens.

    Returns:
        The divided matrices.
    """
    for part in parts:
        for linear, dim in (*((linear, 0) for linear in part.columns), (part.rows, 1)):
            for name, own in list(linear.named_parameters(recurse=False)):
                along = _DIVIDED[dim].get(name)
                placement = Replicate() if along is None else Shard(along)
                spread = DTensor.from_local(own.data, mesh, [placement], run_check=False)
                setattr(linear, name, nn.Parameter(spread, requires_grad=own.requires_grad))
            kind: Any = type(linear)
            linear.__class__ = _rows_kind(kind) if dim else _columns_kind(kind)
            linear.tensor_group = group  # type: ignore[assignment]
        part.module.tensor_group = group  # type: ignore[assignment]
        part.module.has_own_keys = len(part.columns) > 1  # type: ignore[assignment]
        signature = inspect.signature(part.module.forward)
        part.module.register_forward_pre_hook(partial(_gather_inputs, signature), with_kwargs=True)
    return [linear for part in parts for linear in part.matrices]


@opaque
def _gather_inputs(
    signature: inspect.Signature, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives a module the states of all ranks' tokens, and what it takes of their positions."""
    bound, group = signature.bind(*args, **kwargs), module.tensor_group
    states = next(iter(bound.arguments))
    bound.arguments[states] = gathered(bound.arguments[states], group)
    if (embeddings := bound.arguments.get("position_embeddings")) is not None:
        both = gathered(torch.cat(embeddings, dim=-1), group)
        widths = [part.shape[-1] for part in embeddings]
        bound.arguments["position_embeddings"] = torch.split(both, widths, dim=-1)
    if (positions := bound.arguments.get("position_ids")) is not None:
        bound.arguments["position_ids"] = gathered(positions.unsqueeze(-1), group).squeeze(-1)
    return bound.args, bound.kwargs


class _OwnMatrix(OwnPart):
    """The attributes of a divided matrix; gradients of its whole parameters are sums over the ranks."""

    def __init__(self, linear: Any, *, bias: bool) -> None:
        super().__init__(linear)
        self._group: RankGroup = linear.tensor_group
        if not bias:
            self.bias = None

    def _part_of(self, parameter: DTensor) -> Tensor:
        own = parameter.to_local()
        return own if parameter.placements[-1].is_shard() else copied(own, self._group)


# One class each for all layers, so that they share code.
@cache
def _columns_kind(kind: type[nn.Linear]) -> type[nn.Linear]:
    plain: Callable[..., Tensor] = kind.forward

    @opaque
    def forward(self: nn.Linear, states: Tensor) -> Tensor:
        return plain(_OwnMatrix(self, bias=True), states)

    return type(kind.__name__, (kind,), {"forward": forward})


@cache
def _rows_kind(kind: type[nn.Linear]) -> type[nn.Linear]:
    plain: Callable[..., Tensor] = kind.forward

    @opaque
    def forward(self: Any, states: Tensor) -> Tensor:
        total = reduce_scattered(plain(_OwnMatrix(self, bias=False), states), self.tensor_group)
        bias = _OwnMatrix(self, bias=True).bias
        return total if bias is None else total + bias

    return type(kind.__name__, (kind,), {"forward": forward})


def own_key_heads(keys: Tensor, group: RankGroup) -> Tensor:
    """Selects the key heads of this rank's queries: (T, H'/n, D) of the (T, H, D) of all.

    Heads are repeated until each rank has as many, H' together. Query heads still share their key head.
    """
    repeats = math.lcm(keys.shape[1], group.size) // keys.shape[1]
    return keys.repeat_interleave(repeats, dim=1).chunk(group.size, dim=1)[group.rank]


def gathered(states: Tensor, group: RankGroup) -> Tensor:
    """Gathers the ranks' tokens, (..., T/n, H) each, as (..., T, H); differentiable."""
    return differentiable(states, *_by_token(group.gather_rows, group.sum_rows))


def reduce_scattered(states: Tensor, group: RankGroup) -> Tensor:
    """Adds up the ranks' (..., T, H); returns this rank's tokens, (..., T/n, H); differentiable."""
    return differentiable(states, *_by_token(group.sum_rows, group.gather_rows))


def _by_token(*collectives: Callable[[Tensor], Tensor]) -> list[Callable[[Tensor], Tensor]]:
    """Makes collectives on rows those on tokens; their results are no views, which FSDP would warn of."""

    def of(collective: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        return collective(states.transpose(0, -2)).transpose_(0, -2)

    return [partial(of, collective) for collective in collectives]
