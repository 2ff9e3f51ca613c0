"""Measures what the recipes learn, each with several seeds, in complete runs.

    python benchmarks/recipes.py                               # all, seeds 0, 1, 2: 90 minutes on two cores
    python benchmarks/recipes.py --recipes grpo,dapo --seeds 0
    python benchmarks/recipes.py --table-only                  # the table of the runs in --out
    python benchmarks/recipes.py --jobs 8 learner.world_size=1 learner.devices=[0] rollout.devices=[0] \\
        model.dtype=bfloat16                                   # all on one GPU

A seed determines data, starting model, order of the prompts and sampling. Complete runs in --out are not
repeated. Prints a line per run: validation reward (held-out prompts, greedy) before and after, training
steps, wall seconds of the command (start-up of the services and validation included), the largest
`actor/ppo_kl` of a step, and the guard's actions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "examples" / "recipes"
ARITHMETIC = ROOT / "examples" / "arithmetic"
RUN_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A run's results. Rewards are means over validation prompts; `failure` is empty for a complete run."""

    recipe: str
    seed: int
    before: float
    after: float
    steps: int
    seconds: float
    ppo_kl_max: float
    firings: int
    failure: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Makes missing runs and prints the table."""
    args = parse_args(argv)
    out: Path = args.out.resolve()
    wanted = [(recipe, seed) for seed in args.seeds for recipe in args.recipes]
    if not args.table_only:
        with ThreadPoolExecutor(args.jobs) as pool:
            starts = dict(
                zip(
                    args.seeds,
                    pool.map(lambda seed: starting_model(out, seed, args.overrides), args.seeds),
                    strict=True,
                )
            )
            missing = [key for key in wanted if read_finding(out, *key) is None]
            list(pool.map(lambda key: run(out, starts[key[1]], *key, args.overrides), missing))
    findings = {(recipe, seed): read_finding(out, recipe, seed) for recipe, seed in wanted}
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(table([finding for finding in findings.values() if finding is not None]))
    return 0 if all(finding is not None and not finding.failure for finding in findings.values()) else 1


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    known = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem != "base")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="for every run")
    parser.add_argument(
        "--recipes", type=lambda text: text.split(","), default=known, help=f"of {', '.join(known)}"
    )
    parser.add_argument(
        "--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2]
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "recipes", help="folder for the runs' directories"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.recipes) - set(known))
    if unknown:
        parser.error(f"no such recipe: {', '.join(unknown)}; there are {', '.join(known)}")
    return args


def starting_model(out: Path, seed: int, overrides: Sequence[str]) -> Path:
    """Makes the seed's data, tokenizer and warmed-up model; returns their folder.

    It contains `data`, `model` and `start`. Applies only the learner's overrides.
    """
    folder = out / f"seed-{seed}" / "start-model"
    if (folder / "start" / "config.json").is_file():
        return folder
    prepare = [sys.executable, str(ARITHMETIC / "prepare.py"), "--seed", str(seed)]
    subprocess.run(
        [*prepare, "--out", str(folder / "data"), "--model-out", str(folder / "model")], check=True, cwd=ROOT
    )
    values = [
        f"seed={seed}",
        f"sft.train_files={folder}/data/sft.parquet",
        f"sft.output={folder}/start",
        f"model.path={folder}/model",
        *(one for one in overrides if one.startswith("learner.")),
    ]
    subprocess.run(
        [*paceline(), "sft", str(ARITHMETIC / "sft.yaml"), *values],
        check=True,
        cwd=ROOT,
        timeout=RUN_TIMEOUT_S,
    )
    return folder


def run(out: Path, start: Path, recipe: str, seed: int, overrides: Sequence[str]) -> None:
    """Runs `paceline train`; writes `finding.json` into its directory, also after a failure."""
    folder = run_folder(out, recipe, seed)
    folder.mkdir(parents=True, exist_ok=True)
    values = [
        f"trainer.run_dir={folder}",
        f"trainer.seed={seed}",
        "trainer.resume=never",
        f"model.path={start}/start",
        f"data.train_files={start}/data/train.parquet",
        f"data.val_files={start}/data/val.parquet",
        *overrides,
    ]
    command = [*paceline(), "train", str(RECIPES / f"{recipe}.yaml"), "--plain", *values]
    print(f"{time.strftime('%H:%M:%S')}  {recipe}, seed {seed}", flush=True)
    began = time.monotonic()
    try:
        with (folder / "command.log").open("w", encoding="utf-8") as log:
            ended = subprocess.run(
                command, check=False, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=RUN_TIMEOUT_S
            )
        failure = "" if ended.returncode == 0 else last_line(folder / "command.log")
    except subprocess.TimeoutExpired:
        failure = f"not over after {RUN_TIMEOUT_S:.0f} s; {folder}/logs"
    seconds = time.monotonic() - began
    (folder / "finding.json").write_text(json.dumps({"seconds": seconds, "failure": failure}))
    finding = read_finding(out, recipe, seed)
    print(f"          {row(finding) if finding else 'no metrics'}", flush=True)


def read_finding(out: Path, recipe: str, seed: int) -> Finding | None:
    """Returns a run's results; None if the run is missing or incomplete."""
    folder = run_folder(out, recipe, seed)
    if not (folder / "finding.json").is_file():
        return None
    outcome = json.loads((folder / "finding.json").read_text())
    metrics = json_lines(folder / "metrics.jsonl")
    events = json_lines(folder / "events.jsonl")
    rewards = [line["val/reward/mean"] for line in metrics if "val/reward/mean" in line]
    trained = [line for line in metrics if line["step"] > 0]
    return Finding(
        recipe=recipe,
        seed=seed,
        before=rewards[0] if rewards else float("nan"),
        after=rewards[-1] if len(rewards) > 1 else float("nan"),
        steps=len(trained),
        seconds=outcome["seconds"],
        ppo_kl_max=max((line.get("actor/ppo_kl") or 0.0 for line in trained), default=float("nan")),
        firings=sum(event.get("event") == "guard" for event in events),
        failure=outcome["failure"],
    )


def table(findings: Sequence[Finding]) -> str:
    """Returns Markdown with a line per run, and each recipe's mean over the seeds."""
    lines = [
        "| recipe | seed | reward before | after | steps | seconds | ppo_kl max | guard firings |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for recipe in sorted({finding.recipe for finding in findings}):
        runs = sorted((one for one in findings if one.recipe == recipe), key=lambda finding: finding.seed)
        lines += [row(one) for one in runs]
        before, after = fmean(one.before for one in runs), fmean(one.after for one in runs)
        lines.append(f"| **{recipe}** | mean | **{before:.3f}** | **{after:.3f}** | | | | |")
    return "\n".join(lines)


def row(finding: Finding) -> str:
    """Returns a run's line of the table."""
    cells = [
        finding.recipe,
        str(finding.seed),
        f"{finding.before:.3f}",
        f"{finding.after:.3f}",
        str(finding.steps),
        f"{finding.seconds:.0f}",
        f"{finding.ppo_kl_max:.2g}",
        str(finding.firings),
    ]
    return f"| {' | '.join(cells)} |" + (f" {finding.failure}" if finding.failure else "")


def run_folder(out: Path, recipe: str, seed: int) -> Path:
    """Returns the path of a run's directory."""
    return out / f"seed-{seed}" / recipe


def paceline() -> list[str]:
    """Returns the `paceline` command of this interpreter."""
    return [sys.executable, "-m", "paceline.cli.main"]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSONL file; [] if it is missing."""
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.is_file() else []
    )


def last_line(path: Path) -> str:
    """Returns the last line of a command's output."""
    lines = path.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
