"""Writes training and held-out rows of reasoning-gym's tasks, and scores answers.

    pip install reasoning-gym
    python examples/smollm2/tasks.py

The library draws the rows and grades the last number of a response. Each file has the same number of rows of
every task, and the files share no question.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Row = Mapping[str, Any]
# Settings with which a model of 135 million parameters solves the tasks sometimes.
TASKS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 50},
    "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 25},
    "letter_counting": {"min_words": 1, "max_words": 2},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 10},
}
NUM_TRAINING, NUM_HELD_OUT = 384, 64
TRAINING_SEED, HELD_OUT_SEED = 1, 1_000_001


_NUMBER = re.compile(r"-?\d+")


def last_number(response: str, ground_truth: str, *, data_source: str, entry: str, **extra: object) -> float:
    """Returns the library's grade for the last number of the response; 0 if there is none."""
    from paceline.sdk.adapters.reasoning_gym import score

    numbers = _NUMBER.findall(response)
    if not numbers:
        return 0.0
    return score(numbers[-1], ground_truth, data_source=data_source, entry=entry, tag="")


def split(
    drawn: Iterable[Row], others: Iterable[Row], num_training: int, num_held_out: int
) -> tuple[list[Row], list[Row]]:
    """Takes training rows from `drawn` and held-out rows from `others`, each question only once.

    Raises:
        SystemExit: there are too few different questions.
    """
    asked: set[str] = set()
    parts: list[list[Row]] = []
    for rows, wanted in ((others, num_held_out), (drawn, num_training)):
        part: list[Row] = []
        for row in rows:
            question = json.dumps(row["prompt"])
            if len(part) < wanted and question not in asked:
                asked.add(question)
                part.append(row)
        if len(part) < wanted:
            raise SystemExit(
                f"{len(part)} different questions instead of {wanted}: widen the settings in TASKS"
            )
        parts.append(part)
    return parts[1], parts[0]


def main(argv: list[str] | None = None) -> int:
    """Writes the training and the held-out file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "data", help="folder for the two files")
    given = parser.parse_args(argv)
    try:
        from paceline.sdk.adapters.reasoning_gym import rows
    except ImportError as error:
        raise SystemExit(f"{error}: `pip install reasoning-gym` first") from error
    files: dict[str, list[Row]] = {"tasks_train": [], "tasks_val": []}
    for task, settings in TASKS.items():
        drawn, others = (
            rows(task, size=5 * size, seed=seed, **settings)
            for size, seed in ((NUM_TRAINING, TRAINING_SEED), (NUM_HELD_OUT, HELD_OUT_SEED))
        )
        for part, chosen in zip(
            files.values(), split(drawn, others, NUM_TRAINING, NUM_HELD_OUT), strict=True
        ):
            part.extend(chosen)
    given.output.mkdir(parents=True, exist_ok=True)
    for name, part in files.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in part)
        (given.output / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(json.dumps({name: len(part) for name, part in files.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
