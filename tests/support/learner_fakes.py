"""A tiny model folder, run configurations and made-up trajectories for the learner's tests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.broker import names
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.ids import TrajectoryId
from paceline.core.policy import PolicyTag
from paceline.core.samples.expert_choices import ChoiceArray, ExpertChoices
from paceline.core.samples.teacher_top_k import TeacherTopK
from paceline.core.samples.trajectory import FinishReason, SamplingSpec, Trajectory
from paceline.core.training import BatchRow
from paceline.wire import blob_digest, encode_teacher, encode_trajectory

VOCAB_SIZE = 48
Sampler = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Log-probs of a response, from the tokens of prompt and response."""
POLICY = PolicyTag(version=0, digest="0123456789abcdef")


def write_model(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 24,
    num_layers: int = 2,
) -> Path:
    """A Qwen2 model of some twenty thousand parameters with sizes that two ranks cannot share evenly."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=41,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=10000.0,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def run_config(folder: Path, /, **sections: dict[str, Any]) -> RunConfig:
    """A run of 8 prompts x 4 samples in two mini-batches, with critic, reference and adaptive KL.

    `sections` are merged in.
    """
    tree: dict[str, dict[str, Any]] = {
        "data": {
            "train_files": "none.jsonl",
            "train_batch_size": 8,
            "max_prompt_length": 16,
            "max_response_length": 8,
        },
        "model": {"path": str(folder)},
        "actor": {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 128, "optim": {"lr": 1e-3}},
        "critic": {"optim": {"lr": 1e-3}},
        "algorithm": {
            "adv_estimator": "gae",
            "lam": 0.95,
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "target_kl": 0.1, "horizon": 1000},
        },
        "rollout": {"n": 4},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 10, "seed": 3},
        "learner": {"device": "cpu", "threads": 1, "collective_timeout_s": 30},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return parse(RunConfig, json.loads(json.dumps(tree)))


def make_batch(
    *,
    step: int = 1,
    policy: PolicyTag = POLICY,
    num_prompts: int = 8,
    num_samples: int = 4,
    seed: int = 0,
    with_greedy: bool = False,
    sampler: Sampler | None = None,
    choices: tuple[int, int, int] | None = None,
    teacher: int = 0,
) -> tuple[tuple[BatchRow, ...], dict[str, bytes]]:
    """Rows in batch order and their blobs by key, drawn from the seed; greedy answers from the prompt id.

    `sampler` gives the response's log-probs; without it they are drawn, too. With `choices`, tokens but the
    last have drawn experts: (layers, experts, experts per token); samples of a prompt have equal ones for it,
    as from an engine that computes the prompt once. With `teacher`, response tokens have so many likeliest
    ones of a teacher that is drawn, too.
    """
    rng = np.random.default_rng([seed, step])
    rows, blobs = [], {}
    for prompt_id in range(num_prompts):
        prompt = rng.integers(2, VOCAB_SIZE, int(rng.integers(3, 16))).astype(np.int32)
        for sample in range(num_samples):
            length = int(rng.integers(1, 9))
            response = rng.integers(2, VOCAB_SIZE, length).astype(np.int32)
            log_probs = rng.uniform(-5, -2, length).astype(np.float32)
            trajectory = make_trajectory(
                TrajectoryId(step=step, purpose="train", prompt_id=prompt_id, sample_index=sample),
                prompt,
                response,
                log_probs=log_probs if sampler is None else sampler(prompt, response),
                policy=policy,
            )
            if choices is not None:
                seed_of = [seed, step, prompt_id, sample]
                drawn = draw_choices(seed_of, len(prompt) + length, *choices)
                drawn[: len(prompt)] = draw_choices([seed, step, prompt_id], len(prompt) + 1, *choices)[:-1]
                trajectory = dataclasses.replace(trajectory, expert_choices=ExpertChoices.of(drawn))
            key = f"blob:{trajectory.trajectory_id}"
            blobs[key], digest = encode_trajectory(trajectory), ""
            if teacher:
                top_k = draw_top_k([seed, step, prompt_id, sample], length, teacher)
                taught = encode_teacher(top_k, of=blob_digest(blobs[key]))
                digest = blob_digest(taught)
                blobs[names.teacher_top_k(key, digest)] = taught
            rows.append(
                BatchRow(
                    trajectory_id=trajectory.trajectory_id,
                    blob_key=key,
                    blob_digest=blob_digest(blobs[key]),
                    reward=float(rng.normal()),
                    num_prompt_tokens=len(prompt),
                    num_response_tokens=length,
                    num_sampled_tokens=length,
                    greedy_score=prompt_id / 4 if with_greedy else None,
                    num_greedy_tokens=8 - prompt_id % 8 if with_greedy else 0,
                    teacher_digest=digest,
                )
            )
    return tuple(rows), blobs


def draw_top_k(seed: Sequence[int], num_tokens: int, top_k: int) -> TeacherTopK:
    """The likeliest tokens of a teacher with drawn logits."""
    logits = 2.0 * np.random.default_rng(seed).standard_normal((num_tokens, VOCAB_SIZE))
    log_probs = (logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)).astype(np.float32)
    ids = np.argsort(-log_probs, axis=-1)[:, :top_k].astype(np.int32)
    return TeacherTopK(token_ids=ids, log_probs=np.take_along_axis(log_probs, ids, axis=-1))


def draw_choices(
    seed: Sequence[int], num_tokens: int, num_layers: int, num_experts: int, num_chosen: int
) -> ChoiceArray:
    """Experts of all tokens but the last, (T, L, K)."""
    keys = np.random.default_rng(seed).random((num_tokens, num_layers, num_experts))
    drawn = keys.argsort(-1)[..., :num_chosen].astype(np.uint8)
    drawn[-1] = 0
    return drawn


def make_trajectory(
    trajectory_id: TrajectoryId,
    prompt: np.ndarray,
    response: np.ndarray,
    *,
    log_probs: np.ndarray,
    policy: PolicyTag = POLICY,
) -> Trajectory:
    """A finished sample with the given arrays."""
    return Trajectory(
        run_id="run",
        trajectory_id=trajectory_id,
        policy=policy,
        prompt_token_ids=prompt,
        response_token_ids=response,
        response_log_probs=log_probs,
        response_mask=np.ones(len(response), np.uint8),
        finish_reason=FinishReason.STOP,
        sampling=SamplingSpec(temperature=1.0, max_tokens=8),
        seed=1,
    )


class DictBlobs:
    """Blobs in a dictionary."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        self.blobs = blobs

    def get(self, keys: Any) -> list[bytes]:
        """Values in the order of the keys."""
        return [self.blobs[key] for key in keys]

    def put(self, blobs: Mapping[str, bytes]) -> None:
        """Adds blobs."""
        self.blobs.update(blobs)
