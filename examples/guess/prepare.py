"""Writes the guessing game's inputs: prompts, and a model that guesses half at random.

The warm-up comes from two simulated players, each with half of the guesses. One ignores the answers and
guesses any digit; the other guesses any digit that the answers leave. Reinforcement learning must discover
that the answers help, and that the middle is a good first guess.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
calculator: Any = SimpleNamespace(**runpy.run_path(str(HERE.parent / "calculator" / "prepare.py")))

QUESTION = {"role": "user", "content": "?"}
MAX_GUESSES = 4


def to_sft(rng: np.random.Generator, num_games: int, heeding_share: float) -> pa.Table:
    """Makes games that are cut off at random; each is a conversation and the next guess."""
    prompts, answers = [], []
    for _ in range(num_games):
        messages, left, digit = [QUESTION], range(10), int(rng.integers(10))
        for _ in range(int(rng.integers(MAX_GUESSES))):
            guess = next_guess(rng, left, heeding_share)
            if guess == digit:
                break
            messages.append({"role": "assistant", "content": str(guess)})
            messages.append({"role": "tool", "content": "low" if guess < digit else "high"})
            left = (
                range(max(left.start, guess + 1), left.stop)
                if guess < digit
                else range(left.start, min(left.stop, guess))
            )
        prompts.append(messages)
        answers.append(str(next_guess(rng, left, heeding_share)))
    return pa.table({"prompt": prompts, "answer": answers})


def next_guess(rng: np.random.Generator, left: range, heeding_share: float) -> int:
    """Returns the guess of one of the two players."""
    heeds = rng.random() < heeding_share
    return int(rng.choice(left)) if heeds else int(rng.integers(10))


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the data and the model, and prints a summary as a line of JSON."""
    parser = argparse.ArgumentParser(description="Prepare the guessing game's data and starting model.")
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder for the parquet files")
    parser.add_argument("--model-out", type=Path, default=HERE / "model", help="folder for the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows and of the weights")
    parser.add_argument(
        "--heeding-share", type=float, default=0.5, help="share of warm-up guesses that heed the answers"
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([args.seed, 0])
    pq.write_table(to_sft(rng, 12_800, args.heeding_share), args.out / "sft.parquet")
    rows = pa.table({"prompt": [[QUESTION]] * 512, "ground_truth": [""] * 512})
    pq.write_table(rows, args.out / "train.parquet")
    tokenizer = calculator.build_tokenizer()
    num_parameters = calculator.arithmetic.write_model(args.model_out, seed=args.seed, tokenizer=tokenizer)
    print(json.dumps({"data": str(args.out), "model": str(args.model_out), "num_parameters": num_parameters}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
