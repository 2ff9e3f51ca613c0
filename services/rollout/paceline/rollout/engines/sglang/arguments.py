"""Derives SGLang's arguments from the run's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.config.run import RunConfig
from paceline.engines.sglang import SGLANG
from paceline.models.facts import config_tree
from paceline.rollout.engines.sglang import refusals, sampler
from paceline.weights import corrections

SLACK: Final = 8
"""SGLang's limit of a sequence's length exceeds the run's longest sequence by this many tokens."""


def server_arguments(config: RunConfig, *, on_cpu: bool, load_format: str = "dummy") -> dict[str, Any]:
    """Returns the keyword arguments of SGLang's ServerArgs; raises what `refusals.check` raises."""
    refusals.check(config)
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model_path": config.model.path,
        "skip_tokenizer_init": True,
        "load_format": load_format,
        "dtype": config.model.dtype,
        "sampling_backend": sampler.BACKEND,
        "grammar_backend": "none",
        "sampling_defaults": "openai",
        "tp_size": rollout.tensor_model_parallel_size,
        "context_length": config.engine_model_len + SLACK,
        "max_running_requests": rollout.max_num_seqs,
        "random_seed": config.trainer.seed,
        "sleep_on_idle": True,
        "log_level": "warning",
        "watchdog_timeout": 100_000.0,
    }
    if keys := _model_keys(config_tree(config.model.path)):
        arguments["json_model_override_args"] = json.dumps(keys)
    if on_cpu:
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": rollout.max_num_seqs * (config.engine_model_len + SLACK),
        }
    else:
        arguments |= {
            "attention_backend": "triton",
            "mem_fraction_static": rollout.gpu_memory_utilization,  # `memory.py` sizes the cache itself
            "chunked_prefill_size": SGLANG.prefill_tokens,
            "enable_memory_saver": rollout.sleep == "always",
            "disable_cuda_graph": rollout.enforce_eager,
            "disable_prefill_cuda_graph": True,
            "cuda_graph_max_bs_decode": rollout.max_num_seqs,
        }
    return arguments | rollout.engine_kwargs


def _model_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys that SGLang misses in config.json or reads otherwise than transformers.

    SGLang's EXAONE 4 reads `rope_theta` outside `rope_parameters`, and takes 1e6 if it is not there.
    """
    keys: dict[str, Any] = dict(corrections.missing_keys(tree))
    theta = tree.get("rope_theta", (tree.get("rope_parameters") or {}).get("rope_theta"))
    if theta is not None:
        keys["rope_theta"] = theta
    return keys


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU; no CUDA context is made."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def environment(config: RunConfig) -> dict[str, str]:
    """Returns variables for the engine's processes."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SGLANG_USE_PICKLE_IPC": "0",
    }
    if config.rollout.sleep == "always" and has_gpu():
        variables["LD_PRELOAD"] = _memory_saver()
    return variables


def _memory_saver() -> str:
    """Returns the library that maps and unmaps the engine's GPU memory; it must be preloaded."""
    from torch_memory_saver.hooks.mode_preload import get_binary_path_from_package

    return str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
