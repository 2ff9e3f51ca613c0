"""Measures how often ppo_examiner.yaml's judge agrees with the checker: `python agreement.py [RUN_DIR]`.

Uses the held-out answers of `verdicts_val.parquet`. With a run directory, it also uses the answers of the
run's steps, which have both grades as components of the reward.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from paceline.config.load import load
from paceline.config.reward import RewardModelConfig
from paceline.config.run import RunConfig
from paceline.core.errors import RewardError
from paceline.core.scoring import ScoreItem
from paceline.reward.builtin import gsm8k

HERE = Path(__file__).resolve().parent
JUDGE, CHECKER = "examiner", "gsm8k"


def agreement(grades: Iterable[tuple[float | None, float]]) -> dict[str, float]:
    """Compares pairs of grades: the judge's (None if missing) and the checker's."""
    pairs = list(grades)
    counts = {
        "agreed": sum(judged == exact for judged, exact in pairs),
        "wrongly yes": sum(judged == 1 and exact == 0 for judged, exact in pairs),
        "wrongly no": sum(judged == 0 and exact == 1 for judged, exact in pairs),
        "no grade": sum(judged is None for judged, _ in pairs),
    }
    return {name: count / len(pairs) for name, count in counts.items()}


def of_held_out(judge: RewardModelConfig, rows: list[dict[str, Any]]) -> list[tuple[float | None, float]]:
    """Loads the judge and grades rows of `question`, `response` and `ground_truth`."""
    import torch

    from paceline.reward.models.generative import GenerativeModel
    from paceline.reward.models.model import ModelOptions

    torch.set_num_threads(1)
    options = ModelOptions(
        path=judge.path,
        prompt_file=judge.prompt_file or "",
        pattern=judge.pattern,
        words=judge.words,
        max_tokens=judge.max_tokens,
    )
    items = [
        ScoreItem(
            trajectory_id=str(index),
            prompt=row["question"],
            response=row["response"],
            ground_truth=row["ground_truth"],
        )
        for index, row in enumerate(rows)
    ]
    grades = [None if isinstance(grade, RewardError) else grade for grade in GenerativeModel(options)(items)]
    exact = [gsm8k(row["response"], row["ground_truth"], method="flexible") for row in rows]
    return list(zip(grades, exact, strict=True))


def of_step(components: Iterable[str]) -> list[tuple[float | None, float]]:
    """Returns the two grades of a step's trajectories."""
    rows: list[Mapping[str, float]] = [json.loads(text) for text in components]
    return [(row[JUDGE], row[CHECKER]) for row in rows]


def main(arguments: list[str]) -> None:
    """Prints a line of JSON for the held-out answers, and one for each step of the run."""
    judge = next(
        model for model in load(RunConfig, HERE / "ppo_examiner.yaml").reward.models if model.name == JUDGE
    )
    rows = pq.read_table(HERE / "data" / "verdicts_val.parquet").to_pylist()
    print(json.dumps({"held out": agreement(of_held_out(judge, rows)), "answers": len(rows)}))
    for run_dir in map(Path, arguments):
        for file in sorted(run_dir.glob("trajectories/step_*.parquet")):
            grades = of_step(pq.read_table(file, columns=["components"])["components"].to_pylist())
            print(json.dumps({"step": int(file.stem[5:]), **agreement(grades), "answers": len(grades)}))


if __name__ == "__main__":
    main(sys.argv[1:])
