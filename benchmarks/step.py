"""Measures a training step through the four services, phase by phase, with random weights.

    python benchmarks/step.py --shape 7B --learners 4 --engines 4x1      # 8 GPUs
    python benchmarks/step.py --shape 7B --learners 2 --engines 2x1      # 4 GPUs
    python benchmarks/step.py --shape 7B --learners 4 --engines 4x1 --placement colocated   # 4 GPUs
    python benchmarks/step.py --shape 3B --placement auto    # a short configuration, on all GPUs
    python benchmarks/step.py --shape tiny --learners 1 --engines 1x1 --device cpu \\
        --prompts 8 --prompt-tokens 32 --response-tokens 16

Runs `paceline train` with GRPO without a reference model. All prompts have the given number of random tokens,
responses end at the limit, and the reward is a cheap function of the text. With `--lengths mixed`, prompts
have between a quarter of the number and the full number, and response lengths are log-normal with a median of
three eighths of the limit. `--engines 2x1` means two rollout servers of tensor-parallel size 1. Learner ranks
take the first visible GPUs, engines the next; with `--placement colocated` both take turns on the same GPUs.
With `--placement auto` the configuration contains only data, model, lengths, batch and reward, and `paceline
train` chooses the rest.

Prints medians from the second step on. tokens/s count prompts and responses of the step. MFU is the update's
rate of arithmetic, without activation recomputation, as a share of the measured rate of an 8,192 x 8,192 x
8,192 bfloat16 product and of the vendor's peak. Generation is per engine GPU, the update per learner GPU.
The last lines show how long each side waits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import records
import yaml
from lengths.sitecustomize import MEDIAN
from rich.console import Console
from rich.table import Table
from shapes import SHAPES

from paceline.service.observability.gpu_metrics import visible_gpus
from paceline.sizing.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
NUM_WORDS = 1000
RUN_TIMEOUT_S = 7200.0
RATE_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
REWARD = '''"""A cheap reward: the share of words with an even number."""


def even_words(response: str, ground_truth: str, **extra: object) -> float:
    words = response.split()
    return sum(word.endswith(tuple("02468")) for word in words) / max(1, len(words))
'''
MEMORY = "perf/memory_gib/"
PHASES = (
    ("generation", "timing_s/gen"),
    ("reward, beyond generation", "timing_s/reward"),
    ("work ahead, beside generation", "timing_s/ahead"),
    ("fetch", "timing_s/fetch"),
    ("old log-probs", "timing_s/old_log_prob"),
    ("advantages", "timing_s/adv"),
    ("actor update", "timing_s/update_actor"),
    ("weights, pause", "timing_s/update_weights"),
    ("turns, part of pause and other", "timing_s/turns"),
    ("cleanup and other", "timing_s/other"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints its table."""
    args = parse_args(argv)
    work = Path(args.work or tempfile.mkdtemp(prefix="paceline-step-"))
    shutil.rmtree(work / "run", ignore_errors=True)  # its steps are not this run's
    config = write_inputs(args, work)
    rates = measured_rates() if args.device == "cuda" else None
    steps = train(args, config, work / "run" / "metrics.jsonl")
    warm = [line for line in steps if line["step"] >= 2]
    if len(steps) < args.steps or not warm:
        print(f"the run ended after {len(steps)} steps; its logs: {work}/run/logs")
        return 1
    if args.placement == "auto":
        take_layout(args, work / "run" / "config.resolved.yaml")
    metrics = medians(warm)
    report(args, metrics, len(warm), rates)
    used = num_gpus(args) if args.device == "cuda" else 0
    records.keep("steps", args.record, metrics["perf/tokens_per_s"] / max(1, used), gpus=gpu_names(used))
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="7B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument(
        "--engines", type=lambda text: tuple(int(word) for word in text.split("x")), default=(2, 1)
    )
    parser.add_argument("--placement", choices=("split", "colocated", "auto"), default="split")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--lengths", choices=("equal", "mixed"), default="equal")
    parser.add_argument("--micro-batch-tokens", type=int, default=24576)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--recompute", default="auto", help="actor.memory.recompute: none, full, or the kept share"
    )
    parser.add_argument(
        "--work",
        help="folder for inputs and the run, of which an earlier run is deleted; default: a temporary one",
    )
    records.add_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    return parser.parse_intermixed_args(argv)


def take_layout(args: argparse.Namespace, resolved: Path) -> None:
    """Sets ranks and engines as chosen by `paceline train`, and prints the choices."""
    config = yaml.safe_load(resolved.read_text())
    rollout, actor = config["rollout"], config["actor"]
    args.learners = config["learner"]["world_size"]
    args.engines = rollout["replicas"], rollout["tensor_model_parallel_size"]
    chosen = {name: actor[name] for name in ("compile", "ppo_max_token_len_per_gpu", "memory")}
    chosen |= {name: rollout[name] for name in ("gpu_memory_utilization", "sleep", "sampler")}
    print(f"chosen: placement={config['placement']}, {chosen}")


def train(args: argparse.Namespace, config: Path, path: Path) -> list[dict[str, Any]]:
    """Runs `paceline train` until the steps are done, and returns their metrics from `path`."""
    command = train_command(args, config)
    with subprocess.Popen(command, cwd=ROOT, env=environment(args)) as run:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while run.poll() is None and len(steps_in(path)) < args.steps and time.monotonic() < deadline:
            time.sleep(POLL_S)
        run.terminate()
        run.wait(STOP_TIMEOUT_S)
    return steps_in(path)[: args.steps]


def train_command(args: argparse.Namespace, config: Path) -> list[str]:
    """Returns the command of `paceline train`.

    The run is configured with one more step and stopped before it, because a run that completes writes a
    checkpoint (85 GiB for 7B).
    """
    more = f"trainer.total_steps={args.steps + 1}"
    words = ["-m", "paceline.cli.main", "train", str(config), "--plain", more, *args.overrides]
    return [sys.executable, *words]


def steps_in(path: Path) -> list[dict[str, Any]]:
    """Returns the steps' lines of a metrics file, without an incomplete last line."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
    return [line for line in lines if "timing_s/step" in line]


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Returns the environment of `paceline train`; with mixed lengths, one that limits each response."""
    if args.lengths == "equal":
        return dict(os.environ)
    folder, path = str(ROOT / "benchmarks" / "lengths"), os.environ.get("PYTHONPATH", "")
    return os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else folder,
        MEDIAN: str(args.response_tokens * 3 / 8),
    }


def write_inputs(args: argparse.Namespace, work: Path) -> Path:
    """Writes a model folder without weights, prompts, a reward and the configuration; returns its path."""
    model = work / "model"
    model.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[args.shape] | {"torch_dtype": "bfloat16" if args.device == "cuda" else "float32"}
    (model / "config.json").write_text(json.dumps(shape))
    write_tokenizer(model)
    (work / "reward.py").write_text(REWARD)
    draw = random.Random(0)  # noqa: S311
    words = [f"w{number}" for number in range(NUM_WORDS)]
    with (work / "prompts.jsonl").open("w") as file:
        for _ in range(args.prompts * (args.steps + 1)):
            most = args.prompt_tokens
            num_tokens = most if args.lengths == "equal" else draw.randint(most // 4, most)
            prompt = " ".join(draw.choices(words, k=num_tokens))
            file.write(json.dumps({"prompt": prompt, "answer": "0"}) + "\n")
    path = work / "config.yaml"
    path.write_text(yaml.safe_dump(configuration(args, work), sort_keys=False))
    return path


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token per word."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: index for index, word in enumerate(["<pad>", "<end>", *(f"w{n}" for n in range(NUM_WORDS))])
    }
    backend = Tokenizer(WordLevel(vocab=vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(folder)


def configuration(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Returns the run's configuration."""
    num_engines, parallel_size = args.engines
    cuda = args.device == "cuda"
    gpus = Machine.here().gpus
    ranks = list(gpus[: args.learners])
    begin = 0 if args.placement == "colocated" else args.learners
    engines = list(gpus[begin : begin + num_engines * parallel_size])
    # In a split layout an engine has its own GPU; otherwise `paceline train` chooses the engine's share.
    share = {"gpu_memory_utilization": 0.85} if args.placement == "split" else {}
    run = _given(args, work)
    if args.placement == "auto":
        return run
    layout: dict[str, dict[str, Any]] = {
        "actor": {
            "ppo_max_token_len_per_gpu": args.micro_batch_tokens,
            "memory": {"recompute": yaml.safe_load(args.recompute)},
        },
        "rollout": {
            "replicas": num_engines,
            "tensor_model_parallel_size": parallel_size,
            "max_num_seqs": args.max_num_seqs,
            **share,
            "devices": engines if cuda else None,
        },
        "learner": {"world_size": args.learners, "device": args.device, "devices": ranks if cuda else None},
    }
    placement = "colocated" if args.placement == "colocated" else "given"
    merged = {name: run.get(name, {}) | section for name, section in layout.items()}
    return run | merged | {"placement": placement}


def _given(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Returns a user's configuration, without layout and memory settings."""
    return {
        "data": {
            "train_files": str(work / "prompts.jsonl"),
            "ground_truth_key": "answer",
            "prompt_format": "text",
            "max_prompt_length": args.prompt_tokens,
            "max_response_length": args.response_tokens,
            "train_batch_size": args.prompts,
        },
        "model": {
            "path": str(work / "model"),
            "dtype": "bfloat16" if args.device == "cuda" else "float32",
            "load_format": "random",
        },
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {
            "ppo_mini_batch_size": args.prompts // args.mini_batches,
            "optim": {"lr": 1e-6},
        },
        "rollout": {"n": args.samples},
        "reward": {
            "functions": [{"name": f"{work}/reward.py:even_words"}],
            "num_processes": 4 if args.device == "cuda" else 1,
        },
        "trainer": {
            "name": "step",
            "run_dir": str(work / "run"),
            "total_steps": args.steps,
            "resume": "never",
            "val_before_train": False,
            "save_trajectories": False,
        },
        "service": {"startup_timeout_s": 600.0},
    }


def measured_rates() -> tuple[float, float]:
    """Measures a large bfloat16 product in a subprocess; returns its rate and the vendor's peak."""
    code = """
import torch, time
from paceline.learner.model.flops import peak_flops
a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
times = []
for _ in range(30):
    torch.cuda.synchronize(); began = time.perf_counter(); a @ b; torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
print(2 * 8192**3 / sorted(times)[len(times) // 2], peak_flops(torch.device("cuda", 0)) or "nan")
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=RATE_TIMEOUT_S)
    measured, peak = map(float, ended.stdout.split())
    return measured, peak


def medians(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the medians of the metrics that all lines have."""
    names = set.intersection(*(set(line) for line in lines))
    return {
        name: statistics.median(line[name] for line in lines if line[name] is not None)
        for name in sorted(names)
    }


def report(
    args: argparse.Namespace, metrics: Mapping[str, float], num_steps: int, rates: tuple[float, float] | None
) -> None:
    """Prints the tables."""
    console = Console(width=130)
    console.print(phases(args, metrics, num_steps))
    lines = throughput(args, metrics) | utilisation(metrics, rates) | weights(metrics) | memory(metrics)
    for name, words in lines.items():
        console.print(f"{name}: {words}")
    console.print(f"{os.cpu_count()} cores")


def phases(args: argparse.Namespace, metrics: Mapping[str, float], num_steps: int) -> Table:
    """Returns the seconds of each phase and its share of the step."""
    num_engines, parallel_size = args.engines
    table = Table(
        title=f"{args.shape}, {args.placement}, {args.learners} learner ranks, "
        f"{num_engines} x TP {parallel_size}, "
        f"{args.prompts} prompts x {args.samples} samples, "
        f"{'' if args.lengths == 'equal' else 'up to '}{args.prompt_tokens} + {args.response_tokens} tokens, "
        f"medians of {num_steps} steps"
    )
    for column in ("phase", "s", "share of the step"):
        table.add_column(column, justify="right")
    step_s = metrics["timing_s/step"]
    for label, name in PHASES:
        if name in metrics:
            table.add_row(label, f"{metrics[name]:.3f}", f"{metrics[name] / step_s:.1%}")
    table.add_row("step", f"{step_s:.3f}", "")
    return table


def throughput(args: argparse.Namespace, metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns tokens per second of the step and its phases, and the waits of each side."""
    num_engines, parallel_size = args.engines
    rollout_gpus = num_engines * parallel_size
    step_s = metrics["timing_s/step"]
    samples = args.prompts * args.samples
    response_tokens = samples * metrics["response_length/mean"]
    all_tokens = metrics["perf/tokens_per_s"] * step_s
    taken_ahead = metrics.get("ahead/gradient_share", 0.0)
    learn_rate = all_tokens * (1 - taken_ahead) / metrics["timing_s/update_actor"]
    # The first mini-batch's old log-probs come from its own forward pass, except in audited steps.
    scored = max(0.0, 1 - 1 / args.mini_batches - metrics.get("ahead/scored_share", 0.0) + taken_ahead)
    score_rate = scored * all_tokens / metrics["timing_s/old_log_prob"]
    generation_rate = response_tokens / metrics["timing_s/gen"]
    step_rate = all_tokens / step_s
    return {
        "tokens/s over the step": f"{step_rate:,.0f}; per GPU {step_rate / num_gpus(args):,.0f}",
        "generation, new tokens/s": (
            f"{generation_rate:,.0f}; per rollout GPU {generation_rate / rollout_gpus:,.0f}"
        ),
        "update, tokens/s": f"{learn_rate:,.0f}; per learner GPU {learn_rate / args.learners:,.0f}",
        "old log-probs, tokens/s per learner GPU": f"{score_rate / args.learners:,.0f}",
        "done before the batch was complete": (
            f"{metrics.get('ahead/scored_share', 0.0):.0%} scored, {taken_ahead:.0%} with their gradient"
        ),
        "learner waits": f"{1 - metrics['timing_s/learn'] / step_s:.1%} of the step",
        "rollout waits": f"{1 - metrics['timing_s/gen'] / step_s:.1%} of the step",
    }


def num_gpus(args: argparse.Namespace) -> int:
    """Returns the number of GPUs of a run; on a CPU, the number that it would have."""
    num_engines, parallel_size = args.engines
    sides = (args.learners, num_engines * parallel_size)
    return sum(sides) if args.placement == "split" else max(sides)


def gpu_names(number: int) -> list[str]:
    """Returns the names of the first visible GPUs."""
    return [gpu.name for gpu in visible_gpus().values()][:number] if number else []


def utilisation(metrics: Mapping[str, float], rates: tuple[float, float] | None) -> dict[str, str]:
    """Returns the MFU of the update; nothing on a CPU."""
    if rates is None or "perf/mfu" not in metrics:
        return {}
    rate, peak = rates
    return {
        name: f"{mfu * peak / rate:.3f} of {rate / 1e12:.0f} TFLOP/s measured; {mfu:.3f} of the vendor's peak"
        for name, mfu in (
            ("MFU of the update, on the batch's tokens", metrics["perf/mfu"]),
            ("on the tokens computed", metrics["perf/mfu"] * metrics["perf/computed_share"]),
        )
    }


def weights(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns the mismatch of engine and learner, and the times of a push."""
    names = (
        "rollout/mismatch_kl",
        "rollout/logprob_diff_max",
        "weights/pause_ms",
        "weights/transfer_ms",
        "weights/digest_ms",
    )
    words = {name: f"{metrics[name]:.3g}" for name in names if name in metrics}
    if "weights/bytes" in metrics:
        words["weights/bytes"] = f"{metrics['weights/bytes']:,.0f}"
    return words


def memory(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns the peak memory of a learner rank's tensors, by phase; nothing on a CPU."""
    peaks = {
        name.removeprefix(MEMORY): f"{gib:.1f}" for name, gib in metrics.items() if name.startswith(MEMORY)
    }
    phases = ", ".join(f"{name} {peak}" for name, peak in peaks.items())
    return {"most memory of a learner rank, GiB": phases} if peaks else {}


if __name__ == "__main__":
    sys.exit(main())
