"""A reward model with one score per sequence in vLLM, as a batch function."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.scoring import ScoreItem
from paceline.data.prompts import encode_exchange, load_tokenizer
from paceline.reward.models.model import ModelOptions

# vLLM reads these on import. The engine runs in this process: an engine process of its own would survive when
# a deadline ends this one.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# No warm-up, no binding to cores, which other processes may use, and no compiler.
_ON_CPU = {
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
# Each row is read once, and its keys and values are freed at once.
_KV_CACHE_BYTES = 2**30


class PoolingModel:
    """Scores as `SequenceModel` does, with vLLM's pooling runner in this process.

    Raises:
        ConfigError: vLLM is not installed, or the model has another number of labels than one.
    """

    def __init__(self, options: ModelOptions) -> None:
        if find_spec("vllm") is None:
            raise ConfigError(
                "engine: vllm of a reward model needs vLLM, which is not installed here: "
                "install the packages of a rollout server, or set engine: transformers"
            )
        on_cpu = _ON_CPU if options.device == "cpu" else {}
        for name, value in (_ENVIRONMENT | on_cpu).items():
            os.environ.setdefault(name, value)
        from vllm import LLM, PoolingParams

        self._tokenizer = load_tokenizer(options.path)
        model: Any = LLM(
            model=options.path,
            runner="pooling",
            convert="classify",
            dtype=options.dtype,
            hf_overrides={"head_dtype": "float32"},
            max_num_batched_tokens=options.max_batch_tokens,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
            enable_prefix_caching=False,
            enforce_eager=True,
            disable_log_stats=True,
        )
        config = model.model_config
        if config.hf_config.num_labels != 1:
            raise ConfigError(
                f"{options.path} has {config.hf_config.num_labels} labels: a reward model has one, its score"
            )
        self._model, self._limit = model, config.max_model_len
        self._params = PoolingParams(task="classify", use_activation=False)

    def __call__(self, items: list[ScoreItem]) -> list[float]:
        """Returns one score per item, in the order of the items."""
        rows = [encode_exchange(self._tokenizer, item.prompt, item.response) for item in items]
        prompts = [{"prompt_token_ids": row[-self._limit :]} for row in rows]
        outputs = self._model.encode(
            prompts, pooling_params=self._params, pooling_task="classify", use_tqdm=False
        )
        return [float(output.outputs.data.item()) for output in outputs]
