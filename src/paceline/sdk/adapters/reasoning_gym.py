"""Turns tasks of the library `reasoning-gym` into rows of a run, and computes their reward.

python -m paceline.sdk.adapters.reasoning_gym leg_counting basic_arithmetic --size 1000 --seed 1 > train.jsonl

The run sets `data.extra_keys: [entry]` and the reward function `paceline.sdk.adapters.reasoning_gym:score`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import reasoning_gym

from paceline.core.errors import ConfigError


def rows(task: str, *, size: int, seed: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """Yields rows in the form of `data.train_files`, with the library's entry in the column `entry`.

    Args:
        task: the library's name of a task.
        size: number of rows.
        seed: use another seed for other rows, such as those for validation.
        settings: settings of the task, as for `reasoning_gym.create_dataset`.

    Raises:
        ConfigError: JSON cannot hold the entries of this task, so its answers could not be graded.
    """
    for made in reasoning_gym.create_dataset(task, size=size, seed=seed, **settings):
        answer = "" if made["answer"] is None else str(made["answer"])
        try:
            entry = json.dumps(made)
            is_kept = score(answer, answer, data_source=task, entry=entry, tag="") == _graded(
                task, answer, made
            )
        except (TypeError, ValueError):
            is_kept = False
        if not is_kept:
            raise ConfigError(
                f"the entries of {task} are more than JSON can hold, and its answers would be graded "
                "otherwise than by the library: take another task"
            )
        yield {
            "prompt": [{"role": "user", "content": made["question"]}],
            "ground_truth": answer,
            "data_source": task,
            "entry": entry,
        }


def score(
    response: str, ground_truth: str, *, data_source: str, entry: str, tag: str = "answer", **extra: object
) -> float:
    """Grades a response as the library does, from 0 to 1.

    Args:
        response: the decoded response.
        ground_truth: unused; the entry has it.
        data_source: the task.
        entry: the row's column `entry`.
        tag: the answer is the content of the last `<tag>...</tag>`, if there is one; "": the whole response.
        extra: the item's other fields, unused.
    """
    answer: str | None = response.strip()
    if tag:
        tagged = re.findall(rf"<{tag}>(.*?)</{tag}>", response, re.DOTALL)
        answer = tagged[-1].strip() if tagged else None
    return _graded(data_source, answer, json.loads(entry))


def _graded(task: str, answer: str | None, entry: dict[str, Any]) -> float:
    return float(reasoning_gym.get_score_answer_fn(task)(answer, entry))


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes rows of the given tasks to standard output, one JSON object per line."""
    parser = argparse.ArgumentParser(description="rows of reasoning-gym for data.train_files")
    parser.add_argument("tasks", nargs="+", metavar="TASK")
    parser.add_argument("--size", type=int, default=1000, help="rows of each task (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="another one for validation (default: 1)")
    chosen = parser.parse_args(arguments)
    for task in chosen.tasks:
        for row in rows(task, size=chosen.size, seed=chosen.seed):
            sys.stdout.write(f"{json.dumps(row)}\n")


if __name__ == "__main__":
    main()
