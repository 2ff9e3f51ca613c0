"""Whole episodes with vLLM: what is sampled, recorded, and learned from, with a tiny model per family.

    python -m support.token_fidelity FAMILY NUMBER [--device cuda] [--std 0.1] [--reference]

Prints a line of JSON. The models have random weights in float32; the templates write the families' forms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.ids import Purpose, sample_seed
from paceline.core.samples.chat import Message
from paceline.core.samples.trajectory import PromptGroup, RewardContext, SamplingSpec, sampled_spans
from paceline.learner.batch.pack import pack
from paceline.learner.batch.types import PackedRow
from paceline.learner.model.decoder import attention
from paceline.learner.model.networks import PolicyNetwork
from paceline.rollout.engines.base import Sample, SampleRequest, do_nothing
from paceline.rollout.engines.vllm.engine import VllmEngine
from paceline.rollout.episodes.environment import EpisodeTask, Opening, TurnResult
from paceline.rollout.episodes.group import Episodes, rules_of
from paceline.rollout.episodes.loop import Slot
from paceline.rollout.episodes.recorder import Draw
from paceline.rollout.trajectories import check_samples
from support import vllm_families
from support.chat_templates import TEMPLATES, tokenizer
from support.episodes import POLICY, Echo, EchoSession

KINDS = {"qwen2.5": "qwen2", "qwen3": "qwen3", "llama3": "llama", "smollm2": "llama", "gemma": "gemma"}
NUM_SAMPLES = 4
STD = 0.1
_WORDS = ("the", "other", "12", "121", "\n\n", "thing,", "<tool_response>", "é", "漢", "{}", '"')
_MAX_TURNS, _TURN_TOKENS = 4, 24
_ON_CUDA = {"gpu_memory_utilization": 0.03, "engine_kwargs": {"kv_cache_memory_bytes": 1 << 28}}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What became of the conversations.

    Attributes:
        wrong_turns: asked for with other tokens than the recorded ones, or recorded otherwise than sampled.
        told_elsewhere: tokens that were not sampled and have a log-prob.
        difference: the largest between the learner's and the engine's log-probs of sampled tokens.
        engine_error, learner_error: the largest of each against float64; None: not computed.
    """

    family: str
    num_conversations: int
    num_turns: int
    num_sampled: int
    num_tokens: int
    wrong_turns: int
    told_elsewhere: int
    difference: float
    largest_logit: float | None = None
    engine_error: float | None = None
    learner_error: float | None = None


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
        self._num_turns = int(self._rng.integers(1, _MAX_TURNS + 1))
        return Opening()

    async def step(self, turn: int, action: Message) -> TurnResult:
        if turn >= self._num_turns:
            return TurnResult(stop_reason="over")
        said = [" ".join(self._rng.choice(_WORDS, size=4)) for _ in range(int(self._rng.integers(1, 4)))]
        return TurnResult(messages=tuple(Message(role="tool", content=one, name="add") for one in said))


def find(
    family: str,
    num_conversations: int,
    folder: Path,
    *,
    device: str = "cpu",
    std: float = STD,
    with_reference: bool = False,
) -> Finding:
    """Has the conversations, in groups, and compares what was sampled, recorded and computed.

    Args:
        folder: for the model.
        device: of the learner; the engine takes the one that vLLM was built for.
        std: of the random weights.
        with_reference: also computes the log-probs in float64.
    """
    own, stops = export(family, folder, std)
    draws, turns = asyncio.run(converse(run_config(folder, device), own, stops, num_conversations))
    masks = np.concatenate([draw.mask for draw in draws]) == 1
    told = np.concatenate([draw.log_probs for draw in draws])
    computed = learned(folder, draws, torch.device(device))
    errors: dict[str, float] = {}
    if with_reference:
        exact, errors["largest_logit"] = reference(folder, draws)
        errors["engine_error"] = largest(told - exact, masks)
        errors["learner_error"] = largest(computed - exact, masks)
    return Finding(
        family=family,
        num_conversations=len(draws),
        num_turns=sum(map(len, turns.values())),
        num_sampled=int(masks.sum()),
        num_tokens=len(masks),
        wrong_turns=wrong_turns(draws, turns),
        told_elsewhere=int(np.count_nonzero(told[~masks])),
        difference=largest(computed - told, masks),
        **errors,
    )


def largest(differences: np.ndarray[Any, Any], masks: np.ndarray[Any, Any]) -> float:
    """Of sampled tokens."""
    return float(np.abs(differences[masks]).max())


def wrong_turns(draws: Sequence[Draw], turns: dict[str, list[tuple[SampleRequest, Sample]]]) -> int:
    """How many turns are not in a draw as the engine was asked for them and sampled them."""
    recorded = {key(draw): draw for draw in draws}
    num_wrong = 0
    for episode in turns.values():
        said = tuple(tuple(sample.token_ids.tolist()) for _, sample in episode)
        draw = recorded.get((tuple(episode[0][0].prompt_token_ids), said))
        if draw is None:
            num_wrong += len(episode)
            continue
        for (first, stop), (request, sample) in zip(sampled_spans(draw.mask), episode, strict=True):
            asked = [*draw.prompt_token_ids, *draw.token_ids[:first]]
            is_right = list(request.prompt_token_ids) == asked
            num_wrong += not (is_right and np.array_equal(draw.log_probs[first:stop], sample.log_probs))
    return num_wrong


def key(draw: Draw) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The prompt, and the sampled tokens turn by turn."""
    spans = (draw.token_ids[first:stop].tolist() for first, stop in sampled_spans(draw.mask))
    return tuple(draw.prompt_token_ids.tolist()), tuple(tuple(span) for span in spans)


def export(family: str, folder: Path, std: float = STD) -> tuple[Any, tuple[int, ...]]:
    """Writes a model; its tokenizer, and the tokens that end a turn: the template's, and every eighth."""
    from transformers import AutoModelForCausalLM

    template, ends = TEMPLATES[family]
    own = tokenizer(template)
    size = -(-len(own) // 64) * 64
    with mock.patch.dict(vllm_families.SIZES, vocab_size=size, max_position_embeddings=2048):
        config = vllm_families.family_config(KINDS[family])
    config.initializer_range = std
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    own.save_pretrained(folder)
    [end, *_] = (own.convert_tokens_to_ids(one) for one in ends)
    return own, (end, *(i for i in range(3, size, 8) if i != end))


def run_config(model: Path, device: str = "cpu") -> RunConfig:
    """What the engine and the episodes need of a run."""
    return parse(
        RunConfig,
        {
            "data": {"train_files": "x.parquet", "max_prompt_length": 700, "max_response_length": 1000},
            "model": {"path": str(model), "dtype": "float32"},
            "rollout": {
                "max_num_seqs": 32,
                "threads": 1,
                "tools": ["unused:unused"],
                "episode": {"show_tools": False, "max_turns": _MAX_TURNS, "max_turn_tokens": _TURN_TOKENS},
                **(_ON_CUDA if device == "cuda" else {}),
            },
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1},
        },
    )


async def converse(
    config: RunConfig, own: Any, stops: tuple[int, ...], num_conversations: int
) -> tuple[list[Draw], dict[str, list[tuple[SampleRequest, Sample]]]]:
    """The conversations' draws, and the turns that the engine saw."""
    engine = Remembering(await VllmEngine.start(config, load_format="auto"))
    try:
        rules = rules_of(config, own, stops[:1])
        drawn = Episodes(engine=engine, environment=Talker(), rules=rules, retries=0, check=check_samples)
        room = asyncio.Semaphore(8)

        async def group(prompt_id: int) -> list[Draw]:
            rng = np.random.default_rng(prompt_id)
            question = {"role": "user", "content": " ".join(rng.choice(_WORDS, size=int(rng.integers(1, 9))))}
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

        groups = await asyncio.gather(*(group(i) for i in range(-(-num_conversations // NUM_SAMPLES))))
        return [draw for draws in groups for draw in draws], engine.turns
    finally:
        await engine.engine.shutdown()


def learned(
    model: Path, draws: Sequence[Draw], device: torch.device
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The learner's log-probs of all responses, packed, with its attention."""
    from transformers import AutoModelForCausalLM

    attention.register()
    lm = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation=attention.PACKED_ATTENTION
    )
    network = PolicyNetwork(lm).to(device)
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
            parts.append(network(pack(rows, device))[0].cpu().numpy())
    return np.concatenate(parts)


def reference(model: Path, draws: Sequence[Draw]) -> tuple[np.ndarray[Any, np.dtype[np.float64]], float]:
    """The log-probs of all responses by transformers' forward pass in float64, and the largest logit."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    parts, most = [], 0.0
    with torch.no_grad(), InFloat64():
        for draw in draws:
            ids = torch.tensor([[*draw.prompt_token_ids.tolist(), *draw.token_ids.tolist()]])
            logits = lm(ids, use_cache=False).logits[0, len(draw.prompt_token_ids) - 1 : -1]
            assert logits.dtype == torch.float64
            most = max(most, logits.abs().max().item())
            responses = ids[0, len(draw.prompt_token_ids) :]
            parts.append(logits.log_softmax(-1).gather(1, responses[:, None])[:, 0].numpy())
    return np.concatenate(parts), most


class InFloat64(TorchFunctionMode):
    """Float32 becomes float64 wherever a model asks for it: in norms, rotations and softmax."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wider = {torch.float32: torch.float64}
        args = [wider.get(one, one) if isinstance(one, torch.dtype) else one for one in args]
        named = {
            name: wider.get(one, one) if isinstance(one, torch.dtype) else one
            for name, one in (kwargs or {}).items()
        }
        return func(*args, **named)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the finding and its seconds as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("family", choices=KINDS)
    parser.add_argument("number", type=int, help="of conversations")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--std", type=float, default=STD, help="of the weights")
    parser.add_argument("--reference", action="store_true", help="float64 beside it")
    args = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        finding = find(
            args.family,
            args.number,
            Path(folder),
            device=args.device,
            std=args.std,
            with_reference=args.reference,
        )
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({**vars(finding), "seconds": seconds, "triton": os.environ.get("TRITON_F32_DEFAULT")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
