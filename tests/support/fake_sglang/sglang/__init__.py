"""A stand-in for what the engine uses of SGLang 0.5.16: its messages, sockets, states and hooks, on a CPU.

Named `sglang`, it is found if the folder above comes first on the path. Its model is transformers' own, and
it recomputes every sequence in every step. It keeps what of SGLang's scheduler has misled the engine before:

- A request that has ended counts until the next step, so that the scheduler is not idle right after it.
- The length of a response is looked at before its last token.
- Seeds count only if the sampling backend uses them, and a CPU has another backend unless it is overridden.
- The model's own end of a response ends it, too.
- Prefixes are cached by their key until the cache is flushed, which only an idle scheduler does.
- A layer computes with a copy of its weight from its first step: here the head, in SGLang GLM's routers.
- A paused scheduler answers calls and begins no step; memory that was released holds something else.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import torch
import zmq

_STEP_S = 0.002
_OUTPUT_EVERY = 8
_ALL = 1 << 30


class SamplingParams(msgspec.Struct, kw_only=True):
    max_new_tokens: int = 128
    stop_token_ids: set[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = _ALL
    sampling_seed: int | None = None
    is_normalized: bool = False

    def __post_init__(self) -> None:
        if not self.is_normalized:
            if self.temperature == 0:
                self.temperature, self.top_k = 1.0, 1
            self.top_k = _ALL if self.top_k == -1 else self.top_k

    def normalize(self, tokenizer: None) -> None:
        self.is_normalized = True


class Message(msgspec.Struct, kw_only=True, tag=True):
    pass


class TokenizedGenerateReqInput(Message):
    rid: str
    input_text: None
    input_ids: list[int]
    input_embeds: None
    mm_inputs: None
    token_type_ids: None
    sampling_params: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: None
    stream: bool
    extra_key: str | None = None


class BatchTokenIDOutput(Message):
    rids: list[str]
    finished_reasons: list[dict[str, Any] | None]
    output_ids: list[list[int]]
    output_token_logprobs_val: list[list[float]]


class AbortReq(Message):
    rid: str
    finished_reason: dict[str, Any] | None = None


class RpcReqInput(Message):
    method: str
    parameters: dict[str, Any]


class RpcReqOutput(Message):
    success: bool
    message: str


class PauseGenerationReqInput(Message):
    mode: str


class ContinueGenerationReqInput(Message):
    torch_empty_cache: bool = True


class ReleaseMemoryOccupationReqInput(Message):
    tags: list[str] | None = None


class ResumeMemoryOccupationReqInput(Message):
    tags: list[str] | None = None


_SENT = TokenizedGenerateReqInput | BatchTokenIDOutput | AbortReq | RpcReqInput | RpcReqOutput
_encoder, _decoder = msgspec.msgpack.Encoder(enc_hook=list), msgspec.msgpack.Decoder(_SENT)


@dataclass
class ServerArgs:
    """Of SGLang's arguments those that a CPU needs; another name is an error, as it is there."""

    model_path: str
    skip_tokenizer_init: bool
    load_format: str
    dtype: str
    sampling_backend: str
    grammar_backend: str
    sampling_defaults: str
    tp_size: int
    context_length: int
    max_running_requests: int
    random_seed: int
    sleep_on_idle: bool
    log_level: str
    watchdog_timeout: float
    device: str
    attention_backend: str
    disable_cuda_graph: bool
    disable_overlap_schedule: bool
    max_total_tokens: int
    ep_size: int = 1
    json_model_override_args: str = "{}"

    def check_server_args(self) -> None:
        self.sampling_backend = "pytorch"

    def override(self, *, source: str, **changes: Any) -> None:
        vars(self).update(changes)


@dataclass(kw_only=True)
class PortArgs:
    tokenizer_ipc_name: str
    scheduler_input_ipc_name: str
    detokenizer_ipc_name: str
    nccl_port: int
    rpc_ipc_name: str
    metrics_ipc_name: str
    tokenizer_worker_ipc_name: None
    decoupled_spec_ipc_config: None
    instance_id: str


class Sampler:
    """Draws by the backend that was registered; SGLang's own would ignore the seeds."""

    def _preprocess_logits(self, logits: torch.Tensor, info: Any) -> torch.Tensor:
        return logits

    def _sync_token_ids_across_tp(self, tokens: torch.Tensor, info: Any) -> None:
        assert tokens.dtype == torch.int32


_backends = {"pytorch": Sampler}


class SamplingBatchInfo(SimpleNamespace):
    @classmethod
    def from_schedule_batch(cls, batch: Any, vocab_size: int) -> SamplingBatchInfo:
        params = [request.sampling_params for request in batch.reqs]
        return cls(
            temperatures=torch.tensor([each.temperature for each in params]).unsqueeze(-1),
            top_ps=torch.tensor([each.top_p for each in params]),
            top_ks=torch.tensor([each.top_k for each in params]),
            need_top_p_sampling=any(each.top_p != 1 for each in params),
            need_top_k_sampling=any(each.top_k != _ALL for each in params),
            sampling_seed=None,
        )


class DefaultModelLoader:
    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, target_device: torch.device) -> None:
        model.load_weights(weights)


class DummyModelLoader:
    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(model_config.hf_config, dtype=torch.float32).eval()
        model.load_weights = lambda weights: _load(model, weights)
        for parameter in model.parameters():
            parameter.requires_grad_(False).fill_(float("nan"))
        loader._post_load_weights(model)
        return model


def _warm_up(model: Any) -> None:
    head = model.get_output_embeddings()
    head.register_buffer("_weight_fp32", head.weight.detach().clone(), persistent=False)
    head.forward = lambda states: torch.nn.functional.linear(states, head._weight_fp32)


def _load(model: Any, weights: Any) -> None:
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor)


class KVCacheConfigurator:
    device = "cpu"

    def _profile_available_bytes(self, pre_model_load_memory: int) -> int:
        return pre_model_load_memory


@dataclass
class Request:
    """A request under way: what SGLang calls a Req."""

    asked: TokenizedGenerateReqInput
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_sent: int = 0
    to_finish: dict[str, Any] | None = None
    finished: dict[str, Any] | None = None

    @property
    def sampling_params(self) -> SamplingParams:
        return self.asked.sampling_params

    @property
    def ids(self) -> list[int]:
        return [*self.asked.input_ids, *self.output_ids]

    def update_finish_state(self, eos: set[int]) -> None:
        if self.to_finish:
            self.finished = self.to_finish
        elif len(self.output_ids) >= self.sampling_params.max_new_tokens:
            self.finished = {"type": "length", "length": len(self.output_ids)}
        elif self.output_ids[-1] in (self.sampling_params.stop_token_ids or set()) | eos:
            self.finished = {"type": "stop", "matched": self.output_ids[-1]}


class Scheduler:
    def __init__(
        self, server_args: ServerArgs, port_args: PortArgs, gpu_id: int, tp_rank: int, *ranks: Any
    ) -> None:
        from transformers import AutoConfig

        torch.set_num_threads(1)
        assert server_args.tp_size == 1
        assert len(ranks) == 5
        config = AutoConfig.from_pretrained(server_args.model_path)
        # Nearly every model has an end of its own; that of the tests' is made up.
        self.model_config = SimpleNamespace(
            hf_config=config, hf_eos_token_id={0}, vocab_size=config.vocab_size
        )
        assert server_args.load_format == "dummy"
        model = DummyModelLoader().load_model(model_config=self.model_config, device_config=None)
        _warm_up(model)
        self.tp_worker = SimpleNamespace(
            model_runner=SimpleNamespace(model=model, device="cpu", model_config=self.model_config)
        )
        self.ps = SimpleNamespace(tp_rank=tp_rank, tp_size=1, gpu_id=gpu_id)
        self.tp_cpu_group = None
        self.max_total_num_tokens = server_args.max_total_tokens
        self.max_req_len = server_args.context_length - 5
        self.weight_updater = self
        self._most, self._sampler = (
            server_args.max_running_requests,
            _backends[server_args.sampling_backend](),
        )
        self._waiting, self._running, self._last = list[Request](), list[Request](), list[Request]()
        self._is_paused = False
        self._prefixes: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = {}
        context = zmq.Context()
        self._requests, self._calls = context.socket(zmq.PULL), context.socket(zmq.DEALER)
        self._tokens = context.socket(zmq.PUSH)
        self._requests.connect(port_args.scheduler_input_ipc_name)
        self._calls.connect(port_args.rpc_ipc_name)
        self._tokens.connect(port_args.detokenizer_ipc_name)

    def run_event_loop(self) -> None:
        poller = zmq.Poller()
        for socket in (self._requests, self._calls):
            poller.register(socket, zmq.POLLIN)
        while True:
            is_at_work = not self._is_paused and not self.is_fully_idle()
            if is_at_work:
                time.sleep(_STEP_S)
            for socket, _ in poller.poll(0 if is_at_work else 1000):
                self._dispatch(socket, _decoder.decode(socket.recv()))
            if not self._is_paused:
                self._step()

    def _dispatch(self, socket: Any, message: Any) -> None:
        if isinstance(message, RpcReqInput):
            socket.send(_encoder.encode(self.handle_rpc_request(message)))
        elif isinstance(message, TokenizedGenerateReqInput):
            self._waiting.append(Request(message))
        else:
            for request in [each for each in self._waiting if each.asked.rid == message.rid]:
                self._waiting.remove(request)
                self._tokens.send(_encoder.encode(AbortReq(rid=message.rid)))
            for request in [each for each in self._running if each.asked.rid == message.rid]:
                request.to_finish = {"type": "abort", "message": "Aborted"}

    def _step(self) -> None:
        self._running = [request for request in self._running if not request.finished]
        num_new = self._most - len(self._running)
        self._running += self._waiting[:num_new]
        del self._waiting[:num_new]
        self._last = self._running
        if not self._running:
            return
        batch = SimpleNamespace(reqs=self._running, device=torch.device("cpu"))
        info = SamplingBatchInfo.from_schedule_batch(batch, self.model_config.vocab_size)
        output = SimpleNamespace(next_token_logits=self._logits(), next_token_logprobs=None)
        positions = torch.tensor([len(request.ids) - 1 for request in self._running])
        rows = [[0]] * len(self._running)
        tokens = self._sampler.forward(output, info, True, rows, rows, positions)
        for request, token, value in zip(
            self._running, tokens.tolist(), output.next_token_logprobs.tolist(), strict=True
        ):
            request.output_ids.append(token)
            request.log_probs.append(value)
            request.update_finish_state(self.model_config.hf_eos_token_id or set())
        self._send()

    def _logits(self) -> torch.Tensor:
        prompts = [(request.asked.extra_key, tuple(request.ids)) for request in self._running]
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._prefixes]
        if missing:
            width = max(len(ids) for _, ids in missing)
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids in missing])
            tokens = torch.tensor([[0] * (width - len(ids)) + list(ids) for _, ids in missing])
            with torch.no_grad():
                rows = self.tp_worker.model_runner.model(
                    input_ids=tokens,
                    attention_mask=mask,
                    position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                    logits_to_keep=1,
                ).logits[:, -1]
            self._prefixes |= dict(zip(missing, rows, strict=True))
        return torch.stack([self._prefixes[prompt] for prompt in prompts])

    def _send(self) -> None:
        ready = [r for r in self._running if r.finished or len(r.output_ids) - r.num_sent >= _OUTPUT_EVERY]
        if ready:
            output = BatchTokenIDOutput(
                rids=[request.asked.rid for request in ready],
                finished_reasons=[request.finished for request in ready],
                output_ids=[request.output_ids[request.num_sent :] for request in ready],
                output_token_logprobs_val=[request.log_probs[request.num_sent :] for request in ready],
            )
            self._tokens.send(_encoder.encode(output))
        for request in ready:
            request.num_sent = len(request.output_ids)

    def handle_rpc_request(self, recv_req: RpcReqInput) -> RpcReqOutput:
        raise NotImplementedError

    def is_fully_idle(self) -> bool:
        return not (self._waiting or self._running or self._last)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        if self.is_fully_idle():
            self._prefixes.clear()
        return self.is_fully_idle()

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        self._is_paused = True
        if recv_req.mode == "retract":
            self._waiting = [*(each for each in self._running if not each.finished), *self._waiting]
            self._running, self._last = [], []

    def continue_generation(self, recv_req: ContinueGenerationReqInput) -> None:
        self._is_paused = False

    def release_memory_occupation(self, recv_req: ReleaseMemoryOccupationReqInput) -> None:
        assert self.is_fully_idle()
        self.flush_cache()
        for parameter in self.tp_worker.model_runner.model.parameters():
            parameter.data.fill_(float("nan"))

    def resume_memory_occupation(self, recv_req: ResumeMemoryOccupationReqInput) -> None:
        assert set(recv_req.tags or ()) <= {"weights", "kv_cache", "cuda_graph"}


def _module(path: str, **names: Any) -> ModuleType:
    """Makes a module below `sglang.srt` importable, and the packages on the way to it."""
    parent = sys.modules[__name__]
    for part in f"srt.{path}".split("."):
        name = f"{parent.__name__}.{part}"
        module = sys.modules.setdefault(name, ModuleType(name))
        setattr(parent, part, module)
        parent = module
    vars(parent).update(names)
    return parent


def _nothing(*_: Any) -> None:
    """Stands for SGLang's preparations that change nothing here."""


_module("plugins", load_plugins=_nothing)
_module("layers.sampler", Sampler=Sampler, register_sampler_backend=_backends.__setitem__)
_module("sampling.sampling_batch_info", SamplingBatchInfo=SamplingBatchInfo)
_module("sampling.sampling_params", SamplingParams=SamplingParams)
_module("distributed.parallel_state", get_world_group=_nothing)
_module("mem_cache.kv_cache_configurator", KVCacheConfigurator=KVCacheConfigurator)
_module("server_args", ServerArgs=ServerArgs, PortArgs=PortArgs)
_module("managers.scheduler", Scheduler=Scheduler, configure_scheduler_process=_nothing)
_module(
    "managers.io_struct",
    msgpack_encode=_encoder.encode,
    msgpack_decode=_decoder.decode,
    **{kind.__name__: kind for kind in Message.__subclasses__()},
)
loader = _module(
    "model_loader.loader",
    DefaultModelLoader=DefaultModelLoader,
    DummyModelLoader=DummyModelLoader,
    _post_load_weights=_nothing,
)
