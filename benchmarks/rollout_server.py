"""Tokens per second of a rollout server against plain `vllm.LLM.generate`, on the same samples in one run.

    python benchmarks/rollout_server.py [--model examples/arithmetic/model] [--redis] [--response-tokens 8 64]

Server: prompt groups from a mailbox, AsyncLLM, one request per sample with its own seed, trajectories with
blobs and headers into a mailbox, until the last header arrives. Baseline: one call of `LLM.generate` with the
same prompts and sampling parameters (seeds, log-probabilities, end tokens). Another baseline draws each
group with `n` and no seed.

Each side has a process and an engine of its own. The sides take turns, so that a busy machine slows them
alike. The model may have random weights: responses then run to their full length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from paceline.broker import names
from paceline.broker.base import Broker, Outgoing
from paceline.broker.opening import open_broker
from paceline.broker.redis_server import RedisServer
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.ids import Purpose, sample_seed
from paceline.core.policy import PolicyTag
from paceline.core.trajectory import PromptGroup, RewardContext, SamplingSpec
from paceline.rollout.engines.vllm import environment
from paceline.rollout.engines.vllm.arguments import engine_arguments
from paceline.wire import decode_trajectory_header, encode_prompt_group

RUN = "benchmark"
POLICY = PolicyTag(version=0, digest="0" * 16)
EOS = 1
PROMPT_TOKENS = 20
IDLE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is drawn in one round; `round_index` gives every round seeds of its own."""

    num_prompts: int
    num_samples: int
    response_tokens: int
    round_index: int

    def prompts(self) -> list[list[int]]:
        """Random prompts, the same for both sides."""
        rng = np.random.default_rng(self.round_index)
        ids: list[list[int]] = rng.integers(5, 64, (self.num_prompts, PROMPT_TOKENS)).tolist()
        return ids

    def seeds(self, prompt_id: int) -> tuple[int, ...]:
        """One per sample."""
        return tuple(
            sample_seed(run_seed=0, step=self.round_index, prompt_id=prompt_id, sample_index=i)
            for i in range(self.num_samples)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Tokens drawn, and the seconds they took."""

    tokens: int
    seconds: float


def make_config(arguments: argparse.Namespace) -> RunConfig:
    """What a run with this model would have."""
    return parse(
        RunConfig,
        {
            "data": {
                "train_files": "unused.parquet",
                "max_prompt_length": PROMPT_TOKENS,
                "max_response_length": max(arguments.response_tokens),
            },
            "model": {"path": arguments.model},
            "rollout": {"max_num_seqs": arguments.max_num_seqs, "threads": arguments.threads},
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )


# --- the baseline


def baseline_side(pipe: Connection, config: RunConfig) -> None:
    """A process with an LLM; answers (grouped, Load) with Outcome until None comes."""
    environment.prepare(config)
    environment.prepare_cpu()
    from vllm import LLM, SamplingParams

    arguments = engine_arguments(config, on_cpu=True, load_format="auto", worker_extension=None)
    arguments.pop("enable_log_requests")
    llm = LLM(**arguments)
    pipe.send("ready")

    def each(load: Load) -> tuple[list[Any], list[Any]]:
        common = {
            "temperature": 1.0,
            "max_tokens": load.response_tokens,
            "stop_token_ids": [EOS],
            "detokenize": False,
        }
        pairs = [
            ({"prompt_token_ids": prompt}, SamplingParams(seed=seed, logprobs=0, **common))
            for prompt_id, prompt in enumerate(load.prompts())
            for seed in load.seeds(prompt_id)
        ]
        return [prompt for prompt, _ in pairs], [params for _, params in pairs]

    def grouped(load: Load) -> tuple[list[Any], Any]:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=load.response_tokens,
            stop_token_ids=[EOS],
            detokenize=False,
            n=load.num_samples,
        )
        return [{"prompt_token_ids": prompt} for prompt in load.prompts()], params

    while (order := pipe.recv()) is not None:
        as_groups, load = order
        started = time.perf_counter()
        outputs = llm.generate(*(grouped if as_groups else each)(load), use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        pipe.send(Outcome(tokens=tokens, seconds=seconds))
    # A spawned process ends without finalizers; the engine's own processes would stay.
    llm.llm_engine.engine_core.shutdown(timeout=3)


# --- the server


def server_side(pipe: Connection, config: RunConfig, broker_url: str) -> None:
    """A process with a sampler; answers Load with Outcome until None comes."""
    asyncio.run(_serve(pipe, config, broker_url))


async def _serve(pipe: Connection, config: RunConfig, broker_url: str) -> None:
    from paceline.rollout.capacity import SamplerLimits
    from paceline.rollout.engines.vllm.engine import VllmEngine
    from paceline.rollout.sampler import Sampler

    engine = await VllmEngine.start(config, load_format="auto")
    broker = open_broker(broker_url)
    async with asyncio.TaskGroup() as tasks:

        def spawn(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            return tasks.create_task(work, name=name)

        sampler = Sampler(
            engine=engine,
            broker=broker,
            run_id=RUN,
            server_id="rollout-0",
            incarnation="benchmark",
            limits=SamplerLimits.of(config),
            spawn=spawn,
        )
        sampler.open(POLICY)
        await asyncio.to_thread(pipe.send, "ready")
        while (load := await asyncio.to_thread(pipe.recv)) is not None:
            outcome = await _round(broker, load)
            await asyncio.to_thread(pipe.send, outcome)
        await sampler.close()
    await broker.close()
    await engine.shutdown()


async def _round(broker: Broker, load: Load) -> Outcome:
    prompts, results = names.prompts(RUN, POLICY.version), names.trajectories(RUN)
    await broker.ensure_group(results, names.REWARD_GROUP)
    groups = [_group(load, prompt_id, ids) for prompt_id, ids in enumerate(load.prompts())]
    started = time.perf_counter()
    await broker.append([Outgoing(stream=prompts, payload=encode_prompt_group(group)) for group in groups])
    payloads: list[bytes] = []
    while len(payloads) < load.num_prompts * load.num_samples:
        entries = await broker.read(results, names.REWARD_GROUP, "reader", max_entries=512, block_s=5.0)
        await broker.ack(results, names.REWARD_GROUP, [entry.entry_id for entry in entries])
        payloads += [entry.payload for entry in entries]
    seconds = time.perf_counter() - started
    # What a scorer does with them is not this server's time.
    headers = [decode_trajectory_header(payload) for payload in payloads]
    keys = [header.blob_key for header in headers]
    tokens = sum(header.num_response_tokens for header in headers)
    await broker.delete_blobs(keys)
    await broker.trim(results)
    return Outcome(tokens=tokens, seconds=seconds)


def _group(load: Load, prompt_id: int, ids: list[int]) -> PromptGroup:
    return PromptGroup(
        run_id=RUN,
        step=1,
        purpose=Purpose.TRAIN,
        prompt_id=prompt_id,
        prompt_token_ids=np.asarray(ids, np.int32),
        sampling=SamplingSpec(temperature=1.0, max_tokens=load.response_tokens, stop_token_ids=(EOS,)),
        seeds=load.seeds(prompt_id),
        policy=POLICY,
        context=RewardContext(ground_truth="42", data_source="benchmark", prompt_text="x" * 40),
    )


# --- both


@contextlib.contextmanager
def side(work: Callable[..., None], *arguments: Any) -> Iterator[Callable[[Any], Any]]:
    """A process that has loaded its engine; called with an order it answers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()
    if not ours.poll(600):
        raise TimeoutError(f"{work.__name__} did not load its engine within 600 s")
    assert ours.recv() == "ready"

    def ask(order: Any) -> Any:
        ours.send(order)
        if not ours.poll(600):
            raise TimeoutError(f"{work.__name__} gave no answer within 600 s")
        return ours.recv()

    try:
        yield ask
    finally:
        with contextlib.suppress(BrokenPipeError):
            ours.send(None)
        process.join(30)
        if process.is_alive():
            process.kill()


def compare(
    arguments: argparse.Namespace, broker_url: str
) -> list[tuple[int, list[Outcome], list[Outcome], list[Outcome]]]:
    """Rounds by turns, per response length: (length, server, baseline, grouped baseline)."""
    config = make_config(arguments)
    results = []
    with side(baseline_side, config) as baseline, side(server_side, config, broker_url) as server:
        for length in arguments.response_tokens:
            server_outcomes: list[Outcome] = []
            baseline_outcomes: list[Outcome] = []
            grouped: list[Outcome] = []
            for index in range(arguments.rounds + 1):
                load = Load(
                    num_prompts=arguments.prompts,
                    num_samples=arguments.samples,
                    response_tokens=length,
                    round_index=1000 * length + index,
                )
                outcomes = []
                for ask, order in ((server, load), (baseline, (False, load)), (baseline, (True, load))):
                    outcomes.append(ask(order))
                    time.sleep(IDLE_S)
                if outcomes[0].tokens != outcomes[1].tokens:
                    print(
                        f"the sides drew {outcomes[0].tokens} and {outcomes[1].tokens} tokens: "
                        "these are not the same samples"
                    )
                if index:  # the first round warms up
                    for kept, outcome in zip(
                        (server_outcomes, baseline_outcomes, grouped), outcomes, strict=True
                    ):
                        kept.append(outcome)
            results.append((length, server_outcomes, baseline_outcomes, grouped))
    return results


def rate(outcomes: list[Outcome]) -> float:
    """Median tokens per second."""
    return statistics.median(outcome.tokens / outcome.seconds for outcome in outcomes)


def main() -> int:
    """Runs and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="examples/arithmetic/model", help="folder with config and weights")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--response-tokens", type=int, nargs="+", default=[8, 40])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds; one more warms up")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--threads", type=int, default=None, help="of the engine; default: all cores")
    parser.add_argument("--redis", action="store_true", help="mailboxes in a Redis server, not in memory")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = "memory://"
        if arguments.redis:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = stack.enter_context(RedisServer.start(folder)).url
        results = compare(arguments, url)
    print(f"\n$ python {' '.join(sys.argv)}")
    print(f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores, python {platform.python_version()}")
    print(
        f"{arguments.prompts} prompts x {arguments.samples} samples, model {arguments.model}, mailboxes in "
        f"{'Redis' if arguments.redis else 'memory'}, median of {arguments.rounds} rounds, tokens/s\n"
    )
    print(
        "| response tokens | rollout server | LLM.generate, same requests | ratio (median of rounds) "
        "| LLM.generate, n per prompt, no seeds |"
    )
    print("|---|---|---|---|---|")
    for length, server_outcomes, baseline_outcomes, grouped in results:
        ratios = [
            (a.tokens / a.seconds) / (b.tokens / b.seconds)
            for a, b in zip(server_outcomes, baseline_outcomes, strict=True)
        ]
        print(
            f"| {length} | {rate(server_outcomes):,.0f} | {rate(baseline_outcomes):,.0f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{rate(grouped):,.0f} |"
        )
    return 0


# The sides are spawned: they import this module again.
if __name__ == "__main__":
    sys.exit(main())
