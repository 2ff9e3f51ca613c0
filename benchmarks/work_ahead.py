"""Compares steps with and without work ahead, with a real learner and simulated generation.

    python benchmarks/work_ahead.py                                            # one GPU: Qwen2.5-0.5B's shape
    python benchmarks/work_ahead.py --device cpu --shape tiny --prompts 32 --median 48 --longest 256

Uses random weights, GRPO with 8 samples per prompt, and log-normal response lengths. Servers are simulated:
`--places` sequences decode at a time, each in proportion to its length, and the time per token is chosen so
that generation takes `--generation` times the learner's part of a step. The GPU computes nothing else, as if
servers had their own GPUs. The learner gets chunks as a controller sends them (`barrier.work_ahead`). A step
lasts from the first token to the end of the update; times are medians of `--rounds` after a warm-up.

`after` is the part of a step after the last response. `ahead` is the share of rows that were scored before
the last response, and the share whose gradient was taken before it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES
from update import POLICY, WAIT_S, build

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.controller.batch.barrier import Barrier
from paceline.controller.batch.closed_chunks import ClosedChunks
from paceline.controller.batch.training_rows import group_rows
from paceline.core.ids import TrajectoryId
from paceline.core.samples.trajectory import FinishReason, ScoredHeader
from paceline.core.training import ChunkOrder, TrainOrder
from paceline.learner.batch.types import PackedRow
from paceline.learner.distributed.ranks import RankEnvironment, form_group, leave_group, open_store
from paceline.learner.train.state.learner import Learner
from paceline.learner.train.step import train_step
from paceline.learner.train.work_ahead import work_ahead

SAMPLES = 8
MODES = ("off", "scores", "gradients")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A response, and the time of its last token, in tokens since the start of the first response."""

    header: ScoredHeader
    packed: PackedRow
    ends: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds of a step, seconds after the last response, and shares of rows done ahead."""

    step_s: float
    after_s: float
    scored: float
    gradient: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every mode with one and with two mini-batches and prints the table."""
    args = parse_args(argv)
    environment = RankEnvironment.read()
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", 0)
    ranks = form_group(environment, open_store(environment, WAIT_S), device, WAIT_S)
    table = Table(
        title=f"{args.shape}, {args.prompts} prompts x {SAMPLES}, sigma {args.sigma:g}, {args.places} places"
    )
    for column in ("mini-batches", "work ahead", "step s", "after s", "against off", "scored", "gradient"):
        table.add_column(column, justify="right")
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
            for num_mini_batches in (1, 2):
                first: Measured | None = None
                token_s = 0.0
                for mode in MODES:
                    if mode == "scores" and num_mini_batches == 1:
                        continue  # there is nothing to score
                    config = configuration(Path(folder), mode, num_mini_batches, args)
                    learner = build(config, ranks)
                    token_s = token_s or time_per_token(learner, args)
                    rounds = [measure(learner, token_s, args) for _ in range(args.rounds + 1)][1:]
                    result = min(
                        rounds, key=lambda m: abs(m.step_s - statistics.median(r.step_s for r in rounds))
                    )
                    first = first or result
                    table.add_row(
                        str(num_mini_batches),
                        mode,
                        f"{result.step_s:.2f}",
                        f"{result.after_s:.2f}",
                        f"{result.step_s / first.step_s:.2f}",
                        f"{result.scored:.0%}",
                        f"{result.gradient:.0%}",
                    )
    finally:
        leave_group()
    Console(width=120).print(table)
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--median", type=int, default=384, help="tokens of a response")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument(
        "--sigma", type=float, default=1.0, help="standard deviation of the lengths' logarithm"
    )
    parser.add_argument("--places", type=int, default=256, help="number of sequences that decode at a time")
    parser.add_argument(
        "--generation",
        type=float,
        default=2.0,
        help="time of generation, in multiples of the learner's time for a step",
    )
    parser.add_argument("--chunk", type=int, default=4, help="prompts")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(argv)


def configuration(folder: Path, mode: str, num_mini_batches: int, args: argparse.Namespace) -> RunConfig:
    """Returns the run's configuration, without a reference."""
    tree = {
        "data": {
            "train_files": "none.jsonl",
            "max_prompt_length": args.prompt,
            "max_response_length": args.longest,
            "train_batch_size": args.prompts,
        },
        "model": {"path": str(folder), "dtype": "bfloat16" if args.device == "cuda" else "float32"},
        "actor": {
            "ppo_mini_batch_size": args.prompts // num_mini_batches,
            "ppo_max_token_len_per_gpu": max(args.budget, args.prompt + args.longest),
            "ratio_audit_freq": 1000,
            "optim": {"lr": 1e-9},
        },
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_ctrl": {"type": "fixed"}},
        "rollout": {"n": SAMPLES},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 1000},
        "barrier": {"work_ahead": mode} | ({} if mode == "off" else {"prompts_per_chunk": args.chunk}),
    }
    return parse(RunConfig, tree)


def draw(step: int, vocab_size: int, args: argparse.Namespace) -> list[Sample]:
    """Returns the samples of a step, in the order of the batch; every step has the same lengths."""
    rng = np.random.default_rng(0)
    places = [0] * args.places
    samples = []
    for prompt_id in range(args.prompts):
        prompt = rng.integers(0, vocab_size, args.prompt).astype(np.int32)
        for index in range(SAMPLES):
            length = int(min(args.longest, max(1, args.median * np.exp(args.sigma * rng.normal()))))
            ends = heapq.heappop(places) + length
            heapq.heappush(places, ends)
            samples.append(sample(step, prompt_id, index, prompt, length, ends, vocab_size, rng))
    return samples


def sample(
    step: int,
    prompt_id: int,
    index: int,
    prompt: np.ndarray[tuple[int], np.dtype[np.int32]],
    length: int,
    ends: int,
    vocab_size: int,
    rng: np.random.Generator,
) -> Sample:
    """Returns one sample of a step."""
    name = TrajectoryId(step=step, purpose="train", prompt_id=prompt_id, sample_index=index)
    header = ScoredHeader(
        run_id="r",
        trajectory_id=name,
        policy=replace(POLICY, version=step - 1),
        blob_key=str(name),
        blob_digest=f"{prompt_id * SAMPLES + index:032x}",
        num_prompt_tokens=len(prompt),
        num_response_tokens=length,
        num_sampled_tokens=length,
        finish_reason=FinishReason.STOP,
        server_id="s",
        generation_s=0.0,
        reward=float(rng.normal()),
        components={},
        reward_error=None,
        scorer="s",
        reward_s=0.0,
    )
    packed = PackedRow(
        index=prompt_id * SAMPLES + index,
        prompt_token_ids=prompt,
        response_token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
        response_mask=np.ones(length, np.uint8),
        response_log_probs=np.full(length, -11.9, np.float32),
    )
    return Sample(header=header, packed=packed, ends=ends)


def time_per_token(learner: Learner, args: argparse.Namespace) -> float:
    """Returns the seconds per token with which generation takes `--generation` measured learner steps."""
    measure(learner, 0.0, args)
    samples = draw(1, learner.vocab_size, args)
    return float(args.generation * measure(learner, 0.0, args).step_s / max(s.ends for s in samples))


def measure(learner: Learner, token_s: float, args: argparse.Namespace) -> Measured:
    """Measures one step during a simulated generation."""
    config, step = learner.config, learner.version + 1
    samples = draw(step, learner.vocab_size, args)
    policy = replace(POLICY, version=step - 1)
    barrier = Barrier(
        step=step,
        policy=policy,
        counts={"train": SAMPLES},
        prompts=range(args.prompts),
    )
    chunks = ClosedChunks.of(config, range(args.prompts))
    packed = {s.packed.index: s.packed for s in samples}

    def fetch(wanted: Sequence[int]) -> dict[int, PackedRow]:
        return {index: packed[index] for index in wanted}

    arriving = sorted(samples, key=lambda s: s.ends)
    began = time.monotonic()
    while not barrier.closed:
        while arriving and time.monotonic() - began >= arriving[0].ends * token_s:
            header = arriving.pop(0).header
            barrier.apply(header, barrier.judge(header))
        chunk = chunks.take(barrier) if config.barrier.work_ahead != "off" and not barrier.closed else None
        if chunk is not None:
            order = ChunkOrder(
                step=step,
                policy=policy,
                first_row=chunk.number * chunks.width * SAMPLES,
                rows=tuple(
                    row for prompt_id in chunk.prompts for row in group_rows(barrier.group(prompt_id))
                ),
                with_gradient=chunk.with_gradient,
            )
            work_ahead(learner, order, fetch)
        elif arriving:
            time.sleep(max(0.0, arriving[0].ends * token_s - (time.monotonic() - began)))
    rows = tuple(row for prompt_id in range(args.prompts) for row in group_rows(barrier.group(prompt_id)))
    result = train_step(learner, TrainOrder(step=step, policy=policy, rows=rows), fetch)
    assert not result.skip_reasons, result.skip_reasons
    step_s = time.monotonic() - began
    return Measured(
        step_s=step_s,
        after_s=step_s - max(s.ends for s in samples) * token_s,
        scored=result.metrics.get("ahead/scored_share", 0.0),
        gradient=result.metrics.get("ahead/gradient_share", 0.0),
    )


if __name__ == "__main__":
    sys.exit(main())
