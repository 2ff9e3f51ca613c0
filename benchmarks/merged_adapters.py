"""Measures how much of an adapter's change remains after merging into bfloat16 weights.

A change to a bfloat16 weight is lost unless it exceeds half the distance to the neighbouring value, 0.2 to
0.4 % of the weight. A is drawn as at the start of a run; each number of B is the learning rate times the
number of steps, as after AdamW steps in one direction. Weights have a standard deviation of 0.02.

    python benchmarks/merged_adapters.py
"""

from __future__ import annotations

import argparse
import platform

import torch
from torch import Tensor

from paceline.learner.model.lora import merge

RATES = (1e-6, 1e-5, 1e-4, 1e-3)
STEPS = (1, 10, 100, 1000)


def moved_share(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> float:
    """Projects the merged change on the exact change; returns the length relative to the exact change."""
    wanted = scale * b.double() @ a.double()
    moved = merge(weight, a, b, scale).double() - weight.double()
    return float((moved * wanted).sum() / wanted.square().sum())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    size, rank = options.size, options.rank
    weight = (0.02 * torch.randn(size, size)).bfloat16()
    a = torch.empty(rank, size).uniform_(-(size**-0.5), size**-0.5)
    directions = torch.randn(size, rank).sign()
    print(
        f"{size} x {size}, rank {rank}, alpha {options.alpha:g}; "
        f"{platform.machine()}, torch {torch.__version__}"
    )
    print("| rate | " + " | ".join(f"{steps:,} steps" if steps > 1 else "1 step" for steps in STEPS) + " |")
    print("|---|" + "---|" * len(STEPS))
    for rate in RATES:
        shares = [moved_share(weight, a, steps * rate * directions, options.alpha / rank) for steps in STEPS]
        print(f"| {rate:g} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")


if __name__ == "__main__":
    main()
