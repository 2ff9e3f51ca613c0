"""Writes the programs example's inputs: the arithmetic example's sums, to be computed by a Python program.

The warm-up answers come from two simulated pupils. The hasty pupil's programs omit the last operand, the
careful pupil's programs add all operands. Most answers are the hasty pupil's. Reinforcement learning sees
only whether a program prints the sum.

The seed determines everything: the same arguments write the same rows and the same weights.
"""

from __future__ import annotations

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
arithmetic: Any = SimpleNamespace(**runpy.run_path(str(HERE.parent / "arithmetic" / "prepare.py")))

# The text before and after a program's expression. Each is one token, so a tiny model has little to write.
OPENING, CLOSING = "print(", ")"


def program(operands: Sequence[int]) -> str:
    """Returns a program that prints the sum."""
    return f"{OPENING}{'+'.join(map(str, operands))}{CLOSING}"


def build_tokenizer() -> Any:
    """Returns the arithmetic example's tokenizer with the parts of a program."""
    tokenizer = arithmetic.build_tokenizer()
    tokenizer.add_tokens([OPENING, CLOSING])
    return tokenizer


def to_prompts(problems: Sequence[Any]) -> pa.Table:
    """Returns a table of `prompt`, `ground_truth` (read by `reward.code`) and `data_source`."""
    return pa.table(
        {
            "prompt": [[{"role": "user", "content": problem.question}] for problem in problems],
            "ground_truth": [
                json.dumps({"inputs": [""], "outputs": [problem.answer]}) for problem in problems
            ],
            "data_source": ["programs"] * len(problems),
        }
    )


def to_sft(problems: Sequence[Any], rng: np.random.Generator, hasty_share: float) -> pa.Table:
    """Returns a table of questions with the programs of the two pupils."""
    is_hasty = rng.random(len(problems)) < hasty_share
    return pa.table(
        {
            "prompt": [[{"role": "user", "content": problem.question}] for problem in problems],
            "answer": [
                program(problem.operands[:-1] if hasty else problem.operands)
                for problem, hasty in zip(problems, is_hasty, strict=True)
            ],
        }
    )


def write_data(
    out: Path, *, seed: int, num_train: int, num_val: int, num_sft: int, hasty_share: float
) -> None:
    """Writes `train.parquet`, `val.parquet`, `sft.parquet`; `val` shares no problem with the other two."""
    out.mkdir(parents=True, exist_ok=True)
    val_rng, train_rng, rng = (np.random.default_rng([seed, stream]) for stream in range(3))
    val = arithmetic.draw_problems(val_rng, num_val, avoid=set(), distinct=True)
    avoid = {problem.key for problem in val}
    train = arithmetic.draw_problems(train_rng, num_train, avoid=avoid, distinct=False)
    sft = arithmetic.draw_problems(rng, num_sft, avoid=avoid, distinct=False)
    pq.write_table(to_prompts(train), out / "train.parquet")
    pq.write_table(to_prompts(val), out / "val.parquet")
    pq.write_table(to_sft(sft, rng, hasty_share), out / "sft.parquet")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the data and the model, and prints a summary as a line of JSON."""
    parser = arithmetic.parser_of(
        "programs", HERE, num_val=64, num_sft=25600, hasty_share=0.7, hasty="the hasty pupil's programs"
    )
    args = parser.parse_args(argv)
    write_data(
        args.out,
        seed=args.seed,
        num_train=args.num_train,
        num_val=args.num_val,
        num_sft=args.num_sft,
        hasty_share=args.hasty_share,
    )
    num_parameters = arithmetic.write_model(args.model_out, seed=args.seed, tokenizer=build_tokenizer())
    print(json.dumps({"data": str(args.out), "model": str(args.model_out), "num_parameters": num_parameters}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
