"""Methods mixed into vLLM's workers (`worker_extension_cls`); `engine.py` calls them on every TP rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from paceline.rollout.engines.answers import Reply
from paceline.rollout.engines.rank_calls import RankCalls
from paceline.rollout.engines.rank_receiver import RankReceiver
from paceline.rollout.engines.vllm.images.without_torchvision import register
from paceline.rollout.engines.vllm.reload import Reloader
from paceline.rollout.engines.vllm.sampling.batched_sampler import BatchedSampler, replace_sampler
from paceline.rollout.engines.weights.checkpoint import learner_shapes
from paceline.rollout.engines.weights.layout import describe_model
from paceline.rollout.engines.weights.trace import traced
from paceline.weights.corrections import use_factor_parameters

if TYPE_CHECKING:
    from torch import nn

_BUSY_LOOP_S = 0.002
_RECHECK_MS = 50


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _keep_plain_cpu_linears() -> None:
    """Stops vLLM from repacking linear weights on the CPU.

    The weight of a repacked layer is an empty tensor: a push into it would be lost. vLLM has no switch for
    this, so the function that repacks is replaced before the model is built; only on the CPU.
    """
    if not _is_on_cpu():
        return
    import vllm.model_executor.layers.utils as utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def _wait_without_spinning() -> None:
    """Lets an idle worker sleep after 2 ms instead of a second; for the CPU only.

    vLLM's workers poll a queue in shared memory for a second after each message, yielding the core in a loop.
    During that second the learner's turn begins on the same cores.

    A notification wakes a sleeping worker, but it can get lost. vLLM then polls the queue only after 5 s,
    which stalled an engine about once in 400 prompt groups.
    """
    if not _is_on_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast

    spin = shm_broadcast.SpinCondition
    spin.__init__ = functools.partialmethod(spin.__init__, busy_loop_s=_BUSY_LOOP_S)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _RECHECK_MS


def _trace_loading() -> None:
    """Traces how every model that is built without weights would load them.

    This is possible only between creating the parameters and converting them to kernel format. vLLM has no
    hook there, so the converting function is wrapped. A model that is built differently has no trace and
    takes the general path.
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    @functools.wraps(process)
    def process_traced(model: nn.Module, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if get_current_vllm_config().load_config.load_format != "dummy":
            # Tracing writes constants and may create parameters again.
            return process(model, model_config, *args, **kwargs)
        config = model_config.hf_config
        use_factor_parameters(model)
        with traced(model, learner_shapes(config), model_type=config.model_type):
            return process(model, model_config, *args, **kwargs)

    base_loader.process_weights_after_loading = process_traced


def _forget_cpu_moe_kernels(model: nn.Module) -> None:
    """Makes vLLM set up its Mixture-of-Experts kernels again on the next load; for the CPU only.

    vLLM 0.32 repacks expert weights for its CPU kernel only when it first builds that kernel. A later load
    leaves them plain, and the kernel misreads them silently. CUDA kernels use plain weights.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _keep_sinks_in_place() -> None:
    """Keeps attention sinks where they are while vLLM reloads layer by layer.

    gpt-oss's loader copies them into their parameter without a weight loader. vLLM (0.32) moves parameters
    aside for a reload, except those that it knows to be loaded in this way, so the copy would be lost
    silently.
    """
    from vllm.model_executor.model_loader.reload import meta

    for name in ("SKIP_LOAD_TENSORS", "SKIP_TENSORS"):
        names: set[str] = getattr(meta, name, set())
        names.add("sinks")


class PacelineWorkerExtension(RankCalls):
    """`RankCalls` in vLLM, and the methods of its batched sampler."""

    # Attributes of vLLM's worker:
    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any
    get_model: Callable[[], nn.Module]

    def paceline_receive(self, version: int, timeout_s: float, is_paused: bool) -> Reply:
        """Receives a push and computes digests of the parameters.

        Args:
            is_paused: whether requests are under way that go on with these weights.
        """
        receipt = self._paceline_receiver().receive(version, timeout_s)
        sampler = self.model_runner.sampler
        if isinstance(sampler, BatchedSampler):
            sampler.places.begin_version(version, mid_answer=is_paused)
        return {"receipt": receipt.to_bytes()}

    def paceline_batch_draws(self) -> Reply:
        """Switches to drawing a batch's tokens at once; see `batched_sampler`."""
        replace_sampler(self.model_runner)
        return {}

    def paceline_take_log_probs(
        self, ids: list[str], starts: list[int], counts: list[int], aborted: list[str]
    ) -> Reply:
        """Returns the log-probabilities of ended samples, from TP rank 0; all ranks forget them."""
        places = self.model_runner.sampler.places
        versions = places.versions(ids, starts, counts)
        values = places.take(ids, starts, counts)
        places.forget(aborted)
        return {"log_probs": values.numpy().tobytes(), "versions": versions} if self.rank == 0 else {}

    def paceline_read_log_probs(self, ids: list[str], starts: list[int], counts: list[int]) -> Reply:
        """Returns the log-probabilities and versions of requests under way, from TP rank 0.

        Requests that have ended and were taken meanwhile are left out; `known` says which are not.
        """
        places = self.model_runner.sampler.places
        known = [places.knows(request_id) for request_id in ids]
        wanted = [
            [x for x, is_known in zip(part, known, strict=True) if is_known] for part in (ids, starts, counts)
        ]
        versions, values = places.versions(*wanted), places.read(*wanted)
        if self.rank != 0:
            return {}
        return {"log_probs": values.numpy().tobytes(), "versions": versions, "known": known}

    def paceline_free_bytes(self) -> Reply:
        """Returns the unused memory of this rank's GPU; 0 on a CPU."""
        device = torch.device(self.device)
        return {"free_bytes": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0}

    def _paceline_rank(self) -> int:
        return self.rank

    def _paceline_new_receiver(self) -> RankReceiver:
        model, config = self.get_model(), self.vllm_config.model_config.hf_config
        reloader = Reloader(
            model, self._paceline_reload, self._paceline_finish_reload, model_type=config.model_type
        )
        return RankReceiver(model, torch.device(self.device), describe_model, reloader.load)

    def _paceline_reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        if _is_on_cpu():
            _forget_cpu_moe_kernels(self.get_model())
        with self._paceline_context():
            self.model_runner.reload_weights(weights_iterator=tensors, is_checkpoint_format=True)

    def _paceline_finish_reload(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        with self._paceline_context():
            finalize_layerwise_reload(self.get_model(), self.vllm_config.model_config)

    @contextlib.contextmanager
    def _paceline_context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            yield


_keep_plain_cpu_linears()
_trace_loading()
_keep_sinks_in_place()
_wait_without_spinning()
register()
