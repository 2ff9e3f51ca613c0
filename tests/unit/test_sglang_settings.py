"""What of a configuration SGLang gets as arguments, what is refused, and how much memory its cache gets."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.engines.sglang import SGLANG
from paceline.models.facts import ARCHITECTURES
from paceline.rollout.engines.loading import check_engine
from paceline.rollout.engines.sglang import refusals
from paceline.rollout.engines.sglang.arguments import environment, server_arguments

GIB = 1 << 30


def config(path: str = "some/model", data: dict[str, Any] | None = None, **rollout: Any) -> RunConfig:
    return parse(
        RunConfig,
        {
            "data": {
                "train_files": "x.parquet",
                "max_prompt_length": 100,
                "max_response_length": 50,
                **(data or {}),
            },
            "model": {"path": path},
            "rollout": {"name": "sglang", **rollout},
            "reward": {"functions": [{"name": "exact_match"}]},
            "trainer": {"total_steps": 1, "seed": 7},
        },
    )


def test_arguments_on_a_gpu() -> None:
    given = config(max_num_seqs=64, tensor_model_parallel_size=2, sleep="always", gpu_memory_utilization=0.4)
    arguments = server_arguments(given, on_cpu=False)
    wanted = {
        "model_path": "some/model",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "sampling_backend": "paceline",
        "tp_size": 2,
        "max_running_requests": 64,
        "random_seed": 7,
        "attention_backend": "triton",
        "enable_memory_saver": True,
        "disable_cuda_graph": False,
        "chunked_prefill_size": SGLANG.prefill_tokens,
    }
    assert wanted.items() <= arguments.items()
    # SGLang ends a sequence some tokens before its own limit.
    assert arguments["context_length"] >= 150 + 6


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("deepseek_v2", {"scoring_func": "softmax", "moe_layer_freq": 1}),
        ("deepseek_v3", {"scoring_func": "sigmoid", "moe_layer_freq": 1}),
        ("minimax_m2", {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}),
    ],
)
def test_keys_that_config_json_lacks_are_told_to_sglang(
    model_type: str, missing: dict[str, Any], tmp_path: Path
) -> None:
    tree = {"model_type": model_type, "topk_method": "noaux_tc"}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    arguments = server_arguments(config(str(tmp_path)), on_cpu=False)
    assert json.loads(arguments["json_model_override_args"]) == missing
    (tmp_path / "config.json").write_text(json.dumps(tree | missing))
    assert "json_model_override_args" not in server_arguments(config(str(tmp_path)), on_cpu=False)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, {"rope_theta": 1e6}),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, {}),
        ({"rope_parameters": None}, {}),
    ],
)
def test_keys_that_sglang_reads_elsewhere_than_transformers_are_told_to_it(
    tree: dict[str, Any], told: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "exaone4"} | tree))
    arguments = server_arguments(config(str(tmp_path)), on_cpu=False)
    assert json.loads(arguments.get("json_model_override_args", "{}")) == told


def test_arguments_follow_eager_sleep_and_the_users_own() -> None:
    given = config(enforce_eager=True, sleep="never", engine_kwargs={"page_size": 16})
    arguments = server_arguments(given, on_cpu=False)
    assert (arguments["disable_cuda_graph"], arguments["enable_memory_saver"]) == (True, False)
    assert arguments["page_size"] == 16


def test_arguments_on_a_cpu_have_room_for_every_sequence() -> None:
    arguments = server_arguments(config(max_num_seqs=8), on_cpu=True)
    assert (arguments["device"], arguments["attention_backend"]) == ("cpu", "torch_native")
    assert arguments["max_total_tokens"] >= 8 * 150
    assert "mem_fraction_static" not in arguments


def test_an_engine_that_never_sleeps_loads_no_memory_saver() -> None:
    assert "LD_PRELOAD" not in environment(config(sleep="never"))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("load_format", "auto", "weights come only by push"),
        ("dtype", "float16", "write model.dtype"),
        ("random_seed", 1, "write trainer.seed"),
        ("tp_size", 1, "write rollout.tensor_model_parallel_size"),
        ("context_length", 64, "write data.max_prompt_length and data.max_response_length"),
        ("max_running_requests", 8, "write rollout.max_num_seqs"),
        ("mem_fraction_static", 0.5, "write rollout.gpu_memory_utilization"),
        ("sampling_backend", "pytorch", "its own backend draws by seed"),
        ("quantization", "fp8", "not quantized"),
        ("enable_lora", True, "adapters are not pushed"),
        ("speculative_algorithm", "EAGLE", "draft model"),
        ("dp_size", 2, r"write rollout.replicas for more servers \(allowed: 1\)"),
        ("pp_size", 2, r"tensor-parallel ranks.*\(allowed: 1\)"),
        ("kv_cache_dtype", "fp8_e4m3", r"rounded keys and values.*\(allowed: auto\)"),
        ("cpu_offload_gb", 4, "not stay where a push writes them"),
        ("enable_hierarchical_cache", True, "outlive the reset of the prefix cache"),
        ("enable_eplb", True, "experts would move"),
        ("json_model_override_args", '{"rope_theta": 1}', "another model than the learner trains"),
        ("enable_custom_logit_processor", True, "another distribution"),
        ("disaggregation_mode", "prefill", r"both reads prompts and draws.*\(allowed: null\)"),
        ("model_impl", "transformers", "SGLang's own models"),
        ("custom_weight_loader", "a.b", "only over Paceline's own weight group"),
        ("is_embedding", True, "generates"),
    ],
)
def test_what_breaks_exactness_or_the_push_is_refused_by_name(name: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_kwargs may not set {name}=.*{reason}.*Remove it"):
        check_engine(config(engine_kwargs={name: value}))


def test_every_refused_argument_is_named_at_once_and_one_that_leaves_a_feature_off_is_not() -> None:
    with pytest.raises(ConfigError, match=r"may not set dtype='float16': .*; tp_size=2: "):
        check_engine(config(engine_kwargs={"tp_size": 2, "dtype": "float16", "enable_lora": False}))
    check_engine(config(engine_kwargs={"enable_lora": False, "dp_size": 1, "page_size": 16}))


def test_draws_of_sglangs_own_sampler_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="rollout.name: sglang does not go with rollout.sampler: engine, because .*write auto",
    ):
        check_engine(config(sampler="engine"))


def test_weights_in_mid_answer_are_refused_before_a_run_finds_no_versions() -> None:
    given = config()
    in_flight = given.model_copy(update={"rollout": given.rollout.model_copy(update={"in_flight": "keep"})})
    with pytest.raises(ConfigError, match="in_flight: keep, because it does not tell which weights .*wait"):
        check_engine(in_flight)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen3_next", "a state for each sequence"),
        ("qwen2_5_vl", "prompts with images"),
        ("cohere2", "Command R7B.*sliding windows SGLang's attention does not prepare"),
        ("llama4_text", "Llama 4, text, whose experts, queries and keys SGLang loads only"),
        ("olmo3", "OLMo 3, whose rotary parameters"),
        ("gpt_oss", "whose experts SGLang's loader writes in parts only"),
        ("hunyuan_v1_dense", "Hunyuan, dense, whose normed queries"),
        ("phi", "Phi-1, Phi-2, whose head has a bias"),
    ],
)
def test_models_that_need_another_engine_are_refused(model_type: str, reason: str, tmp_path: Path) -> None:
    text = {"text_config": {"model_type": f"{model_type}_text"}} if model_type == "qwen2_5_vl" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **text}))
    with pytest.raises(ConfigError, match=rf"does not go with .*{reason}.*or another rollout.name"):
        check_engine(config(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    check_engine(config(str(tmp_path)))


def test_families_that_were_compared_exist_and_none_of_them_is_refused() -> None:
    assert set(SGLANG.compared or ()) <= set(ARCHITECTURES)
    assert set(refusals.UNSUITED) <= set(ARCHITECTURES) - set(SGLANG.compared or ())


@pytest.mark.parametrize(
    ("tree", "is_refused"),
    [
        ({"model_type": "mistral", "sliding_window": 149}, True),
        ({"model_type": "mistral", "sliding_window": 150}, False),
        ({"model_type": "mistral", "sliding_window": None}, False),
        ({"model_type": "gemma3_text", "sliding_window": 149}, True),
        ({"model_type": "gemma3_text", "sliding_window": 512}, False),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, False),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, True),
        ({"model_type": "qwen3", "sliding_window": 8, "layer_types": ["full_attention"]}, False),
        ({"model_type": "qwen3", "sliding_window": 8, "layer_types": ["sliding_attention"]}, True),
    ],
)
def test_a_window_that_sglang_ignores_or_shortens_is_refused_if_a_sequence_can_be_longer(
    tree: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tree))
    if not is_refused:
        check_engine(config(str(tmp_path)))
        return
    window = tree["sliding_window"]
    with pytest.raises(ConfigError, match=rf"window of {window} tokens.*now 150, to {window}, or another"):
        check_engine(config(str(tmp_path)))


def test_images_of_the_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="prompts with images: leave out data.image_key"):
        check_engine(config(data={"image_key": "images"}))


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_every_argument_that_is_set_or_refused_is_one_of_the_installed_sglang() -> None:
    """A misspelt name in the table would refuse nothing. SGLang takes seconds to import, hence its source."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    (root,) = list(spec.submodule_search_locations or ())
    source = (Path(root) / "srt/server_args.py").read_text(encoding="utf-8")
    fields = {
        statement.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    tables = (refusals.OWN, refusals.REFUSED, refusals.ALLOWED)
    named = {name for table in tables for name in table}
    given = {name for on_cpu in (False, True) for name in server_arguments(config(), on_cpu=on_cpu)}
    assert (named | given) - fields == set()


def _use(total: float, free: float, reserved: float) -> dict[str, int]:
    return {"total": int(total * GIB), "free": int(free * GIB), "reserved": int(reserved * GIB)}


@pytest.mark.torch
def test_the_cache_is_the_share_of_the_whole_gpu_less_what_this_process_takes() -> None:
    from paceline.rollout.engines.sglang.memory import cache_bytes

    # 0.2 of 140 GiB: 28 GiB, less 1.5 of context, 1 of weights, 2 of activations and graphs.
    assert cache_bytes(0.2, **_use(140, 138, 1)) == int(0.2 * 140 * GIB) - int(4.5 * GIB)
    # What others hold changes nothing as long as the rest suffices: SGLang's own share did count it.
    assert cache_bytes(0.2, **_use(140, 40, 1)) == cache_bytes(0.2, **_use(140, 138, 1))
    assert cache_bytes(0.4, **_use(140, 138, 1)) - cache_bytes(0.2, **_use(140, 138, 1)) == 28 * GIB


@pytest.mark.torch
def test_a_share_that_does_not_suffice_names_one_that_does() -> None:
    from paceline.rollout.engines.sglang.memory import cache_bytes

    with pytest.raises(ValueError, match=r"nothing is left for the KV cache: raise it above 0\.239"):
        cache_bytes(0.2, **_use(80, 79, 15.6))
    assert cache_bytes(0.24, **_use(80, 79, 15.6)) > 0


@pytest.mark.torch
def test_a_gpu_that_another_process_holds_is_named() -> None:
    from paceline.rollout.engines.sglang.memory import cache_bytes

    with pytest.raises(ValueError, match=r"20\.0 GiB of the GPU are free.*another process"):
        cache_bytes(0.5, **_use(80, 20, 1))


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_installed_sglang_sizes_its_cache_in_the_one_place_that_is_replaced() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    (root,) = list(spec.submodule_search_locations or ())
    source = (Path(root) / "srt/mem_cache/kv_cache_configurator.py").read_text(encoding="utf-8")
    assert source.count("self._profile_available_bytes(pre_model_load_memory)") == 1
    assert "def _profile_available_bytes(self, pre_model_load_memory: int) -> int:" in source
