"""Paceline's methods on SGLang's scheduler; `link.py` calls them on every rank, between two of its steps."""

from __future__ import annotations

import base64
import functools
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    RpcReqInput,
    RpcReqOutput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_loader.loader import DefaultModelLoader

from paceline.core.errors import WeightSyncError
from paceline.rollout.engines.answers import Reply
from paceline.rollout.engines.rank_calls import RankCalls
from paceline.rollout.engines.rank_receiver import RankReceiver
from paceline.rollout.engines.sglang.loading import load_full, refresh_copies
from paceline.rollout.engines.weights.layout import describe_model

CALL = "call"
"""Name of the only parameter of a call: the method and its arguments, packed."""


class PacelineScheduler(RankCalls, Scheduler):  # type: ignore[misc]
    """SGLang's scheduler of one rank, with Paceline's methods."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Only the stop tokens of a request end its response.
        self.model_config.hf_eos_token_id = None

    def handle_rpc_request(self, recv_req: RpcReqInput) -> RpcReqOutput:
        """Calls a method, and returns the replies of all ranks."""
        method, args = msgpack.unpackb(base64.b64decode(recv_req.parameters[CALL]))
        reply = msgpack.packb(self.paceline_call(method, args))
        replies = _gathered(reply, self.tp_cpu_group, self.ps.tp_size)
        return RpcReqOutput(success=True, message=base64.b64encode(msgpack.packb(replies)).decode())

    def paceline_facts(self) -> Reply:
        """Returns facts about the engine that has started, for the server."""
        return {
            "kv_cache_tokens": int(self.max_total_num_tokens),
            "vocab_size": int(self.model_config.vocab_size),
        }

    def paceline_receive(self, version: int, timeout_s: float) -> Reply:
        """Receives a push and computes digests of the parameters; forgets cached prefixes.

        A step that was launched before may still compute on the GPU.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        receipt = self._paceline_receiver().receive(version, timeout_s)
        refresh_copies(self.tp_worker.model_runner.model)
        return {"receipt": receipt.to_bytes(), "idle": self.flush_cache(empty_cache=False)}

    def paceline_is_idle(self) -> Reply:
        """Returns whether nothing is under way; a step's requests count until the next step."""
        return {"idle": bool(self.is_fully_idle())}

    def paceline_sleep(self) -> Reply:
        """Unmaps weights and KV cache; requests must have ended."""
        if not self.is_fully_idle():
            raise WeightSyncError("the engine cannot sleep while requests are under way")
        before = _free_bytes()
        self.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        return {"freed_bytes": _free_bytes() - before}

    def paceline_wake(self, tags: list[str]) -> Reply:
        """Maps the memory of parts again."""
        self.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
        return {}

    def paceline_pause(self, recompute: bool) -> Reply:
        """Schedules no step until `paceline_resume`."""
        mode = "retract" if recompute else "in_place"
        self.pause_generation(PauseGenerationReqInput(mode=mode))
        return {}

    def paceline_resume(self) -> Reply:
        """Lets SGLang schedule steps again."""
        self.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return {}

    def _paceline_rank(self) -> int:
        return int(self.ps.tp_rank)

    def _paceline_new_receiver(self) -> RankReceiver:
        runner = self.tp_worker.model_runner
        is_on_gpu = runner.device == "cuda"
        device = torch.device("cuda", self.ps.gpu_id) if is_on_gpu else torch.device(runner.device)
        reload = functools.partial(_reload, runner.model, device)
        load = load_full(runner.model, runner.model_config.hf_config.model_type, reload)
        return RankReceiver(runner.model, device, describe_model, load)


def _reload(model: Any, device: torch.device, tensors: Any) -> None:
    """Loads tensors of a checkpoint as SGLang does at its start."""
    DefaultModelLoader.load_weights_and_postprocess(model, tensors, device)


def _gathered(reply: bytes, group: Any, num_ranks: int) -> list[Any]:
    """Returns the replies of all ranks, by rank."""
    if num_ranks == 1:
        return [msgpack.unpackb(reply)]
    own = torch.tensor([len(reply)])
    sizes = [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_gather(sizes, own, group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    padded[: len(reply)] = torch.frombuffer(bytearray(reply), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(parts, padded, group=group)
    both = zip(parts, sizes, strict=True)
    return [msgpack.unpackb(part[: int(size)].numpy().tobytes()) for part, size in both]


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
