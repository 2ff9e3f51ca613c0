"""What the installed SGLang must still have, read from its source, as importing it takes long."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang is not installed: pip install 'paceline[sglang]'",
)

FIELDS = {
    ("managers/io_struct.py", "TokenizedGenerateReqInput"): (
        "rid input_text input_ids input_embeds mm_inputs token_type_ids sampling_params return_logprob "
        "logprob_start_len top_logprobs_num token_ids_logprob stream extra_key"
    ),
    (
        "managers/io_struct.py",
        "BatchTokenIDOutput",
    ): "rids finished_reasons output_ids output_token_logprobs_val",
    ("managers/io_struct.py", "AbortReq"): "rid finished_reason",
    ("managers/io_struct.py", "RpcReqInput"): "method parameters",
    ("managers/io_struct.py", "RpcReqOutput"): "success message",
    ("managers/io_struct.py", "PauseGenerationReqInput"): "mode",
    ("managers/io_struct.py", "ContinueGenerationReqInput"): "torch_empty_cache",
    ("managers/io_struct.py", "ResumeMemoryOccupationReqInput"): "tags",
    ("server_args.py", "PortArgs"): (
        "tokenizer_ipc_name scheduler_input_ipc_name detokenizer_ipc_name nccl_port rpc_ipc_name "
        "metrics_ipc_name tokenizer_worker_ipc_name decoupled_spec_ipc_config instance_id"
    ),
}
PARAMETERS = {
    ("managers/scheduler.py", "Scheduler.__init__"): (
        "self server_args port_args gpu_id tp_rank moe_ep_rank pp_rank attn_cp_rank moe_dp_rank dp_rank"
    ),
    ("managers/scheduler.py", "configure_scheduler_process"): (
        "server_args gpu_id tp_rank attn_cp_rank moe_dp_rank moe_ep_rank pp_rank dp_rank"
    ),
    ("managers/scheduler.py", "Scheduler.handle_rpc_request"): "self recv_req",
    ("layers/sampler.py", "Sampler.forward"): (
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions"
    ),
    ("layers/sampler.py", "register_sampler_backend"): "backend factory",
    ("sampling/sampling_batch_info.py", "SamplingBatchInfo.from_schedule_batch"): "cls batch vocab_size",
    ("model_loader/loader.py", "DummyModelLoader.load_model"): "self model_config device_config",
    (
        "model_loader/loader.py",
        "DefaultModelLoader.load_weights_and_postprocess",
    ): "model weights target_device",
    ("model_loader/loader.py", "_post_load_weights"): "model",
    ("mem_cache/kv_cache_configurator.py", "KVCacheConfigurator._profile_available_bytes"): (
        "self pre_model_load_memory"
    ),
}


@cache
def module(name: str) -> ast.Module:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    (root,) = list(spec.submodule_search_locations or ())
    return ast.parse((Path(root) / "srt" / name).read_text(encoding="utf-8"))


def definition(name: str, path: str) -> ast.AST:
    node: ast.AST = module(name)
    for part in path.split("."):
        (node,) = [
            child
            for child in ast.walk(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == part
        ][:1] or [pytest.fail(f"{name} has no {part}")]
    return node


@pytest.mark.parametrize(("name", "path"), FIELDS)
def test_messages_have_the_fields_that_are_set_and_read(name: str, path: str) -> None:
    node = definition(name, path)
    fields = {
        each.target.id
        for each in ast.walk(node)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    if path == "BatchTokenIDOutput" or "rid" in FIELDS[name, path].split():
        fields |= {"rid", "rids"}  # of a base class
    assert set(FIELDS[name, path].split()) - fields == set()


@pytest.mark.parametrize(("name", "path"), PARAMETERS)
def test_functions_take_what_they_are_called_with(name: str, path: str) -> None:
    node = definition(name, path)
    assert isinstance(node, ast.FunctionDef)
    arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    expected = PARAMETERS[name, path].split()
    assert arguments[: len(expected)] == expected
    required = len(node.args.args) - len(node.args.defaults) + node.args.kw_defaults.count(None)
    assert required <= len(expected)
