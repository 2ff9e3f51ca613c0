"""Compares a GRPO step of Paceline with one of verl 0.9.1, in turn on the same GPUs.

    python -m venv /tmp/verl
    /tmp/verl/bin/pip install "verl[vllm]==0.9.1"
    /tmp/verl/bin/pip install flash-attn==2.8.3 --no-build-isolation
    python benchmarks/against_verl.py --verl /tmp/verl/bin/python --shape 3B --prompts 32 --gpus 2 --rounds 3

verl is not a dependency of Paceline and needs a separate environment. Both sides train the same random
weights with the same prompts, reward, batch, mini-batches, lengths, learning rate and types (bfloat16 over
float32 master weights), without a KL. Paceline's side is that of `benchmarks/step.py --placement auto`, whose
configuration has only data, model, lengths, batch and reward. verl's side is its default synchronous trainer,
colocated with vLLM on all GPUs: FSDP2, padding removed, dynamic micro-batches of 24,576 tokens, gradient
checkpointing, nothing offloaded, vLLM compiled. `--verl-set` changes verl's settings, and further arguments
change Paceline's. For attention by flash-attn-4 instead of flash-attn:
`--verl-set +actor_rollout_ref.model.override_config.attn_implementation=flash_attention_4`; verl then loads
verl_modules/verl_flash4.py, without which each backward call of flash-attn-4 would compile.

Prints one row per run: the seconds from the command to the first step, the medians of the steps from the
second on, and tokens/s per GPU, which count the prompts and responses of a step on both sides. The sides
alternate, and each round begins with the side that ended the previous one; the last line is the median ratio
of tokens/s. What a side does between two steps is not part of its steps' seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import records
import step
import verl_side
from verl_side import Steps

PACKAGES = ("torch", "vllm", "transformers")
VERSIONS_TIMEOUT_S = 120.0
WEIGHTS_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 60.0
ORPHAN_TIMEOUT_S = 10.0
POLL_S = 0.5
LOG_END_CHARS = 3000
MOST_TOKENS_OFF = 0.01
COLUMNS = (
    "round",
    "side",
    "s to the first step",
    "s per step",
    "generation",
    "old log-probs",
    "update",
    "tokens per sample",
    "tokens/s per GPU",
    "ratio",
)
SHAPES = {name: shape for name, shape in step.SHAPES.items() if shape["model_type"].startswith("qwen")}
TIMES = ("timing_s/step", "timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor")
VERSIONS = """
import importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
WEIGHTS = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

source, target = sys.argv[1:]
torch.manual_seed(0)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.bfloat16)
model.save_pretrained(target, max_shard_size="4GB")
"""


class SideError(Exception):
    """A side did not run, or did not do the work that was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A command to measure.

    Attributes:
        log: receives the output of the command.
        steps: reads the metrics of the completed steps, in order.
        num_tokens: returns the prompt and response tokens of a step, from its metrics.
        remedy: what to change if the command fails.
    """

    name: str
    command: Sequence[str]
    cwd: Path
    environment: Mapping[str, str]
    log: Path
    steps: Callable[[], Steps]
    num_tokens: Callable[[Mapping[str, float]], float]
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run's seconds to its first step, and medians of its later steps."""

    start_s: float
    step_s: float
    gen_s: float
    old_log_prob_s: float
    update_s: float
    num_tokens: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both sides and prints the table."""
    args = parse_args(argv)
    work = Path(args.work or tempfile.mkdtemp(prefix="paceline-verl-")).absolute()
    try:
        versions = {
            "Paceline": versions_of(sys.executable, "paceline"),
            "verl": versions_of(args.verl, "verl"),
        }
        config = write_inputs(args, work)
        rates = measure_rounds(args, work, config, versions)
    except SideError as error:
        print(error, file=sys.stderr)
        return 1
    ratio = statistics.median(ours / theirs for ours, theirs in rates)
    ours, theirs = (statistics.median(rate) for rate in zip(*rates, strict=True))
    for name, numbers in versions.items():
        print(f"{name}: {', '.join(f'{package} {number}' for package, number in numbers.items())}")
    gpus = step.gpu_names(args.gpus)
    print(f"tokens/s per GPU, Paceline / verl: {ratio:.2f}; {records.machine(gpus)}; logs: {work}")
    beside = (f"verl {versions['verl']['verl']}, in turn", theirs)
    records.keep("steps", args.record, ours, beside=beside, ratio=ratio, gpus=gpus)
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--verl", required=True, help="the Python of an environment with verl")
    parser.add_argument("--verl-set", action="append", default=[], metavar="KEY=VALUE", help="of verl's run")
    parser.add_argument("--shape", default="3B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--gpus", type=int, required=True, help="use the first visible GPUs")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds after which a run has failed")
    parser.add_argument("--work", help="folder for model, data and logs; default: a temporary one")
    records.add_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="of Paceline's run")
    args = parser.parse_intermixed_args(argv)
    if args.shape not in SHAPES:
        parser.error(f"--shape {args.shape} is none of {', '.join(SHAPES)}")
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the first step is not counted, so at least 2 are needed")
    if args.rounds < 1 or args.gpus < 1:
        parser.error(f"--rounds {args.rounds}, --gpus {args.gpus}: both must be at least 1")
    if args.prompts % args.mini_batches:
        parser.error(f"--prompts {args.prompts} must be a multiple of --mini-batches {args.mini_batches}")
    rows = args.prompts * args.samples // args.mini_batches
    if rows % args.gpus:
        parser.error(f"verl would pad mini-batches of {rows} samples on {args.gpus} GPUs; change --prompts")
    return args


def step_options(args: argparse.Namespace, work: Path) -> argparse.Namespace:
    """Returns the options of `step.py` for the same model, data and batch."""
    names = ("shape", "prompts", "samples", "mini_batches", "prompt_tokens", "response_tokens", "steps")
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    settings = ["model.load_format=auto", *args.overrides]  # the weights that verl reads
    return step.parse_args([*options, "--placement=auto", f"--work={work}", *settings])


def write_inputs(args: argparse.Namespace, work: Path) -> Path:
    """Writes model, data and reward for both sides; returns the path of Paceline's configuration."""
    config = step.write_inputs(step_options(args, work), work)
    write_weights(work / "model", work / "weights")
    verl_side.write_inputs(work, SHAPES[args.shape]["vocab_size"])
    return config


def write_weights(model: Path, scratch: Path) -> None:
    """Draws weights in another process, so that none of the GPUs' memory stays in use."""
    for path in model.glob("*.safetensors*"):
        path.unlink()
    command = [sys.executable, "-c", WEIGHTS, str(model), str(scratch)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=WEIGHTS_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise SideError(
            f"no weights were written to {model}; try a smaller --shape:\n{error.stderr}"
        ) from None
    except subprocess.TimeoutExpired:
        raise SideError(f"no weights after {WEIGHTS_TIMEOUT_S:.0f} s; try a smaller --shape") from None
    for path in scratch.glob("*.safetensors*"):
        path.rename(model / path.name)
    shutil.rmtree(scratch)


def versions_of(python: str, package: str) -> dict[str, str]:
    """Returns the versions of a side's packages.

    Raises:
        SideError: the Python does not start, or its environment lacks the package.
    """
    environment = dict(os.environ) if package == "paceline" else verl_side.environment_of(os.environ)
    command = [python, "-c", VERSIONS, package, *PACKAGES]
    try:
        ended = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=VERSIONS_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SideError(f"{python} does not start: {error}; name an environment's bin/python") from None
    versions: dict[str, str | None] = json.loads(ended.stdout)
    if versions[package] is None:
        raise SideError(f"{python} has no {package}; install {package} there, or name another Python")
    return {name: number or "missing" for name, number in versions.items()}


def gpu_list(number: int, visible: str | None) -> str:
    """Returns CUDA_VISIBLE_DEVICES for the first visible GPUs.

    Raises:
        SideError: fewer are visible.
    """
    names = visible.split(",") if visible else [str(index) for index in range(number)]
    if len(names) < number:
        raise SideError(f"--gpus {number}, but CUDA_VISIBLE_DEVICES={visible}; name fewer, or show more")
    return ",".join(names[:number])


def measure_rounds(
    args: argparse.Namespace, work: Path, config: Path, versions: Mapping[str, Mapping[str, str]]
) -> list[tuple[float, float]]:
    """Prints the table as its rows are measured; returns the tokens/s per GPU of Paceline and verl by round.

    Raises:
        SideError: a side failed, or did other work than the one asked for.
    """
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n", flush=True)
    rates = []
    for number in range(args.rounds):
        sides = [paceline_run(args, work, config, number), verl_run(args, work, number)]
        by_name: dict[str, float] = {}
        for side in sides if number % 2 == 0 else sides[::-1]:
            measured = measure(side, run(side, args.steps, args.deadline))
            check_tokens(side, measured, args)
            by_name[side.name] = rate(measured, args.gpus)
            ratio = by_name["Paceline"] / by_name["verl"] if len(by_name) == 2 else None
            name = f"{side.name} {versions[side.name][side.name.lower()]}"
            print(table_row(args, number, name, measured, ratio), flush=True)
        rates.append((by_name["Paceline"], by_name["verl"]))
    return rates


def table_row(
    args: argparse.Namespace, number: int, name: str, measured: Measured, ratio: float | None
) -> str:
    """Returns a row of the table; the ratio is that of the round, in its second row."""
    cells = (
        str(number),
        name,
        f"{measured.start_s:.0f}",
        f"{measured.step_s:.2f}",
        f"{measured.gen_s:.2f}",
        f"{measured.old_log_prob_s:.2f}",
        f"{measured.update_s:.2f}",
        f"{measured.num_tokens / (args.prompts * args.samples):,.1f}",
        f"{rate(measured, args.gpus):,.0f}",
        "" if ratio is None else f"{ratio:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def rate(measured: Measured, num_gpus: int) -> float:
    """Returns tokens/s per GPU over the step."""
    return measured.num_tokens / measured.step_s / num_gpus


def paceline_run(args: argparse.Namespace, work: Path, config: Path, number: int) -> Side:
    """Returns Paceline's side of a round."""
    options, metrics = step_options(args, work), work / "run" / "metrics.jsonl"
    shutil.rmtree(work / "run", ignore_errors=True)  # its steps are those of an earlier round
    return Side(
        name="Paceline",
        command=step.train_command(options, config),
        cwd=step.ROOT,
        environment=with_gpus(args, os.environ),
        log=work / f"paceline-{number}.log",
        steps=lambda: step.steps_in(metrics),
        num_tokens=lambda line: line["perf/tokens_per_s"] * line["timing_s/step"],
        remedy=f"further logs: {work}/run/logs",
    )


def verl_run(args: argparse.Namespace, work: Path, number: int) -> Side:
    """Returns verl's side of a round."""
    log, folder = work / f"verl-{number}.log", work / "verl_run"
    folder.mkdir(exist_ok=True)
    ours = step.configuration(step_options(args, work), work)
    settings = verl_side.hydra_overrides(verl_side.settings_of(ours, work, args.gpus))
    return Side(
        name="verl",
        command=[args.verl, "-m", "verl.trainer.main_ppo", *settings, *args.verl_set],
        cwd=folder,
        environment=verl_side.environment_of(with_gpus(args, os.environ), args.verl_set),
        log=log,
        steps=lambda: verl_side.read_steps(log.read_text(errors="replace")),
        num_tokens=lambda line: (
            (line["prompt_length/mean"] + line["response_length/mean"]) * args.prompts * args.samples
        ),
        remedy=f"its settings are those of verl {verl_side.VERSION}; change one with --verl-set KEY=VALUE",
    )


def with_gpus(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment that shows a side its GPUs."""
    return dict(environment) | {
        "CUDA_VISIBLE_DEVICES": gpu_list(args.gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    }


def run(side: Side, num_steps: int, deadline_s: float) -> tuple[float, Steps]:
    """Runs a side until its steps are done and ends it; returns the seconds to its first step, and the steps.

    Raises:
        SideError: the command ended earlier, or the deadline passed.
    """
    began, start_s = time.monotonic(), None
    with side.log.open("wb") as file:
        process = psutil.Popen(
            list(side.command),
            cwd=side.cwd,
            env=dict(side.environment),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    tree: set[psutil.Process] = set()
    try:
        while True:
            ended = process.poll() is not None  # before the steps are read, so that none is missed
            steps, passed_s = side.steps(), time.monotonic() - began
            if steps and start_s is None:
                start_s = passed_s - sum(line["timing_s/step"] for line in steps)
            if start_s is not None and len(steps) >= num_steps:
                return start_s, steps[:num_steps]
            if ended:
                raise failure(
                    side, f"ended with {process.returncode} after {len(steps)} of {num_steps} steps"
                )
            if passed_s > deadline_s:
                raise failure(
                    side, f"did {len(steps)} of {num_steps} steps within --deadline {deadline_s:.0f} s"
                )
            tree |= descendants(process)
            time.sleep(POLL_S)
    finally:
        end(process, tree)


def failure(side: Side, what: str) -> SideError:
    """Returns the error of a side that failed, with the end of its log."""
    text = side.log.read_text(errors="replace")[-LOG_END_CHARS:]
    return SideError(f"{text}\n{side.name} {what}; its log: {side.log}; {side.remedy}")


def descendants(process: psutil.Process) -> set[psutil.Process]:
    """Returns the processes that a process has started, directly or not."""
    try:
        return set(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def end(process: psutil.Popen, tree: set[psutil.Process]) -> None:
    """Ends a command with all its processes, because the other side needs the memory of the GPUs.

    The command gets time to end its processes itself; those that it leaves behind are killed.
    """
    remaining = tree | descendants(process)
    if process.poll() is None:
        process.terminate()
    psutil.wait_procs([process], STOP_TIMEOUT_S)
    _, left = psutil.wait_procs([process, *remaining], ORPHAN_TIMEOUT_S)
    for child in left:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, STOP_TIMEOUT_S)


def measure(side: Side, ran: tuple[float, Steps]) -> Measured:
    """Returns the medians of the steps from the second on.

    Raises:
        SideError: the steps lack a metric.
    """
    start_s, steps = ran
    try:
        step_s, gen_s, old_log_prob_s, update_s = (
            statistics.median(line[name] for line in steps[1:]) for name in TIMES
        )
        num_tokens = statistics.median(side.num_tokens(line) for line in steps[1:])
    except KeyError as error:
        raise SideError(f"{side.name}'s steps have no {error}; {side.log}; {side.remedy}") from None
    return Measured(
        start_s=start_s,
        step_s=step_s,
        gen_s=gen_s,
        old_log_prob_s=old_log_prob_s,
        update_s=update_s,
        num_tokens=num_tokens,
    )


def check_tokens(side: Side, measured: Measured, args: argparse.Namespace) -> None:
    """Raises an error if a side's samples have other lengths than those asked for.

    A response of Paceline may end early: one of some 150,000 tokens ends it.
    """
    asked = args.prompt_tokens + args.response_tokens
    per_sample = measured.num_tokens / (args.prompts * args.samples)
    if abs(per_sample / asked - 1) > MOST_TOKENS_OFF:
        raise SideError(
            f"{side.name}'s samples have {per_sample:,.1f} tokens instead of {asked:,}, so the sides do not "
            f"do the same work; look for filtered or truncated prompts, or another tokenizer, in {side.log}"
        )


if __name__ == "__main__":
    sys.exit(main())
