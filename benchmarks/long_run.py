"""Generates the folder of a long run, and measures verifying, reporting and showing it.

    python benchmarks/long_run.py --steps 20000
    python benchmarks/long_run.py --steps 2000,20000 --files

Generates journal, metrics and spans of a run without validations, with random numbers; with --files also the
trajectory files, with four tokens each. `paceline verify` must find the run sound. Each command is a separate
process; RSS is its peak. The page shows its head and curves before it requests the journal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import numpy as np

from paceline.config.load import dump_yaml, parse
from paceline.config.run import RunConfig
from paceline.controller.batch.collected_batch import Batch
from paceline.controller.batch.training_rows import rows
from paceline.controller.run.records.trajectories import TrajectoryFile
from paceline.controller.verify.digests import digest_of
from paceline.controller.verify.journal.steps import recomputed_metrics
from paceline.controller.verify.journal.term import Term
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import (
    FinishReason,
    RewardContext,
    SamplingSpec,
    ScoredHeader,
    Trajectory,
)
from paceline.core.training import batch_digest
from paceline.data.mixture import PromptMixture
from paceline.data.prompts import Prompt
from paceline.wire import blob_digest, encode_trajectory
from support.synthetic_run import metrics_of, spans_of

RUN, NUM_PROMPTS = "long", 10_000
PHASES = ("dispatch", "collect", "learn", "publish", "commit")
GUARD = {"adjustments": {"lr_scale": 1.0}, "histories": {"throughput": [5000.0 + i for i in range(50)]}}
SAMPLING = SamplingSpec(temperature=1.0, max_tokens=4)

# The page requests these when it opens.
OPEN_PAGE = """
from paceline.show.report.content import RunContent
from paceline.show.report.page import page, to_json
content = RunContent(Path(folder))
shown = [page("long"), *map(to_json, [{answers}])]
status = 0 if all(shown) else 1
"""
CURVES = "content.head(), content.metrics()"
COMMANDS = {
    "verify": 'status = main(["verify", folder])',
    "report": 'status = main(["report", folder])',
    "page, curves": OPEN_PAGE.format(answers=CURVES),
    "page, all": OPEN_PAGE.format(answers=f"{CURVES}, content.journal()"),
}
# A child's getrusage includes its parent's peak; the kernel's VmHWM starts anew with the program.
PROGRAM = """
import re, sys
from pathlib import Path
from paceline.cli.main import main
folder = sys.argv[1]
{command}
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""


class Stored:
    """Serves one step's samples in place of a broker."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._by_id = {trajectory.trajectory_id: trajectory for trajectory in trajectories}

    async def text_blobs(self, headers: Sequence[ScoredHeader]) -> list[bytes]:
        """Returns ids as texts."""
        return [str(header.trajectory_id).encode() for header in headers]

    async def trajectories(self, headers: Sequence[ScoredHeader]) -> list[Trajectory]:
        """Returns the samples' trajectories."""
        return [self._by_id[header.trajectory_id] for header in headers]

    async def learner_log_probs(self, headers: Sequence[ScoredHeader]) -> list[None]:
        """Returns None per sample: the run has no learner log-probs."""
        return [None] * len(headers)


class DrawnRun:
    """Generates a run's folder step by step, so that a long run fits into memory."""

    def __init__(self, folder: Path, options: argparse.Namespace, num_steps: int) -> None:
        self._folder, self._options, self._num_steps = folder, options, num_steps
        self._draw, self._n, self._phase = random.Random(5), 0, "starting"  # noqa: S311
        tree = {
            "data": {"train_files": "t.jsonl", "train_batch_size": options.prompts},
            "actor": {"ppo_mini_batch_size": options.prompts},
            "model": {"path": "m"},
            "reward": {"functions": [{"name": "exact_match"}]},
            "rollout": {"n": options.samples},
            "trainer": {
                "total_steps": num_steps,
                "save_trajectories": options.files,
                "run_dir": str(folder),
            },
        }
        self.config = parse(RunConfig, tree)
        self._cursor = PromptMixture({"": range(NUM_PROMPTS)}, batch_size=options.prompts, seed=0)
        self._prompts = {
            i: Prompt(
                prompt_id=i, token_ids=np.arange(3, dtype=np.int32), context=RewardContext(ground_truth="1")
            )
            for i in range(NUM_PROMPTS)
        }

    async def write(self) -> None:
        """Writes the folder."""
        self._folder.mkdir(parents=True)
        (self._folder / "config.resolved.yaml").write_text(dump_yaml(self.config))
        with ExitStack() as files:
            self._events, self._metrics, self._spans = (
                files.enter_context((self._folder / f"{name}.jsonl").open("w"))
                for name in ("events", "metrics", "spans")
            )
            term = Term.of(self.config, self._cursor).to_plain()
            self._event("run", run_id=RUN, term=1, step=0, data_digest="d", verify=term)
            self._enter(0, "forming", "publish")
            self._event("commit", version=0, digest=_weights(0), servers=["rollout-0"])
            self._enter(0, "commit")
            self._finish(0, {})
            for step in range(1, self._num_steps + 1):
                await self._step(step)
            self._enter(self._num_steps, "ended")
            self._event("end", ok=True, message=f"{self._num_steps} steps done", step=self._num_steps)

    async def _step(self, step: int) -> None:
        policy, asked = (
            PolicyTag(version=step - 1, digest=_weights(step - 1)),
            sorted(self._cursor.take(step)),
        )
        self._event("dispatch", step=step, policy=str(policy), prompts=asked)
        self._enter(step, *PHASES[:2])
        drawn = [
            self._sample(step, prompt, sample, policy)
            for prompt in asked
            for sample in range(self._options.samples)
        ]
        headers = [header for header, _ in drawn]
        for header in headers:
            self._event(
                "trajectory",
                id=str(header.trajectory_id),
                verdict="admitted",
                policy=str(policy),
                digest=header.blob_digest,
                reward=header.reward,
                server=header.server_id,
            )
        batch = Batch(samples=headers, dropped=[], verdicts=Counter(), num_groups=len(asked))
        digest = batch_digest(policy, rows(batch))
        self._event("batch", step=step, policy=str(policy), digest=digest, num_rows=len(headers))
        self._enter(step, "learn")
        self._event("trained", step=step, digest=digest)
        self._enter(step, "publish")
        self._event("commit", version=step, digest=_weights(step), servers=["rollout-0"])
        self._enter(step, "commit")
        if self._options.files:
            name = f"step_{step:06d}.parquet"
            file = TrajectoryFile(self._folder / "trajectories" / name, step=step, prompts=self._prompts)
            written = await file.write(headers, Stored([trajectory for _, trajectory in drawn]))
            self._event("saved", step=step, file=name, digest=written, num_rows=len(headers))
        groups: dict[int, list[float]] = {}
        for header in headers:
            groups.setdefault(header.trajectory_id.prompt_id, []).append(header.reward or 0.0)
        admitted = Counter({"admitted": len(headers)})
        self._finish(
            step, recomputed_metrics.of_barrier(admitted, ()) | recomputed_metrics.of_rewards(groups)
        )
        self._spans.write("".join(json.dumps(span) + "\n" for span in spans_of(step)))

    def _sample(
        self, step: int, prompt: int, sample: int, policy: PolicyTag
    ) -> tuple[ScoredHeader, Trajectory]:
        draw, key = (
            self._draw,
            TrajectoryId(step=step, purpose="train", prompt_id=prompt, sample_index=sample),
        )
        trajectory = Trajectory(
            run_id=RUN,
            trajectory_id=key,
            policy=policy,
            prompt_token_ids=self._prompts[prompt].token_ids,
            response_token_ids=np.array([draw.randrange(1000) for _ in range(4)], dtype=np.int32),
            response_log_probs=np.full(4, -0.5, dtype=np.float32),
            response_mask=np.ones(4, dtype=np.uint8),
            finish_reason=FinishReason.STOP,
            sampling=SAMPLING,
            seed=draw.randrange(1 << 31),
        )
        reward = float(draw.random() < 0.5)
        header = ScoredHeader(
            run_id=RUN,
            trajectory_id=key,
            policy=policy,
            blob_key=str(key),
            blob_digest=blob_digest(encode_trajectory(trajectory)),
            num_prompt_tokens=3,
            num_response_tokens=4,
            num_sampled_tokens=4,
            finish_reason=FinishReason.STOP,
            server_id="rollout-0",
            generation_s=0.1,
            reward=reward,
            components={"exact_match": reward},
            reward_error=None,
            scorer="reward-0",
            reward_s=0.0,
        )
        return header, trajectory

    def _finish(self, step: int, recomputed_metrics: dict[str, float]) -> None:
        drawn = metrics_of(step, self._num_steps, self._draw) if step else {"step": 0}
        line = json.dumps({name: v for name, v in drawn.items() if "val/" not in name} | recomputed_metrics)
        self._metrics.write(line + "\n")
        self._event(
            "step",
            step=step,
            metrics=digest_of(line.encode()),
            log_position=f"{step}-0",
            cursor=self._cursor.state.to_plain(),
            guard=GUARD,
        )

    def _enter(self, step: int, *phases: str) -> None:
        for phase in phases:
            self._event("phase", step=step, source=self._phase, to=phase)
            self._phase = phase

    def _event(self, name: str, **fields: Any) -> None:
        stamped = {"n": self._n, "time": 1_700_000_000.0 + 0.25 * self._n, "event": name, **fields}
        self._events.write(json.dumps(stamped, separators=(",", ":")) + "\n")
        self._n += 1


def _weights(version: int) -> str:
    return f"{version:016x}"


def measured(command: str, folder: Path) -> tuple[float, float, int]:
    """Runs a command; returns its seconds, CPU seconds and peak RSS in bytes.

    Raises:
        SystemExit: the command failed.
    """
    began, cpu_s = time.perf_counter(), _children_cpu_s()
    program = [sys.executable, "-c", PROGRAM.format(command=command), str(folder)]
    ended = subprocess.run(program, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    seconds, cpu_s = time.perf_counter() - began, _children_cpu_s() - cpu_s
    if ended.returncode:
        raise SystemExit(f"{command} ended with {ended.returncode}:\n{ended.stdout[-2000:]}")
    return seconds, cpu_s, int(ended.stdout.split()[-1]) * 1024


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def lines_of(folder: Path, num_steps: int) -> Iterator[str]:
    """Yields a run's lines of the table."""
    for name, command in COMMANDS.items():
        seconds, cpu_s, rss = measured(command, folder)
        per_step = seconds / num_steps * 1e3
        yield f"| {name} | {num_steps:,} | {seconds:.1f} | {cpu_s:.1f} | {per_step:.2f} | {rss / 1e6:.0f} |"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", default="2000,20000", help="lengths of runs, comma-separated")
    parser.add_argument("--prompts", type=int, default=4, help="per step")
    parser.add_argument("--samples", type=int, default=4, help="per prompt")
    parser.add_argument("--files", action="store_true", help="also generate the trajectory files")
    parser.add_argument(
        "--keep", type=Path, help="folder in which to keep the runs; default: a temporary one"
    )
    return parser.parse_args(given)


def main() -> None:
    """Prints the table."""
    options = arguments()
    print(
        f"{options.prompts} x {options.samples} samples a step, files of trajectories: {options.files}; "
        f"{platform.machine()}, {os.cpu_count()} cores"
    )
    print("| command | steps | s | CPU, s | ms a step | RSS, MB |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for num_steps in map(int, options.steps.split(",")):
            folder = (options.keep or Path(scratch)) / f"long-{num_steps}"
            asyncio.run(DrawnRun(folder, options, num_steps).write())
            for line in lines_of(folder, num_steps):
                print(line, flush=True)


if __name__ == "__main__":
    main()
