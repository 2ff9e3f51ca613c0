"""Whole episodes with vLLM, per family of chat templates: what is sampled, recorded, and learned from.

Tiny models of the families' architectures with random weights in float32; the templates write the families'
forms. PACELINE_TEST_FIDELITY asks for so many conversations per family; without it there is nothing to run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.chat import Message
from paceline.core.ids import Purpose, sample_seed
from paceline.core.trajectory import PromptGroup, RewardContext, SamplingSpec, sampled_spans
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing
from paceline.rollout.episodes.environment import EpisodeTask, Observation, Opening
from paceline.rollout.episodes.group import Episodes, rules_of
from paceline.rollout.episodes.loop import Slot
from paceline.rollout.episodes.recorder import Draw
from paceline.rollout.trajectories import check_samples
from support import vllm_families
from support.chat_templates import TEMPLATES, tokenizer
from support.episodes import POLICY, Echo, EchoSession

pytest.importorskip("vllm", reason="vLLM is not installed")

NUM_CONVERSATIONS = int(os.environ.get("PACELINE_TEST_FIDELITY", "0"))
NUM_SAMPLES = 4
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.torch,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # vLLM and its imports warn about themselves
    pytest.mark.skipif(NUM_CONVERSATIONS == 0, reason="PACELINE_TEST_FIDELITY=NUMBER of conversations"),
]

KINDS = {"qwen2.5": "qwen2", "qwen3": "qwen3", "llama3": "llama", "smollm2": "llama", "gemma": "gemma"}
WORDS = ("the", "other", "12", "121", "\n\n", "thing,", "<tool_response>", "é", "漢", "{}", '"')
MAX_TURNS, TURN_TOKENS = 4, 24


@dataclass
class Remembering:
    """An engine that keeps what it was asked and what it sampled, by episode."""

    engine: Any
    turns: dict[str, list[tuple[SampleRequest, Sample]]] = field(default_factory=dict)

    async def generate(
        self, requests: Sequence[SampleRequest], ended: Callable[[], None] = do_nothing
    ) -> list[Sample]:
        samples: list[Sample] = await self.engine.generate(requests, ended)
        for request, sample in zip(requests, samples, strict=True):
            self.turns.setdefault(request.request_id.rpartition(".")[0], []).append((request, sample))
        return samples


class Talker(Echo):
    """One to four turns, each answered by one to three tools."""

    def session(self, task: EpisodeTask) -> EchoSession:
        return TalkerSession(self, task)


class TalkerSession(EchoSession):
    async def open(self) -> Opening:
        self._rng = np.random.default_rng(self._task.episode_seed)
        self._num_turns = int(self._rng.integers(1, MAX_TURNS + 1))
        return Opening()

    async def step(self, turn: int, action: Message) -> Observation:
        if turn >= self._num_turns:
            return Observation(stop_reason="over")
        said = [" ".join(self._rng.choice(WORDS, size=4)) for _ in range(int(self._rng.integers(1, 4)))]
        return Observation(messages=tuple(Message(role="tool", content=one, name="add") for one in said))


def export(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, tuple[int, ...]]:
    """Writes a model; its tokenizer, and the tokens that end a turn: the template's, and every eighth."""
    import torch
    from transformers import AutoModelForCausalLM

    template, ends = TEMPLATES[family]
    own = tokenizer(template)
    size = -(-len(own) // 64) * 64
    monkeypatch.setitem(vllm_families.SIZES, "vocab_size", size)
    monkeypatch.setitem(vllm_families.SIZES, "max_position_embeddings", 2048)
    config = vllm_families.family_config(KINDS[family])
    config.initializer_range = 0.1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    own.save_pretrained(folder)
    [end, *_] = (own.convert_tokens_to_ids(one) for one in ends)
    return own, (end, *(i for i in range(3, size, 8) if i != end))


def run_config(model: Path) -> RunConfig:
    return parse(
        RunConfig,
        {
            "data": {"train_files": "x.parquet", "max_prompt_length": 700, "max_response_length": 1000},
            "model": {"path": str(model), "dtype": "float32"},
            "rollout": {
                "max_num_seqs": 32,
                "threads": 1,
                "tools": ["unused:unused"],
                "episode": {"show_tools": False, "max_turns": MAX_TURNS, "max_turn_tokens": TURN_TOKENS},
            },
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )


async def converse(config: RunConfig, own: Any, stops: tuple[int, ...]) -> tuple[list[Draw], Remembering]:
    """The conversations, in groups."""
    from paceline.rollout.engines.vllm.engine import VllmEngine

    engine = Remembering(await VllmEngine.start(config, load_format="auto"))
    try:
        rules = rules_of(config, own, stops[:1])
        drawn = Episodes(engine=engine, environment=Talker(), rules=rules, retries=0, check=check_samples)
        room = asyncio.Semaphore(8)

        async def group(prompt_id: int) -> list[Draw]:
            rng = np.random.default_rng(prompt_id)
            question = {"role": "user", "content": " ".join(rng.choice(WORDS, size=int(rng.integers(1, 9))))}
            asked = PromptGroup(
                run_id="r",
                step=1,
                purpose=Purpose.TRAIN,
                prompt_id=prompt_id,
                prompt_token_ids=np.asarray(rules.joiner.prompt([question], ()), np.int32),
                sampling=SamplingSpec(temperature=1.0, max_tokens=1000, stop_token_ids=stops),
                seeds=tuple(
                    sample_seed(run_seed=0, step=1, prompt_id=prompt_id, sample_index=i)
                    for i in range(NUM_SAMPLES)
                ),
                policy=POLICY,
                context=RewardContext(ground_truth=""),
                messages=(question,),
            )
            async with room:
                return await drawn.draw(asked, f"{prompt_id}", Slot)

        groups = await asyncio.gather(*(group(i) for i in range(-(-NUM_CONVERSATIONS // NUM_SAMPLES))))
        return [draw for draws in groups for draw in draws], engine
    finally:
        await engine.engine.shutdown()


def learned(model: Path, draws: Sequence[Draw]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The learner's log-probs of all responses, packed."""
    import torch
    from transformers import AutoModelForCausalLM

    from paceline.learner.batch.pack import pack
    from paceline.learner.batch.types import PackedRow
    from paceline.learner.model.networks import PolicyNetwork

    network = PolicyNetwork(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    parts = []
    with torch.no_grad():
        for first in range(0, len(draws), 16):
            rows = [
                PackedRow(
                    index=index,
                    prompt_token_ids=draw.prompt_token_ids,
                    response_token_ids=draw.token_ids,
                    response_mask=draw.mask,
                    response_log_probs=draw.log_probs,
                )
                for index, draw in enumerate(draws[first : first + 16])
            ]
            parts.append(network(pack(rows, torch.device("cpu")))[0].numpy())
    return np.concatenate(parts)


def key(draw: Draw) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The prompt, and the sampled tokens turn by turn."""
    spans = (draw.token_ids[first:stop].tolist() for first, stop in sampled_spans(draw.mask))
    return tuple(draw.prompt_token_ids.tolist()), tuple(tuple(span) for span in spans)


@pytest.mark.parametrize("family", KINDS)
async def test_what_is_trained_is_what_was_sampled(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stops = export(family, tmp_path, monkeypatch)
    draws, engine = await converse(run_config(tmp_path), own, stops)
    recorded = {key(draw): draw for draw in draws}
    num_turns = 0
    for turns in engine.turns.values():
        said = tuple(tuple(sample.token_ids.tolist()) for _, sample in turns)
        draw = recorded[(tuple(turns[0][0].prompt_token_ids), said)]
        for (first, stop), (request, sample) in zip(sampled_spans(draw.mask), turns, strict=True):
            assert list(request.prompt_token_ids) == [*draw.prompt_token_ids, *draw.token_ids[:first]]
            assert np.array_equal(draw.log_probs[first:stop], sample.log_probs)
        num_turns += len(turns)
    masks = np.concatenate([draw.mask for draw in draws]) == 1
    told = np.concatenate([draw.log_probs for draw in draws])
    assert not told[~masks].any()
    differences = np.abs(learned(tmp_path, draws) - told)[masks]
    print(
        f"{family}: {len(draws)} conversations, {num_turns} turns, {int(masks.sum())} sampled tokens of "
        f"{len(masks)}; learner's and engine's log-probs differ by at most {differences.max():.2g}"
    )
    assert len(draws) >= NUM_CONVERSATIONS
    assert differences.max() < 1e-4
