"""Measures the cost of planning a push of a large model on one rank, using only the tensors' shapes.

    python benchmarks/scale_pushes.py 72B --learners 32 --servers 4 --size 8 [--relay auto]
    python benchmarks/scale_pushes.py 671B --learners 128 --servers 16 --size 16

Learner ranks hold FSDP2's shards of rows, rollout ranks the slices of vLLM's tensor parallelism. No parameter
is allocated. Times are CPU seconds: `plan` is the plan for all ranks, which every rank computes; `own` is the
layout of the rank's own messages, for learner rank 0 and rollout rank 0; `tables` are the tables from which a
GPU copies between parameters and staging.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from paceline.weights.geometry.boxes import Box
from paceline.weights.geometry.layout import RankLayout, RankPlace, TensorSlice, chunk_rows
from paceline.weights.geometry.views import copy_tables
from paceline.weights.plan.plan import RELAY_MODES
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.transport.staging import StagingLayout, lay_out

T = TypeVar("T")

GPUS_PER_NODE = 8
DTYPE = "bfloat16"

Shape = tuple[int, ...]
Cut = tuple[int, int, int, str, int]
"""Cut dimension, its index range [start, stop), the parameter, and the offset in it"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor of the checkpoint, and how it is distributed over a server's ranks.

    Attributes:
        dim: dimension cut by tensor parallelism; None: every rank has the complete tensor.
        param: the engine's parameter that contains it.
        at: the tensor's offset along `dim` in the complete parameter; in a rank's shard it is `at` / size.
        parts: number of equal tensors that are concatenated along `dim` and cut separately.
        heads: indivisible units, such as key heads; fewer heads than ranks are replicated.
    """

    name: str
    shape: Shape
    dim: int | None = None
    param: str = ""
    at: int = 0
    parts: int = 1
    heads: int | None = None


def qwen_72b() -> Iterator[Tensor]:
    """Qwen2.5-72B: 80 layers, hidden 8,192, 64 heads, 8 key heads."""
    hidden, inner, heads, kv, vocab = 8192, 29568, 64, 8, 152064
    yield Tensor(name="model.embed_tokens.weight", shape=(vocab, hidden), dim=0)
    for layer in range(80):
        at = f"model.layers.{layer}."
        for kind, tail in (("weight", (hidden,)), ("bias", ())):
            fused = f"{at}self_attn.qkv_proj.{kind}"
            for name, first, count in (("q", 0, heads), ("k", heads, kv), ("v", heads + kv, kv)):
                yield Tensor(
                    name=f"{at}self_attn.{name}_proj.{kind}",
                    shape=(count * 128, *tail),
                    dim=0,
                    param=fused,
                    at=first * 128,
                    heads=count,
                )
        yield Tensor(name=f"{at}self_attn.o_proj.weight", shape=(hidden, heads * 128), dim=1)
        fused = f"{at}mlp.gate_up_proj.weight"
        yield Tensor(name=f"{at}mlp.gate_proj.weight", shape=(inner, hidden), dim=0, param=fused)
        yield Tensor(name=f"{at}mlp.up_proj.weight", shape=(inner, hidden), dim=0, param=fused, at=inner)
        yield Tensor(name=f"{at}mlp.down_proj.weight", shape=(hidden, inner), dim=1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(name=f"{at}{norm}.weight", shape=(hidden,))
    yield Tensor(name="model.norm.weight", shape=(hidden,))
    yield Tensor(name="lm_head.weight", shape=(vocab, hidden), dim=0)


def deepseek_671b() -> Iterator[Tensor]:
    """DeepSeek-V3: 61 layers, latent attention of 128 heads, 256 experts in all but three of them."""
    hidden, experts, expert = 7168, 256, 2048
    yield Tensor(name="model.embed_tokens.weight", shape=(129280, hidden), dim=0)
    for layer in range(61):
        at = f"model.layers.{layer}."
        attention = f"{at}self_attn."
        fused = f"{attention}fused_qkv_a_proj.weight"
        yield Tensor(name=f"{attention}q_a_proj.weight", shape=(1536, hidden), param=fused)
        yield Tensor(name=f"{attention}kv_a_proj_with_mqa.weight", shape=(576, hidden), param=fused, at=1536)
        yield Tensor(name=f"{attention}q_a_layernorm.weight", shape=(1536,))
        yield Tensor(name=f"{attention}kv_a_layernorm.weight", shape=(512,))
        yield Tensor(name=f"{attention}q_b_proj.weight", shape=(128 * 192, 1536), dim=0)
        yield Tensor(name=f"{attention}kv_b_proj.weight", shape=(128 * 256, 512), dim=0)
        yield Tensor(name=f"{attention}o_proj.weight", shape=(hidden, 128 * 128), dim=1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(name=f"{at}{norm}.weight", shape=(hidden,))
        if layer < 3:
            yield from _dense(f"{at}mlp.", hidden, 18432)
            continue
        yield Tensor(name=f"{at}mlp.gate.weight", shape=(experts, hidden))
        yield Tensor(name=f"{at}mlp.gate.e_score_correction_bias", shape=(experts,))
        yield Tensor(
            name=f"{at}mlp.experts.gate_up_proj",
            shape=(experts, 2 * expert, hidden),
            dim=1,
            param=f"{at}mlp.experts.w13_weight",
            parts=2,
        )
        yield Tensor(
            name=f"{at}mlp.experts.down_proj",
            shape=(experts, hidden, expert),
            dim=2,
            param=f"{at}mlp.experts.w2_weight",
        )
        yield from _dense(f"{at}mlp.shared_experts.", hidden, expert)
    yield Tensor(name="model.norm.weight", shape=(hidden,))
    yield Tensor(name="lm_head.weight", shape=(129280, hidden), dim=0)


def _dense(at: str, hidden: int, inner: int) -> Iterator[Tensor]:
    fused = f"{at}gate_up_proj.weight"
    yield Tensor(name=f"{at}gate_proj.weight", shape=(inner, hidden), dim=0, param=fused)
    yield Tensor(name=f"{at}up_proj.weight", shape=(inner, hidden), dim=0, param=fused, at=inner)
    yield Tensor(name=f"{at}down_proj.weight", shape=(hidden, inner), dim=1)


MODELS = {"72B": qwen_72b, "671B": deepseek_671b}


def learner_layouts(model: str, num_ranks: int) -> list[RankLayout]:
    """Returns layouts of FSDP2 shards, eight ranks per node."""
    tensors = list(MODELS[model]())
    layouts = []
    for rank in range(num_ranks):
        slices = []
        for tensor in tensors:
            first, last = chunk_rows(tensor.shape[0], rank, num_ranks)
            if first < last:
                tail = tensor.shape[1:]
                box = Box((first, *(0 for _ in tail)), (last, *tail))
                slices.append(_slice(tensor, box, tensor.name, (0,) * len(tensor.shape)))
        layouts.append(RankLayout(dtype=DTYPE, slices=tuple(slices), place=_place("learner", rank)))
    return layouts


def server_layouts(model: str, num_servers: int, size: int) -> list[RankLayout]:
    """Returns layouts of servers with `size` ranks each; equal rank numbers share slices."""
    tensors = list(MODELS[model]())
    ranks = [
        RankLayout(dtype=DTYPE, slices=tuple(part for tensor in tensors for part in _cut(tensor, rank, size)))
        for rank in range(size)
    ]
    return [
        ranks[rank].at(_place("rollout", server * size + rank))
        for server in range(num_servers)
        for rank in range(size)
    ]


def _cut(tensor: Tensor, rank: int, size: int) -> Iterator[TensorSlice]:
    """Yields a rank's slices of a tensor."""
    zeros, param = (0,) * len(tensor.shape), tensor.param or tensor.name
    if tensor.dim is None:
        yield _slice(tensor, Box.full(tensor.shape), param, (tensor.at, *zeros[1:]))
        return
    dim, extent = tensor.dim, tensor.shape[tensor.dim] // tensor.parts
    if tensor.heads is not None and tensor.heads < size:
        number, width = rank * tensor.heads // size, extent // tensor.heads
    else:
        number, width = rank, extent // size
    for part in range(tensor.parts):
        first = part * extent + number * width
        box = Box.full(tensor.shape).split(dim, first + width)[0].split(dim, first)[1]
        offset = (*zeros[:dim], tensor.at // size + part * width, *zeros[dim + 1 :])
        yield _slice(tensor, box, param, offset)


def _slice(tensor: Tensor, box: Box, param: str, offset: Shape) -> TensorSlice:
    return TensorSlice(name=tensor.name, global_shape=tensor.shape, box=box, param=param, offset=offset)


def _place(kind: str, rank: int) -> RankPlace:
    return RankPlace(node=f"{kind}-{rank // GPUS_PER_NODE}", gpu=f"{kind}-{rank}")


def parameters_of(layout: RankLayout) -> dict[str, torch.Tensor]:
    """Returns a rank's parameters without memory."""
    shapes: dict[str, Shape] = {}
    for part in layout.slices:
        stop = part.local_box.stop
        shapes[part.param] = tuple(map(max, shapes.get(part.param, stop), stop))
    return {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}


def tables_of(layout: StagingLayout, parameters: dict[str, torch.Tensor]) -> int:
    """Describes the copies of every round; returns how many of them the tables hold."""
    slots = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in layout.slot_sizes]
    return sum(int(copy_tables(own, staged)[1].sum()) for own, staged in layout.views(parameters, slots))


def timed(name: str, act: Callable[[], T]) -> T:
    """Prints the CPU seconds of a part and the peak memory so far."""
    began = time.process_time()
    result = act()
    seconds = time.process_time() - began
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"| {name} | {seconds:.2f} | {mib} |", flush=True)
    return result


def main() -> int:
    """Plans one push and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--learners", type=int, default=32, help="ranks")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--size", type=int, default=8, help="ranks per server")
    parser.add_argument("--relay", choices=RELAY_MODES, default="auto")
    args = parser.parse_args()
    print(f"$ python {' '.join(sys.argv)}\n\n| part | CPU s | MiB, most |\n|---|---|---|")
    spec = WeightGroupSpec(
        epoch=1,
        backend="nccl",
        store_host="learner",
        store_port=1,
        learner_layouts=learner_layouts(args.model, args.learners),
        rollout_layouts=tuple(server_layouts(args.model, args.servers, args.size)),
        wire_dtype=DTYPE,
        relay=args.relay,
    )
    data = timed("spec written", spec.to_bytes)
    read = timed("spec read", lambda: WeightGroupSpec.from_bytes(data))
    plan = timed("plan", read.build_plan)
    timed("fingerprint", lambda: plan.fingerprint)
    pieces = []
    for name, rank in (("learner", 0), ("rollout", args.learners)):
        layout = timed(f"own, {name} rank 0", partial(lay_out, plan, args.learners, rank))
        timed(f"tables, {name} rank 0", partial(tables_of, layout, parameters_of(spec.layout(rank))))
        pieces.append(len(layout.at))
    print(f"\n{len(data):,} bytes of spec, {len(plan.flows.flows):,} flows, pieces: {pieces}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
