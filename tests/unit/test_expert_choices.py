"""Choices of experts on their way: from the engine's outputs to trajectories; what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.checks.model_checks import model_line
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.ids import Purpose
from paceline.core.policy import PolicyRange, PolicyTag
from paceline.core.samples.episode import EpisodeOutcome
from paceline.core.samples.expert_choices import ChoiceArray
from paceline.core.samples.trajectory import (
    FinishReason,
    PartialSample,
    PromptGroup,
    RewardContext,
    SamplingSpec,
)
from paceline.models.model_shape import choice_bytes, layers_with_experts
from paceline.rollout.engines.base import Sample
from paceline.rollout.engines.loading import check_engine
from paceline.rollout.engines.vllm.sampling.samples import to_sample
from paceline.rollout.engines.vllm.start import refusals, startup
from paceline.rollout.engines.vllm.start.arguments import engine_arguments
from paceline.rollout.episodes.recorder import Draw, Recorder
from paceline.rollout.progress import _joined
from paceline.rollout.trajectories import trajectory_messages
from paceline.wire import decode_trajectory

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1 << 20,
}
POLICY = PolicyTag(version=2, digest="0" * 16)


def choices(num_tokens: int, first: int = 0) -> ChoiceArray:
    """(T, 1, 2): of token t the experts t + first and t + first + 1."""
    return (np.arange(num_tokens)[:, None, None] + np.array([0, 1]) + first).astype(np.uint8)


def sample(num_tokens: int, given: ChoiceArray | None) -> Sample:
    return Sample(
        token_ids=np.full(num_tokens, 9, np.int32),
        log_probs=np.full(num_tokens, -1.0, np.float32),
        finish_reason=FinishReason.STOP,
        expert_choices=given,
    )


def sent(draw: Draw, purpose: str = Purpose.TRAIN) -> Any:
    """The choices that reach readers."""
    group = PromptGroup(
        run_id="r",
        step=3,
        purpose=purpose,
        prompt_id=7,
        prompt_token_ids=draw.prompt_token_ids,
        sampling=SamplingSpec(temperature=1.0, max_tokens=4),
        seeds=(1,),
        policy=POLICY,
        context=RewardContext(ground_truth="42"),
    )
    (message,) = trajectory_messages(group, [draw], server_id="s", draw="0", seconds=0.0)
    assert message.blobs is not None
    record = decode_trajectory(next(iter(message.blobs.values()))).expert_choices
    return None if record is None else record.array


def prompt(num_tokens: int) -> Any:
    return np.full(num_tokens, 5, np.int32)


def test_all_tokens_of_a_trajectory_but_the_last_have_choices() -> None:
    array = sent(Draw.single(prompt(3), sample(2, choices(4))))
    assert np.array_equal(array[:4], choices(4))
    assert not array[4:].any()
    assert len(array) == 5


def test_a_sample_without_choices_and_held_out_prompts_have_none() -> None:
    assert sent(Draw.single(prompt(3), sample(2, None))) is None
    for purpose in (Purpose.VALIDATE, Purpose.GREEDY):
        assert sent(Draw.single(prompt(3), sample(2, choices(4))), purpose) is None


def test_a_sample_that_goes_on_has_the_choices_of_the_engine_that_ends_it() -> None:
    begun = PartialSample(
        sample_index=0,
        seed=1,
        first=0,
        token_ids=np.full(2, 9, np.int32),
        log_probs=np.full(2, -1.0, np.float32),
        ranges=(PolicyRange(POLICY, 0, 2),),
    )
    joined = _joined(begun, sample(2, choices(6)))  # prompt of 3, and 4 tokens
    assert np.array_equal(sent(Draw.single(prompt(3), joined))[:6], choices(6))


def test_in_an_episode_each_token_keeps_the_choices_with_which_it_was_drawn() -> None:
    recorder = Recorder([5, 5, 5])
    recorder.sampled(sample(2, choices(4)))  # 3 + 2 tokens, the last one without
    recorder.observed([6, 6])
    recorder.sampled(sample(3, choices(9, first=100)))  # 7 + 3 tokens
    outcome = EpisodeOutcome(stop_reason="answered", num_turns=2, num_tool_calls=0, tool_s=0.0)
    draw = recorder.draw(outcome)
    array = sent(draw)
    assert len(array) == 10
    assert np.array_equal(array[:4], choices(4))
    assert np.array_equal(array[4:9], choices(9, first=100)[4:])
    assert not array[9].any()

    joined = Draw.joined([draw, Draw.single(prompt(2), sample(1, None)), draw])
    parts = np.split(sent(joined), [10, 13])
    assert np.array_equal(parts[0], array)
    assert not parts[1].any()
    assert np.array_equal(parts[2], array)


def output(routed: Any, num_tokens: int = 2) -> Any:
    flat = SimpleNamespace(logprobs=[-1.0] * num_tokens, start_indices=list(range(num_tokens)))
    completion = SimpleNamespace(
        finish_reason="stop", token_ids=[9] * num_tokens, logprobs=flat, routed_experts=routed
    )
    return SimpleNamespace(outputs=[completion], request_id="q", prompt_token_ids=[5, 5, 5])


async def test_layers_without_experts_are_left_out_of_what_vllm_returns() -> None:
    routed = np.concatenate([np.zeros((4, 1, 2), np.uint8), choices(4), choices(4, first=9)], axis=1)
    kept = (await to_sample(output(routed), "q", None, (1, 2))).expert_choices
    assert kept is not None
    assert np.array_equal(kept, routed[:, 1:])
    assert (await to_sample(output(None), "q", None, (1, 2))).expert_choices is None
    assert (await to_sample(output(routed), "q", None)).expert_choices is None


async def test_a_kernel_that_does_not_say_what_it_chose_is_an_error() -> None:
    dense, chosen = np.zeros((4, 4, 2), np.uint8), choices(4)
    routed = np.concatenate([dense, chosen, dense[:, :1]], axis=1)
    with pytest.raises(PacelineError, match=r"no choices of experts for layer 5: .*moe_backend"):
        await to_sample(output(routed), "q", None, (4, 5))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"first_k_dense_replace": 1}, (1, 2, 3)),
        ({"mlp_only_layers": [2]}, (0, 1, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, (1, 2)),
    ],
)
def test_layers_with_experts_are_those_of_transformers(changes: dict[str, Any], layers: Any) -> None:
    tree = MOE | changes
    assert layers_with_experts(tree) == layers
    assert layers_with_experts({"text_config": tree}) == layers
    assert choice_bytes(tree) == 2 * len(layers)
    assert choice_bytes(tree | {"num_experts": 257}) == 4 * len(layers)
    assert choice_bytes({"num_hidden_layers": 4}) == 0


def config(folder: Path | str = "m", /, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "data": {"train_files": "x.parquet", "max_prompt_length": 100, "max_response_length": 28},
        "model": {"path": str(folder), "load_format": "random"},
        "reward": {"functions": [{"name": "exact_match"}]},
        "trainer": {"total_steps": 1},
        "actor": {"ppo_mini_batch_size": 64, "router_replay": True},
    }
    return parse(RunConfig, {name: tree.get(name, {}) | sections.get(name, {}) for name in tree | sections})


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(MOE | changes), encoding="utf-8")
    return folder


def test_the_check_knows_the_sizes_of_choices(tmp_path: Path) -> None:
    assert "Qwen3Moe" in model_line(config(write(tmp_path)))
    with pytest.raises(ConfigError, match=r"sends each token to one expert; it needs two"):
        model_line(config(write(tmp_path, num_experts_per_tok=1)))
    with pytest.raises(ConfigError, match=r"no experts: leave it out"):
        model_line(config(write(tmp_path, num_experts=0, num_experts_per_tok=0)))
    write(tmp_path, num_experts=257, num_experts_per_tok=8, num_hidden_layers=64)  # 1 KiB per token
    long = {"max_prompt_length": 1 << 10, "max_response_length": 31 << 10, "train_batch_size": 64}
    memory = {"actor": {"ppo_max_token_len_per_gpu": 1 << 16}}
    model_line(config(tmp_path, data=long, **memory))
    with pytest.raises(ConfigError, match=r"take up to 33 MiB, allowed are 32; lower data\.max_prompt"):
        model_line(config(tmp_path, data=long | {"max_prompt_length": 2 << 10}, **memory))
    step = {"rollout": {"n": 4}, "data": long}  # 64 x 4 x 32 MiB
    model_line(config(tmp_path, **step, **memory, broker={"max_memory_mib": 8192}))
    with pytest.raises(ConfigError, match=r"take up to 8192 MiB, more than broker\.max_memory_mib=8191"):
        model_line(config(tmp_path, **step, **memory, broker={"max_memory_mib": 8191}))


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        (
            {
                "rollout": {"in_flight": "recompute", "sampler": "batched"},
                "barrier": {"mode": "bounded", "max_staleness": 1},
            },
            "rollout.in_flight: recompute",
        ),
        (
            {
                "algorithm": {"replay": {"prompts_per_step": 4}},
                "barrier": {"mode": "bounded", "max_staleness": 0},
            },
            "algorithm.replay.prompts_per_step",
        ),
    ],
)
def test_what_choices_do_not_go_with_is_refused_by_name(sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"actor.router_replay does not go with {reason}"):
        config(**sections)


def test_an_engine_that_returns_no_choices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"sglang does not go with .*actor\.router_replay"):
        check_engine(config(rollout={"name": "sglang"}))
    for name, value in (("enable_prefix_caching", False), ("decode_context_parallel_size", 2)):
        with pytest.raises(ConfigError, match=f"may not set {name}=.*returns no choices of experts"):
            check_engine(config(rollout={"engine_kwargs": {name: value}}))
        check_engine(config(rollout={"engine_kwargs": {name: value}}, actor={"router_replay": False}))
    with pytest.raises(ConfigError, match="may not set enable_return_routed_experts=.*router_replay"):
        check_engine(
            config(rollout={"engine_kwargs": {refusals.CHOICES: True}}, actor={"router_replay": False})
        )
    with pytest.raises(ConfigError, match="vLLM's build for the CPU returns no choices of experts"):
        engine_arguments(config(), on_cpu=True)
    assert engine_arguments(config(), on_cpu=False)[refusals.CHOICES] is True
    assert refusals.CHOICES not in engine_arguments(config(actor={"router_replay": False}), on_cpu=False)


@pytest.mark.parametrize(
    ("fields", "runner"),
    [({refusals.CHOICES}, "0"), ({refusals.CHOICES, "aux_output_config"}, "1"), (set(), None)],
)
def test_vllm_runs_the_model_runner_that_returns_choices(
    fields: set[str], runner: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "unset")
    kind = SimpleNamespace(__dataclass_fields__=dict.fromkeys(fields))
    if runner is None:
        with pytest.raises(ConfigError, match="this vLLM returns no choices of experts; install"):
            startup._prepare_choices(config(), kind)
        return
    startup._prepare_choices(config(), kind)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == runner
    write(tmp_path, model_type="qwen3_next")
    if runner == "0":
        startup._prepare_choices(config(tmp_path), kind)
    else:
        with pytest.raises(ConfigError, match=r"only with prefix caching.*install vLLM 0\.24"):
            startup._prepare_choices(config(tmp_path), kind)
