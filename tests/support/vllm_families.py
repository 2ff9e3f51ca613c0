"""Each architecture of the table in vLLM's own classes: how it is pushed into, and whether that is right.

    python -m support.vllm_families [MODEL_TYPE ...]     # prints a line of JSON per architecture

A tiny model of the kind is exported. vLLM builds it twice: once without weights, into which a push's slices
are copied, and once from the export. All parameters must be equal to the bit. No engine is started. The KV
cache's numbers per token are vLLM's, beside those of the memory plan.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size_mlp": 160,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 199,
}
"""Heads of a size that vLLM's attention on the CPU takes, and a vocabulary that is padded."""

STD = 0.2
"""Standard deviation of the weights"""

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""The sizes of the published models: vLLM's latent attention on the CPU has no others."""

CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "head_dim": 64},  # of the rotary part
    "glm4_moe_lite": {**_LATENT, "head_dim": 64},  # of the rotary part
    "gemma4_text": {"global_head_dim": 64, "vocab_size_per_layer_input": SIZES["vocab_size"]},
    "cohere2": {"sliding_window": 32},  # no row is longer: vLLM's window is a token longer
    "llama4_text": {"intermediate_size": 96},  # of the experts; dense layers have another
    "qwen3_5_moe": {"hidden_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "qwen3_vl_moe": {"hidden_size": 128, "moe_intermediate_size": 64},
    # vLLM runs sliding windows in all layers of a Qwen 2, or in none.
    "qwen2": {"use_sliding_window": False, "layer_types": ["full_attention"] * 3},
}


def family_config(model_type: str, larger: Mapping[str, int] = MappingProxyType({}), **changes: Any) -> Any:
    """A tiny configuration that vLLM's build for the CPU can run; `larger` are sizes instead of `SIZES`."""
    from support.architectures import tiny_config

    config = tiny_config(model_type)
    known = {*vars(config), *config.attribute_map}
    sizes = {name: value for name, value in {**SIZES, **larger}.items() if name in known}
    return tiny_config(model_type, **(sizes | CHANGES.get(model_type, {}) | changes))


def export(
    model_type: str,
    folder: Path,
    larger: Mapping[str, int] = MappingProxyType({}),
    embedding_std: float = STD,
    **changes: Any,
) -> dict[str, Any]:
    """Writes a tiny model as the learner exports it; returns the learner's tensors.

    `larger` and `changes` are those of `family_config`. `embedding_std` is of an embedding that is the head,
    too: the larger it is, the surer a model is to repeat its token.
    """
    import torch

    from paceline.learner.model.folder import write_folder
    from paceline.learner.model.loading import draw_normal, empty_lm
    from paceline.weights import corrections

    config = family_config(model_type, larger, **changes)
    source = folder / "source"
    lm = empty_lm(config)
    config.architectures = [type(lm).__name__]
    config.save_pretrained(source)
    head = lm.get_output_embeddings().weight
    tied = embedding_std if head is lm.get_input_embeddings().weight else STD
    tensors = {
        name: corrections.split(draw_normal(parameter.shape[:1], STD, 0, name))
        if name.endswith(corrections.PARTS)
        else draw_normal(parameter.shape, tied if parameter is head else STD, 0, name) + (parameter.ndim == 1)
        for name, parameter in lm.named_parameters()
    }
    write_folder(folder / "export", tensors.items(), source=source, dtype=torch.float32)
    return tensors


def compare(model_type: str) -> dict[str, Any]:
    """How vLLM's model of this kind gets a push, and whether that gives what loading the export gives."""
    import torch

    from paceline.models.model_shape import ModelShape
    from paceline.rollout.engines.weights.layout import describe_model
    from paceline.rollout.engines.weights.trace import recall
    from paceline.weights.geometry.parameters import part_of

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = export(model_type, folder)
        shape = ModelShape.of(json.loads((folder / "export" / "config.json").read_text()))
        with built(folder / "export", "dummy") as pushed, built(folder / "export", "auto") as loaded:
            cached = _cached()
            trace = recall(pushed)
            layout = describe_model(pushed)
            params = _tensors(pushed)
            with torch.no_grad():
                for part in trace.slices if trace else ():
                    part_of(params, part.param, part.local_box).copy_(tensors[part.name][part.box.slices])
            wrong = [
                name
                for name, param in _tensors(loaded).items()
                if not torch.equal(param, params[name]) and not (trace and name in trace.reasons)
            ]
    return {
        "model_type": model_type,
        "push": "general" if layout.full_tensors else "direct",
        "wrong": wrong,
        "reason": "; ".join(sorted(set(trace.reasons.values()))) if trace else "not traced",
        "cached": cached,
        "planned": None if shape is None else shape.num_layers * shape.cached(1),
    }


def _tensors(model: Any) -> dict[str, Any]:
    """Parameters, and buffers: vLLM keeps what checkpoints have in some, too."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def _cached() -> int:
    """Numbers per token in the KV caches of the model that was built last, by vLLM's own layers.

    A layer with a state has one per sequence.
    """
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    layers: Any = config.compilation_config.static_forward_context.values()
    specs = [layer.get_kv_cache_spec(config) for layer in layers if hasattr(layer, "get_kv_cache_spec")]
    per_token = [spec for spec in specs if hasattr(spec, "dtype")]
    return sum(spec.page_size_bytes // spec.block_size // spec.dtype.itemsize for spec in per_token)


@contextmanager
def built(folder: Path, load_format: str) -> Iterator[Any]:
    """vLLM's model of a folder, in this process."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    from paceline.rollout.engines.vllm.start.arguments import latent_attention_on_cpu, llama4_attention

    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format=load_format,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        **latent_attention_on_cpu(folder),
        **llama4_attention(folder, on_cpu=True),
    ).create_engine_config()
    with set_current_vllm_config(config):
        _groups()
        yield get_model_loader(config.load_config).load_model(
            vllm_config=config, model_config=config.model_config
        )


def _groups() -> None:
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    store = f"file://{tempfile.mkdtemp()}/store"
    parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)
    parallel_state._EP = parallel_state._EP or parallel_state._TP


def main(kinds: list[str]) -> int:
    """Prints a line of JSON per architecture; returns how many are wrong."""
    from paceline.rollout.engines.vllm.start import environment

    os.environ.update(environment.in_this_process())
    import torch

    torch.accelerator.empty_cache = lambda: None  # vLLM's worker on a CPU does so too
    from paceline.models.facts import ARCHITECTURES
    from paceline.rollout.engines.vllm import worker  # noqa: F401  it makes vLLM's loading traced

    outcomes = [compare(kind) for kind in kinds or ARCHITECTURES]
    for outcome in outcomes:
        print(json.dumps(outcome))
    return sum(bool(outcome["wrong"]) for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
