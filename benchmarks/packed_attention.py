"""Measures attention of packed sequences where no kernel supports them: in float32, and on CPUs.

    python benchmarks/packed_attention.py                    # one thread
    python benchmarks/packed_attention.py --device cuda

Prints milliseconds of forward and backward of one layer's attention, the minimum over `--rounds`. `by run`
calls the kernel for every run of neighbours with equal length and prefix; `padded` is what the learner uses.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.learner.batch.types import PackedSequences
from paceline.learner.model.decoder.attention import packed_attention

Attention = Callable[[Tensor, Tensor, Tensor, PackedSequences], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Prompts with some responses each; lengths are drawn from half-open ranges."""

    name: str
    prompts: int
    responses: int
    prompt_tokens: tuple[int, int]
    response_tokens: tuple[int, int]
    shared: bool
    heads: tuple[int, int, int]

    def draw(self, device: torch.device) -> PackedSequences:
        """Returns the same sequences on every call."""
        rng = np.random.default_rng(0)
        lengths: list[int] = []
        prefixes: list[int | None] = []
        for _ in range(self.prompts):
            prompt = int(rng.integers(*self.prompt_tokens))
            responses = [int(number) for number in rng.integers(*self.response_tokens, self.responses)]
            if self.shared:
                prefixes += [None, *[len(lengths)] * self.responses]
                lengths += [prompt, *responses]
            else:
                lengths += [prompt + response for response in responses]
        return PackedSequences.of(lengths, device, prefixes)


DEMO = Case(
    name="the demo, shared prompts",
    prompts=32,
    responses=8,
    prompt_tokens=(10, 19),
    response_tokens=(4, 10),
    shared=True,
    heads=(4, 2, 32),
)
CASES = (
    DEMO,
    replace(DEMO, name="the demo, own prompts", shared=False),
    Case(
        name="100 to 250 tokens",
        prompts=8,
        responses=8,
        prompt_tokens=(50, 100),
        response_tokens=(50, 150),
        shared=False,
        heads=(14, 2, 64),
    ),
    Case(
        name="400 to 1,000 tokens, shared prompts",
        prompts=4,
        responses=8,
        prompt_tokens=(200, 400),
        response_tokens=(200, 600),
        shared=True,
        heads=(14, 2, 64),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    table = Table(title=f"float32, {args.device}, {args.threads} threads, torch {torch.__version__}")
    for heading in ("sequences", "runs", "by run, ms", "batches", "padded, ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "sequences" else "right")
    for case in CASES:
        packed = case.draw(torch.device(args.device))
        by_run, padded = (measured(case, packed, way, args.rounds) for way in (run_by_run, in_batches))
        numbers = (len(packed.blocks), f"{by_run:.1f}", len(packed.padded.batches), f"{padded:.1f}")
        table.add_row(case.name, *map(str, numbers), f"{by_run / padded:.1f}")
    Console(width=110).print(table)
    return 0


def measured(case: Case, packed: PackedSequences, attention: Attention, rounds: int) -> float:
    """Returns milliseconds of forward and backward."""
    num_heads, num_groups, size = case.heads
    device, num_tokens = packed.cu_seqlens.device, packed.blocks[-1].stop
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(num_tokens, number, size, device=device, requires_grad=True)
        for number in (num_heads, num_groups, num_groups)
    )
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        attention(q, k, v, packed).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times[1:])


def in_batches(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> Tensor:
    """Computes attention as the learner does."""
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    return packed_attention(torch.nn.Identity(), *rows, None, packed=packed)[0]


def run_by_run(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> Tensor:
    """Computes attention with one call and one slice per run."""
    outputs = []
    for run in packed.blocks:
        own_q, own_k, own_v = (
            x[run.start : run.stop].unflatten(0, (run.num_sequences, run.length)).transpose(1, 2)
            for x in (q, k, v)
        )
        end, mask = run.prefix_start + run.prefix_length, None
        if run.prefix_length:
            prefixes = (
                x[run.prefix_start : end].transpose(0, 1).expand(run.num_sequences, -1, -1, -1)
                for x in (k, v)
            )
            own_k, own_v = (torch.cat(parts, 2) for parts in zip(prefixes, (own_k, own_v), strict=True))
            place = torch.arange(own_k.shape[2], device=q.device)
            mask = place[None] <= place[run.prefix_length :, None]
        out = F.scaled_dot_product_attention(
            own_q, own_k, own_v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


if __name__ == "__main__":
    sys.exit(main())
