"""Measures the cost of slow tools on a rollout server: tokens per second, slots in use, the tail of a step.

    python examples/calculator/prepare.py
    python benchmarks/tool_time.py [--tool-seconds 0 0.1 2] [--max-num-seqs 64]
    python benchmarks/tool_time.py --device cuda --shape 0.5B --prompts 64 --max-num-seqs 128

Episodes have 1 to 8 turns (log-normal) of about 30 tokens each (the weights are random, and one token in 32
ends a turn). Between turns the environment waits for a log-normal time with the given mean. The baseline
draws single answers with the same number of tokens. Slots are the average numbers of requests in the engine
and of open episodes until nine tenths of the episodes have ended. The tail is the time after that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import numpy as np
from shapes import SHAPES

from paceline.broker import names
from paceline.broker.base import Outgoing
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.ids import Purpose, sample_seed
from paceline.core.policy import PolicyTag
from paceline.core.samples.chat import Message
from paceline.core.samples.trajectory import PromptGroup, RewardContext, SamplingSpec
from paceline.data.prompts import load_tokenizer
from paceline.rollout.capacity import SamplerLimits
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing
from paceline.rollout.episodes.environment import EpisodeTask, Grade, Opening, TurnResult
from paceline.rollout.episodes.group import Episodes, rules_of
from paceline.rollout.sampler import Sampler
from paceline.rollout.trajectories import check_samples
from paceline.wire import decode_trajectory_header, encode_prompt_group
from support.memory_broker import MemoryBroker

RUN, POLICY = "benchmark", PolicyTag(version=0, digest="0" * 16)
MODEL = Path("examples/calculator/model")
QUESTION = {"role": "user", "content": "12+34="}
LONGEST, TURN_TOKENS, SPREAD = 8, 32, 1.0


@dataclass
class Watched:
    """Counts the requests of an engine."""

    engine: Any
    under_way: int = 0

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        """Draws and counts samples."""
        self.under_way += len(requests)
        try:
            samples: list[Sample] = await self.engine.generate(requests, ended)
            return samples
        finally:
            self.under_way -= len(requests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class Waits:
    """An environment that waits before it answers, and ends after a log-normal number of turns."""

    mean_s: float
    num_open: int = 0
    ends: list[float] = field(default_factory=list)
    call_names: Sequence[str] = ()

    async def start(self) -> None:
        """Starts nothing."""

    async def close(self) -> None:
        """Closes nothing."""

    def session(self, task: EpisodeTask) -> WaitsSession:
        """Returns the session of an episode."""
        return WaitsSession(self, np.random.default_rng(task.episode_seed))


class WaitsSession:
    """Plays one episode."""

    def __init__(self, environment: Waits, rng: np.random.Generator) -> None:
        self._environment, self._rng = environment, rng
        self._num_turns = min(LONGEST, 1 + int(rng.lognormal(0.7, 0.7)))

    async def open(self) -> Opening:
        """Begins."""
        self._environment.num_open += 1
        return Opening()

    async def step(self, turn: int, action: Message) -> TurnResult:
        """Waits, or ends."""
        if turn >= self._num_turns:
            return TurnResult(stop_reason="over")
        mean_s = self._environment.mean_s
        seconds = float(self._rng.lognormal(-(SPREAD**2) / 2, SPREAD)) * mean_s
        if seconds:
            await asyncio.sleep(seconds)
        return TurnResult(messages=(Message(role="tool", content="46"),), seconds=seconds)

    async def close(self, stop_reason: str) -> Grade:
        """Ends."""
        self._environment.num_open -= 1
        self._environment.ends.append(time.perf_counter())
        return Grade()

    async def abandon(self) -> None:
        """Ends."""
        self._environment.num_open -= 1


def make_config(arguments: argparse.Namespace, folder: str) -> RunConfig:
    """Returns the configuration of a run with this model."""
    rollout: dict[str, Any] = {"max_num_seqs": arguments.max_num_seqs, "tools": ["unused:unused"]}
    rollout["episode"] = {"show_tools": False, "max_turns": LONGEST, "tool_s": 600.0}
    if arguments.device == "cuda":
        engine_kwargs: dict[str, Any] = {"kv_cache_memory_bytes": int(arguments.kv_gib * 2**30)}
        if not arguments.compiled:
            engine_kwargs["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        rollout |= {"gpu_memory_utilization": 0.05, "engine_kwargs": engine_kwargs}
    return parse(
        RunConfig,
        {
            "data": {"train_files": "unused.parquet", "max_prompt_length": 24, "max_response_length": 1024},
            "model": {
                "path": folder,
                "tokenizer_path": str(MODEL),
                "dtype": "bfloat16" if arguments.device == "cuda" else "float32",
            },
            "rollout": rollout,
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )


class Bench:
    """Runs rounds on an engine."""

    def __init__(self, arguments: argparse.Namespace, config: RunConfig, engine: Watched) -> None:
        self._arguments, self._config, self._engine = arguments, config, engine
        self._tokenizer = load_tokenizer(str(MODEL))
        end = self._tokenizer.convert_tokens_to_ids("<|end|>")
        size = len(self._tokenizer)
        # Each of these tokens ends a turn; only the template's end token is rendered.
        self._ends = tuple(sorted({end, *range(3, size, TURN_TOKENS)}))
        self._rules = rules_of(config, self._tokenizer, (end,))

    async def round(self, mean_s: float | None, number: int) -> dict[str, float]:
        """Draws a step's groups; a mean of None draws single answers."""
        broker, waits = MemoryBroker(), Waits(mean_s or 0.0)
        episodes = Episodes(
            engine=self._engine, environment=waits, rules=self._rules, retries=0, check=check_samples
        )
        results, prompts = names.trajectories(RUN), names.prompts(RUN, POLICY.version)
        await broker.ensure_group(results, names.REWARD_GROUP)
        groups = [
            self._group(i, number, is_episode=mean_s is not None) for i in range(self._arguments.prompts)
        ]
        payloads: list[bytes] = []
        seen: list[tuple[float, int, int]] = []
        async with asyncio.TaskGroup() as tasks:

            def spawn(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                return tasks.create_task(work, name=name)

            sampler = Sampler(
                engine=self._engine,  # type: ignore[arg-type]
                broker=broker,
                run_id=RUN,
                server_id="rollout-0",
                incarnation=str(number),
                limits=SamplerLimits.of(self._config),
                spawn=spawn,
                episodes=episodes,
            )
            watching = tasks.create_task(self._watch(waits, seen))
            began = time.perf_counter()
            await broker.append([Outgoing(stream=prompts, payload=encode_prompt_group(g)) for g in groups])
            sampler.open(POLICY)
            while len(payloads) < len(groups) * self._arguments.samples:
                entries = await broker.read(results, names.REWARD_GROUP, "r", max_entries=512, block_s=5.0)
                payloads += [entry.payload for entry in entries]
            seconds = time.perf_counter() - began
            watching.cancel()
            await sampler.close()
        headers = [decode_trajectory_header(payload) for payload in payloads]
        ends = sorted(waits.ends)
        most = ends[int(len(ends) * 0.9)] if ends else began + seconds
        full = [row for row in seen if row[0] <= most] or seen
        return {
            "tokens_s": sum(header.num_sampled_tokens for header in headers) / seconds,
            "seconds": seconds,
            "in_engine": statistics.mean(row[1] for row in full),
            "open": statistics.mean(row[2] for row in full),
            "tail_s": began + seconds - most,
            "turns": statistics.mean(h.episode.num_turns if h.episode else 1 for h in headers),
        }

    async def _watch(self, waits: Waits, seen: list[tuple[float, int, int]]) -> None:
        while True:
            seen.append((time.perf_counter(), self._engine.under_way, waits.num_open))
            await asyncio.sleep(0.02)

    def _group(self, prompt_id: int, number: int, *, is_episode: bool) -> PromptGroup:
        ids = self._rules.joiner.prompt([QUESTION], ())
        return PromptGroup(
            run_id=RUN,
            step=1,
            purpose=Purpose.TRAIN,
            prompt_id=prompt_id,
            prompt_token_ids=np.asarray(ids, np.int32),
            sampling=SamplingSpec(
                temperature=1.0,
                max_tokens=1024 if is_episode else self._arguments.single_tokens,
                stop_token_ids=self._ends if is_episode else (),
            ),
            seeds=tuple(
                sample_seed(run_seed=number, step=1, prompt_id=prompt_id, sample_index=i)
                for i in range(self._arguments.samples)
            ),
            policy=POLICY,
            context=RewardContext(ground_truth="46"),
            messages=(QUESTION,) if is_episode else (),
        )


async def measure(arguments: argparse.Namespace, folder: str) -> None:
    """Prints the table."""
    from paceline.rollout.engines.vllm.engine import VllmEngine

    config = make_config(arguments, folder)
    engine = Watched(await VllmEngine.start(config, load_format="dummy"))
    try:
        bench = Bench(arguments, config, engine)
        await bench.round(0.0, 0)
        print("| mean seconds of a tool | tokens/s | step, s | tail, s | in the engine | open | turns |")
        print("|---|---|---|---|---|---|---|")
        for mean_s in (None, *arguments.tool_seconds):
            rounds = [await bench.round(mean_s, number) for number in range(1, arguments.rounds + 1)]
            row = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
            name = "single answers" if mean_s is None else f"{mean_s:g}"
            print(
                f"| {name} | {row['tokens_s']:,.0f} | {row['seconds']:.2f} | {row['tail_s']:.2f} | "
                f"{row['in_engine']:.0f} | {row['open']:.0f} | {row['turns']:.1f} |",
                flush=True,
            )
    finally:
        await engine.shutdown()


def main() -> int:
    """Runs the benchmark and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="tiny", help=f"shape of the random weights: {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tool-seconds", type=float, nargs="+", default=[0.0, 0.1, 2.0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--single-tokens", type=int, default=96, help="tokens of a single answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-gib", type=float, default=4.0, help="GPU: KV cache")
    parser.add_argument("--compiled", action="store_true", help="GPU: vLLM's own compilation")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = -(-len(load_tokenizer(str(MODEL))) // 64) * 64
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[arguments.shape] | {"vocab_size": size}))
        print(f"$ python {' '.join(sys.argv)}")
        print(
            f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores; {arguments.prompts} prompts x "
            f"{arguments.samples} samples, {arguments.shape}, max_num_seqs {arguments.max_num_seqs}\n"
        )
        asyncio.run(measure(arguments, folder))
    return 0


# vLLM's processes import this module again.
if __name__ == "__main__":
    sys.exit(main())
