"""How evenly a step's arithmetic is spread when micro-batches are cut by tokens, and by arithmetic.

    python benchmarks/packing.py                                    # Qwen2.5-7B's shape, 4 ranks
    python benchmarks/packing.py --shape 0.5B --ranks 8 --budget 16384

A step of 64 prompts with 8 samples in two mini-batches. `imbalance` is how much longer it takes than even
micro-batches would, by arithmetic: ranks wait for the costliest micro-batch of those that run together. The
same cut is made once with each row's tokens as its cost and once with its operations. Nothing is timed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from paceline.learner.batch.planning.arithmetic import Arithmetic, RowLength
from paceline.learner.batch.planning.plan import BatchPlan, plan_batch, plan_chunk

# Qwen2.5: parameters of the layers and of the head, attention width times layers.
SHAPES = {"0.5B": (357_897_856, 136_134_656, 896 * 24), "7B": (6_525_621_760, 544_997_376, 3584 * 28)}
PROMPT_TOKENS, LONGEST = 512, 4096
SAMPLES, PROMPTS = 8, 64

Draw = Callable[[random.Random], int]
KINDS: dict[str, Draw] = {
    "equal, 1,024": lambda generator: 1024,
    "uniform, 64 to 4,096": lambda generator: generator.randint(64, LONGEST),
    "log-normal, 64 to 4,096": lambda generator: max(
        64, min(LONGEST, round(generator.lognormvariate(6.5, 1.0)))
    ),
    "log-normal, 64 to 16,384": lambda generator: max(
        64, min(4 * LONGEST, round(generator.lognormvariate(7.0, 1.3)))
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="7B")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--budget", type=int, default=24_576, help="tokens of a micro-batch")
    parser.add_argument("--batches", type=int, default=9, help="batches drawn; medians are printed")
    args = parser.parse_args(argv)
    layers, head, width = SHAPES[args.shape]
    by_arithmetic = Arithmetic(per_token=6 * layers, per_response_token=6 * head, per_pair=6 * width)
    by_tokens = Arithmetic(per_token=1, per_response_token=0, per_pair=0)
    table = Table(title=f"{args.shape}, {args.ranks} ranks, {args.budget:,} tokens, {args.batches} batches")
    for heading in ("response tokens", "imbalance by tokens", "by arithmetic", "micro-batches per rank"):
        table.add_column(heading, justify="left" if heading == "response tokens" else "right")
    for kind, draw in KINDS.items():
        before, after, numbers = [], [], []
        for seed in range(args.batches):
            rows = draw_rows(draw, seed)
            plans = [plan(rows, args, arithmetic) for arithmetic in (by_tokens, by_arithmetic)]
            for results, made in zip((before, after), plans, strict=True):
                results.append(imbalance(made, rows, by_arithmetic))
            numbers.append(sum(chunk.num_micro_batches for chunk in plans[1].chunks))
        cells = [f"{statistics.median(values):.1%}" for values in (before, after)]
        table.add_row(kind, *cells, f"{statistics.median(numbers):.0f}")
    Console(width=110).print(table)
    return 0


def draw_rows(draw: Draw, seed: int) -> list[RowLength]:
    """A step's rows; one prompt length, so that only the responses differ."""
    generator = random.Random(seed)  # noqa: S311  lengths, not secrets
    return [
        RowLength(prompt_id=prompt, num_prompt_tokens=PROMPT_TOKENS, num_response_tokens=draw(generator))
        for prompt in range(PROMPTS)
        for _ in range(SAMPLES)
    ]


def plan(rows: Sequence[RowLength], args: argparse.Namespace, arithmetic: Arithmetic) -> BatchPlan:
    """The step's plan."""
    make = partial(plan_chunk, num_data_ranks=args.ranks, token_budget=args.budget, arithmetic=arithmetic)
    return plan_batch(rows, prompts_per_chunk=PROMPTS // 2, make=make)


def imbalance(made: BatchPlan, rows: Sequence[RowLength], arithmetic: Arithmetic) -> float:
    """The plan's imbalance by the model's arithmetic, whatever it was made by."""
    longest = sum(
        max(arithmetic.of_rows(rows[index] for index in indices) for indices in together)
        for chunk in made.chunks
        for together in zip(*chunk.micro_batches, strict=True)
    )
    return longest * len(made.chunks[0].micro_batches) / arithmetic.of_rows(rows) - 1.0


if __name__ == "__main__":
    sys.exit(main())
