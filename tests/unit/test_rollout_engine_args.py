from __future__ import annotations

from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.rollout.engines.vllm import environment
from paceline.rollout.engines.vllm.arguments import engine_arguments


def config(**rollout: Any) -> RunConfig:
    return parse(
        RunConfig,
        {
            "data": {"train_files": "x.parquet", "max_prompt_length": 100, "max_response_length": 28},
            "model": {"path": "some/model"},
            "rollout": rollout,
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1, "seed": 5},
            "actor": {"ppo_mini_batch_size": 64},
        },
    )


def test_arguments_on_a_cpu() -> None:
    arguments = engine_arguments(config(tensor_model_parallel_size=2, max_num_seqs=32), on_cpu=True)
    assert arguments == {
        "model": "some/model",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "float32",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "tensor_parallel_size": 2,
        "worker_extension_cls": "paceline.rollout.engines.vllm.worker.PacelineWorkerExtension",
        "max_model_len": 128,
        "max_num_seqs": 32,
        "enforce_eager": True,
        "seed": 5,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 4096,
    }


def test_arguments_on_a_gpu_leave_prefill_to_the_engine() -> None:
    arguments = engine_arguments(config(gpu_memory_utilization=0.5), on_cpu=False)
    assert arguments["gpu_memory_utilization"] == 0.5
    assert arguments["enforce_eager"] is False
    assert "enable_chunked_prefill" not in arguments


def test_engine_kwargs_win_where_they_may() -> None:
    arguments = engine_arguments(config(engine_kwargs={"max_model_len": 64, "block_size": 32}), on_cpu=True)
    assert (arguments["max_model_len"], arguments["block_size"]) == (64, 32)


def test_engine_kwargs_cannot_take_back_what_is_relied_on() -> None:
    with pytest.raises(ConfigError, match=r"may not set load_format, logprobs_mode: .*take it out"):
        engine_arguments(
            config(engine_kwargs={"logprobs_mode": "raw_logprobs", "load_format": "auto"}), on_cpu=True
        )


def test_a_temperature_that_vllm_would_change_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.temperature=0.001.*0.01"):
        engine_arguments(config(temperature=0.001), on_cpu=True)


def test_environment_keeps_what_the_user_has_set() -> None:
    environ = {"OMP_WAIT_POLICY": "active"}
    environment.prepare(config(kv_cache_gib=3, replicas=2), num_cores=8, environ=environ)
    assert environ["OMP_WAIT_POLICY"] == "active"
    assert environ["OMP_NUM_THREADS"] == "4"
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environ["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert "TORCHDYNAMO_DISABLE" not in environ
    environment.prepare_cpu(environ)
    assert environ["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("rollout", "cores", "threads"),
    [
        ({}, 2, 2),
        ({"replicas": 2}, 2, 1),
        ({"replicas": 2, "tensor_model_parallel_size": 2}, 2, 1),
        ({"tensor_model_parallel_size": 2}, 16, 8),
        ({"threads": 3}, 2, 3),
    ],
)
def test_threads_are_shared_out_over_the_ranks(rollout: dict[str, Any], cores: int, threads: int) -> None:
    assert environment.num_threads(config(**rollout), cores) == threads
