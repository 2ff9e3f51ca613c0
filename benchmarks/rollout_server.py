"""Compares a rollout server's tokens per second with `vllm.LLM.generate`, on the same samples.

    python benchmarks/rollout_server.py [--model examples/arithmetic/model] [--redis] [--response-tokens 8 64]
    python benchmarks/rollout_server.py --samplers engine batched
    python benchmarks/rollout_server.py --device cuda --shape 7B --samplers batched --prompts 16 \\
        --prompt-tokens 512 --response-tokens 512 --max-num-seqs 128 --kv-gib 9 --rounds 1

Server: prompt groups from a mailbox, AsyncLLM, one request per sample with its own seed, trajectories with
blobs and headers into a mailbox, until the last header arrives. Baseline: one call of `LLM.generate` with the
same prompts and sampling parameters (seeds, log-probabilities, end tokens). Another baseline draws each
group with `n`, without seeds and log-probabilities. `--samplers` names the values of `rollout.sampler` to
measure; only with `engine` do server and baseline draw the same samples.

Each side has its own process and engine. The sides alternate, so a busy machine slows them equally. A model
with random weights generates responses of the full length; with `--shape`, weights are random and no token
ends a response. All sides share one GPU, each with a KV cache of `--kv-gib`; with `--lock FILE`, benchmarks
started together measure one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import numpy as np
import records
from shapes import SHAPES

from paceline.broker import names
from paceline.broker.base import Broker, Outgoing
from paceline.broker.opening import open_broker
from paceline.broker.redis.redis_server import RedisServer
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.ids import Purpose, sample_seed
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import PromptGroup, RewardContext, SamplingSpec
from paceline.engines.vllm import VLLM
from paceline.rollout.engines.vllm.start import environment
from paceline.rollout.engines.vllm.start.arguments import engine_arguments
from paceline.service.observability.gpu_metrics import visible_gpus
from paceline.wire import decode_trajectory_header, encode_prompt_group
from support.memory_broker import MemoryBroker

RUN = "benchmark"
POLICY = PolicyTag(version=0, digest="0" * 16)
EOS = 1
IDLE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The samples of a round; seeds depend on `round_index`."""

    num_prompts: int
    num_samples: int
    response_tokens: int
    round_index: int
    prompt_tokens: int
    stop_token_ids: tuple[int, ...]

    def prompts(self) -> list[list[int]]:
        """Random prompts, the same for both sides."""
        rng = np.random.default_rng(self.round_index)
        ids: list[list[int]] = rng.integers(5, 64, (self.num_prompts, self.prompt_tokens)).tolist()
        return ids

    def seeds(self, prompt_id: int) -> tuple[int, ...]:
        """Returns a seed per sample."""
        return tuple(
            sample_seed(run_seed=0, step=self.round_index, prompt_id=prompt_id, sample_index=i)
            for i in range(self.num_samples)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The number of tokens drawn, and the seconds."""

    tokens: int
    seconds: float


def make_config(arguments: argparse.Namespace, sampler: str) -> RunConfig:
    """Returns the configuration of a run with this model."""
    rollout: dict[str, Any] = {
        "max_num_seqs": arguments.max_num_seqs,
        "threads": arguments.threads,
        "sampler": sampler,
    }
    if arguments.device == "cuda":
        engine_kwargs: dict[str, Any] = {"kv_cache_memory_bytes": int(arguments.kv_gib * 2**30)}
        # Always set: by default the engine compiles only large models.
        engine_kwargs["compilation_config"] = (
            {"mode": 3} if arguments.compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        )
        rollout |= {"gpu_memory_utilization": 0.05, "engine_kwargs": engine_kwargs}
    return parse(
        RunConfig,
        {
            "data": {
                "train_files": "unused.parquet",
                "max_prompt_length": arguments.prompt_tokens,
                "max_response_length": max(arguments.response_tokens),
            },
            "model": {
                "path": arguments.model,
                "dtype": "bfloat16" if arguments.device == "cuda" else "float32",
            },
            "rollout": rollout,
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )


# --- the baseline


def baseline_side(pipe: Connection, config: RunConfig, load_format: str) -> None:
    """Runs a process with an LLM that answers (grouped, Load) with Outcome until None comes."""
    environment.prepare(config)
    on_cpu = VLLM.has_cpu_build
    if on_cpu:
        environment.prepare_cpu()
    from vllm import LLM, SamplingParams

    arguments = engine_arguments(config, on_cpu=on_cpu, load_format=load_format, worker_extension=None)
    arguments.pop("enable_log_requests")
    llm = LLM(**arguments)
    pipe.send("ready")

    def each(load: Load) -> tuple[list[Any], list[Any]]:
        common = {
            "temperature": 1.0,
            "max_tokens": load.response_tokens,
            "stop_token_ids": list(load.stop_token_ids),
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
            stop_token_ids=list(load.stop_token_ids),
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
    # A spawned process exits without running finalizers, so the engine's processes would survive.
    llm.llm_engine.engine_core.shutdown(timeout=3)


# --- the server


def server_side(pipe: Connection, config: RunConfig, load_format: str, broker_url: str) -> None:
    """Runs a process with a sampler that answers Load with Outcome until None comes."""
    asyncio.run(_serve(pipe, config, load_format, broker_url))


async def _serve(pipe: Connection, config: RunConfig, load_format: str, broker_url: str) -> None:
    from paceline.rollout.capacity import SamplerLimits
    from paceline.rollout.engines.vllm.engine import VllmEngine
    from paceline.rollout.sampler import Sampler

    engine = await VllmEngine.start(config, load_format=load_format)
    broker = open_broker(broker_url) if broker_url else MemoryBroker()
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
    # The server's time does not include a scorer's work on the trajectories.
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
        sampling=SamplingSpec(
            temperature=1.0, max_tokens=load.response_tokens, stop_token_ids=load.stop_token_ids
        ),
        seeds=load.seeds(prompt_id),
        policy=POLICY,
        context=RewardContext(ground_truth="42", data_source="benchmark", prompt_text="x" * 40),
    )


# --- both


Ask = Callable[[Any], Any]


@contextlib.contextmanager
def side(work: Callable[..., None], *arguments: Any) -> Iterator[Callable[[], Ask]]:
    """Starts a side's process; the yielded function waits for its engine and returns its `Ask`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()

    def ask(order: Any) -> Any:
        ours.send(order)
        if not ours.poll(600):
            raise TimeoutError(f"{work.__name__} gave no answer within 600 s")
        return ours.recv()

    def ready() -> Ask:
        if not ours.poll(600):
            raise TimeoutError(f"{work.__name__} did not load its engine within 600 s")
        assert ours.recv() == "ready"
        return ask

    try:
        yield ready
    finally:
        with contextlib.suppress(BrokenPipeError):
            ours.send(None)
        process.join(30)
        if process.is_alive():
            process.kill()


def compare(arguments: argparse.Namespace, broker_url: str) -> dict[int, dict[str, list[Outcome]]]:
    """Runs alternating rounds; returns outcomes by response length and side."""
    load_format = "dummy" if arguments.shape else "auto"
    with contextlib.ExitStack() as stack:
        starting: dict[str, Callable[[], Ask]] = {}
        config = make_config(arguments, "engine")
        starting["baseline"] = stack.enter_context(side(baseline_side, config, load_format))
        for sampler in arguments.samplers:
            work = (server_side, make_config(arguments, sampler), load_format, broker_url)
            starting[sampler] = stack.enter_context(side(*work))
        sides = {name: ready() for name, ready in starting.items()}
        if arguments.lock:
            lock = stack.enter_context(open(arguments.lock, "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        return {length: measure(arguments, sides, length) for length in arguments.response_tokens}


def measure(arguments: argparse.Namespace, sides: dict[str, Ask], length: int) -> dict[str, list[Outcome]]:
    """Measures one response length; the first round warms up."""
    outcomes: dict[str, list[Outcome]] = {}
    for index in range(arguments.rounds + 1):
        load = Load(
            num_prompts=arguments.prompts,
            num_samples=arguments.samples,
            response_tokens=length,
            round_index=1000 * length + index,
            prompt_tokens=arguments.prompt_tokens,
            stop_token_ids=() if arguments.shape else (EOS,),
        )
        orders: dict[str, tuple[Ask, Any]] = {name: (sides[name], load) for name in arguments.samplers}
        if not arguments.shape:
            orders["same"] = sides["baseline"], (False, load)
        orders["plain"] = sides["baseline"], (True, load)
        drawn = {}
        for name, (ask, order) in orders.items():
            drawn[name] = ask(order)
            time.sleep(IDLE_S)
        if {"engine", "same"} <= drawn.keys() and drawn["engine"].tokens != drawn["same"].tokens:
            print(
                f"the sides drew {drawn['engine'].tokens} and {drawn['same'].tokens} tokens: "
                "the samples differ"
            )
        if index:
            for name, outcome in drawn.items():
                outcomes.setdefault(name, []).append(outcome)
    return outcomes


def rate(outcomes: list[Outcome]) -> float:
    """Returns median tokens per second."""
    return statistics.median(outcome.tokens / outcome.seconds for outcome in outcomes)


HEADINGS = {
    "engine": "server, sampler: engine",
    "batched": "server, sampler: batched",
    "same": "LLM.generate, same requests",
    "plain": "LLM.generate, n per prompt, no seeds, no log-probs",
}


def report(results: dict[int, dict[str, list[Outcome]]]) -> None:
    """Prints the table; ratios are medians over the rounds."""
    names = [name for name in HEADINGS if name in next(iter(results.values()))]
    baselines = [name for name in ("same", "plain") if name in names]
    servers = [name for name in names if name not in baselines]
    ratios = [(server, baseline) for server in servers for baseline in baselines]
    headings = [HEADINGS[name] for name in names] + [f"{a} / {b}" for a, b in ratios]
    print(f"| response tokens | {' | '.join(headings)} |")
    print("|---" * (len(headings) + 1) + "|")
    for length, outcomes in results.items():
        cells = [f"{rate(outcomes[name]):,.0f}" for name in names]
        for server, baseline in ratios:
            quotients = [
                (a.tokens / a.seconds) / (b.tokens / b.seconds)
                for a, b in zip(outcomes[server], outcomes[baseline], strict=True)
            ]
            median = statistics.median(quotients)
            cells.append(f"{median:.2f} ({min(quotients):.2f} to {max(quotients):.2f})")
        print(f"| {length} | {' | '.join(cells)} |")


def keep(results: dict[int, dict[str, list[Outcome]]], arguments: argparse.Namespace) -> None:
    """Records the last sampler's rate for the first length, with the plain call's as baseline."""
    outcomes = next(iter(results.values()))
    pairs = zip(outcomes[arguments.samplers[-1]], outcomes["plain"], strict=True)
    records.keep(
        "generation",
        arguments.record,
        rate(outcomes[arguments.samplers[-1]]),
        beside=("LLM.generate", rate(outcomes["plain"])),
        gpus=[gpu.name for gpu in visible_gpus().values()][:1] if arguments.device == "cuda" else [],
        ratio=statistics.median((a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in pairs),
    )


def main() -> int:
    """Runs the benchmark and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="examples/arithmetic/model", help="folder with config and weights")
    parser.add_argument("--shape", help=f"random weights instead: {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--samplers", nargs="+", default=["engine"], choices=("engine", "batched"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--response-tokens", type=int, nargs="+", default=[8, 40])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds; one more warms up")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--threads", type=int, default=None, help="threads of the engine; default: all cores")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="GPU: KV cache of each side")
    parser.add_argument("--compiled", action="store_true", help="GPU: vLLM's own compilation on both sides")
    parser.add_argument("--lock", help="file that is locked while this measures")
    parser.add_argument("--redis", action="store_true", help="mailboxes in a Redis server, not in memory")
    records.add_option(parser)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = ""
        if arguments.redis:
            url = stack.enter_context(RedisServer.start(folder)).url
        if arguments.shape:
            arguments.model = str(folder)
            (folder / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
        results = compare(arguments, url)
    print(f"\n$ python {' '.join(sys.argv)}")
    print(f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores, python {platform.python_version()}")
    print(
        f"{arguments.prompts} prompts x {arguments.samples} samples, model "
        f"{arguments.shape or arguments.model}, mailboxes in "
        f"{'Redis' if arguments.redis else 'memory'}, median of {arguments.rounds} rounds, tokens/s\n"
    )
    report(results)
    keep(results, arguments)
    return 0


# The sides are spawned: they import this module again.
if __name__ == "__main__":
    sys.exit(main())
