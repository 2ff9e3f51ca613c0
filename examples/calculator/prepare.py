"""Writes the calculator example's inputs: the arithmetic example's sums, and a model that may call a tool.

The warm-up answers come from two simulated pupils. The hasty pupil writes the sum at once and forgets the
carry. The other writes a call of the calculator, then repeats its result. Most answers are the hasty pupil's.
Reinforcement learning sees correct sums only through the reward, and must discover that the calculator helps.

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

TOOL = "<|tool|>"
# The text before and after the expression of a call. Each is one token, so a tiny model has little to write.
CALL, CLOSE = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'


def call(operands: Sequence[int]) -> str:
    """Returns a calculator call that adds the operands."""
    return f"{CALL}{'+'.join(map(str, operands))}{CLOSE}"


def build_tokenizer() -> Any:
    """Returns the arithmetic example's tokenizer with a role for tools and the two parts of a call."""
    tokenizer = arithmetic.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*arithmetic.ROLES, TOOL]})
    tokenizer.add_tokens([CALL, CLOSE])
    return tokenizer


def to_sft(problems: Sequence[Any], rng: np.random.Generator, hasty_share: float) -> pa.Table:
    """Makes pairs of a conversation and its next answer; a conversation with the tool gives two pairs."""
    prompts, answers = [], []
    for problem in problems:
        question = {"role": "user", "content": problem.question}
        if rng.random() < hasty_share:
            prompts.append([question])
            answers.append(str(arithmetic.add_without_carry(problem.operands)))
            continue
        asked = call(problem.operands)
        prompts.append([question])
        answers.append(asked)
        prompts.append(
            [question, {"role": "assistant", "content": asked}, {"role": "tool", "content": problem.answer}]
        )
        answers.append(problem.answer)
    return pa.table({"prompt": prompts, "answer": answers, "ground_truth": answers})


def write_data(
    out: Path, *, seed: int, num_train: int, num_val: int, num_sft: int, hasty_share: float
) -> None:
    """Writes `train.parquet`, `val.parquet`, `sft.parquet`; `val` shares no problem with the other two."""
    arithmetic.write_data(out, seed=seed, num_train=num_train, num_val=num_val, num_sft=1, hasty_share=1.0)
    val_rng, rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 2])
    val = arithmetic.draw_problems(val_rng, num_val, avoid=set(), distinct=True)
    problems = arithmetic.draw_problems(rng, num_sft, avoid={p.key for p in val}, distinct=False)
    pq.write_table(to_sft(problems, rng, hasty_share), out / "sft.parquet")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the data and the model, and prints a summary as a line of JSON."""
    parser = arithmetic.parser_of(
        "calculator",
        HERE,
        num_val=256,
        num_sft=25600,
        hasty_share=0.85,
        hasty="warm-up answers without a tool",
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
