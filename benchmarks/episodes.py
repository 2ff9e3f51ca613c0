"""Measures what the multi-turn examples learn, each with several seeds, in complete runs.

    python benchmarks/episodes.py                                # both, seeds 0, 1, 2
    python benchmarks/episodes.py --examples guess --seeds 0
    python benchmarks/episodes.py --table-only                   # the table of the runs in --out

A seed determines data, starting model, order of the prompts and sampling. Complete runs in --out are not
repeated. The calculator's reward is the validation reward (256 held-out sums, greedy). The guessing game's is
the mean over the first and over the last five steps, with 256 games each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from recipes import ROOT, RUN_TIMEOUT_S, json_lines, last_line, paceline

from paceline.sizing.machine import free_port

EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, kw_only=True)
class Example:
    """Metrics to show for an example, as means of the first and of the last `width` values."""

    reward: str
    success: str
    calls: str
    width: int = 1
    has_environment: bool = False


SHOWN = {
    "calculator": Example(
        reward="val/reward/mean", success="val/reward/mean", calls="episode/tool_calls/mean"
    ),
    "guess": Example(
        reward="reward/environment/mean",
        success="reward/environment/won/mean",
        calls="episode/turns/mean",
        width=5,
        has_environment=True,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Makes missing runs and prints the table."""
    args = parse_args(argv)
    out: Path = args.out.resolve()
    wanted = [(example, seed) for example in args.examples for seed in args.seeds]
    if not args.table_only:
        for example, seed in wanted:
            if not (folder_of(out, example, seed) / "finding.json").is_file():
                run(folder_of(out, example, seed), example, seed, args.overrides)
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(table(out, wanted))
    return 0 if all(failure_of(folder_of(out, *key)) == "" for key in wanted) else 1


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="for every run")
    parser.add_argument(
        "--examples", type=lambda text: text.split(","), default=sorted(SHOWN), help=f"of {', '.join(SHOWN)}"
    )
    parser.add_argument(
        "--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2]
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "episodes", help="folder for the runs' directories"
    )
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.examples) - set(SHOWN))
    if unknown:
        parser.error(f"no such example: {', '.join(unknown)}; there are {', '.join(SHOWN)}")
    return args


def folder_of(out: Path, example: str, seed: int) -> Path:
    """Returns the folder of a run and its inputs."""
    return out / f"{example}-{seed}"


def run(folder: Path, example: str, seed: int, overrides: Sequence[str]) -> None:
    """Runs an example; writes `finding.json`, also after a failure."""
    prepare(folder, example, seed, overrides)
    values = [
        f"trainer.run_dir={folder}/run",
        f"trainer.seed={seed}",
        "trainer.resume=never",
        f"model.path={folder}/start",
        f"data.train_files={folder}/data/train.parquet",
    ]
    if not SHOWN[example].has_environment:
        values.append(f"data.val_files={folder}/data/val.parquet")
    print(f"{time.strftime('%H:%M:%S')}  {example}, seed {seed}", flush=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    config = str(EXAMPLES / example / "grpo.yaml")
    with environment_of(example, folder) as address, (folder / "train.log").open("w") as log:
        command = [*paceline(), "train", config, "--plain", *values, *address, *overrides]
        began = time.monotonic()
        ended = subprocess.run(command, check=False, cwd=ROOT, stdout=log, stderr=log, timeout=RUN_TIMEOUT_S)
    failure = last_line(folder / "train.log") if ended.returncode else ""
    finding = {"seconds": time.monotonic() - began, "failure": failure}
    (folder / "finding.json").write_text(json.dumps(finding))


def prepare(folder: Path, example: str, seed: int, overrides: Sequence[str]) -> None:
    """Makes missing data and the warmed-up model; applies only the learner's overrides."""
    source, data, model, start = EXAMPLES / example, folder / "data", folder / "model", folder / "start"
    if (start / "config.json").is_file():
        return
    inputs = ["--seed", str(seed), "--out", str(data), "--model-out", str(model)]
    values = [
        f"seed={seed}",
        f"sft.train_files={data}/sft.parquet",
        f"sft.output={start}",
        f"model.path={model}",
        *(one for one in overrides if one.startswith("learner.")),
    ]
    for command in (
        [sys.executable, str(source / "prepare.py"), *inputs],
        [*paceline(), "sft", str(source / "sft.yaml"), *values],
    ):
        subprocess.run(command, check=True, cwd=ROOT, timeout=RUN_TIMEOUT_S)


@contextmanager
def environment_of(example: str, folder: Path) -> Iterator[list[str]]:
    """Serves the example's environment, if any; yields its part of the configuration."""
    if not SHOWN[example].has_environment:
        yield []
        return
    port = free_port()
    with (folder / "environment.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / example / "environment.py")],
            env={**os.environ, "PORT": str(port)},
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    try:
        yield [f"rollout.environment.address=127.0.0.1:{port}"]
    finally:
        process.terminate()
        process.wait()


def failure_of(folder: Path) -> str | None:
    """Returns why a run failed; "" if it completed, None if it does not exist."""
    path = folder / "finding.json"
    return str(json.loads(path.read_text())["failure"]) if path.is_file() else None


def table(out: Path, wanted: Sequence[tuple[str, int]]) -> str:
    """Returns Markdown with a line per run, and each example's mean over the seeds."""
    lines = [
        "| example | seed | reward before | after | right before | after | calls | after | steps | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for example in dict.fromkeys(example for example, _ in wanted):
        rows = []
        for seed in (seed for name, seed in wanted if name == example):
            folder = folder_of(out, example, seed)
            failure = failure_of(folder)
            if failure is None:
                continue
            values, steps = read(folder / "run" / "metrics.jsonl", example)
            seconds = json.loads((folder / "finding.json").read_text())["seconds"]
            cells = " | ".join(f"{value:.3f}" for value in values)
            lines.append(
                f"| {example} | {seed} | {cells} | {steps} | {seconds:.0f} | {failure}".rstrip()
                .removesuffix("|")
                .rstrip()
                + " |"
            )
            rows.append(values)
        if rows:
            means = " | ".join(f"**{fmean(column):.3f}**" for column in zip(*rows, strict=True))
            lines.append(f"| **{example}** | mean | {means} | | |")
    return "\n".join(lines)


def read(path: Path, example: str) -> tuple[list[float], int]:
    """Returns first and last value of each shown metric, and the number of steps."""
    metrics = json_lines(path)
    values: list[float] = []
    for name in (SHOWN[example].reward, SHOWN[example].success, SHOWN[example].calls):
        series = [line[name] for line in metrics if line.get(name) is not None] or [float("nan")]
        width = SHOWN[example].width
        values += [fmean(series[:width]), fmean(series[-width:])]
    return values, sum("timing_s/step" in line for line in metrics)


if __name__ == "__main__":
    sys.exit(main())
