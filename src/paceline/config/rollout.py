"""`rollout.*`: sampling and the engines that do it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.validation import ValSamplingConfig


class EpisodeConfig(Section):
    """Limits of an episode: an episode that reaches a limit ends there and is still trained on."""

    max_turns: int = Field(8, gt=0, description="Most answers of the policy.")
    max_turn_tokens: int | None = Field(
        None, gt=0, description="Most tokens of one answer; null: data.max_response_length."
    )
    max_sampled_tokens: int | None = Field(
        None,
        gt=0,
        description="Most tokens of all answers of an episode together; null: data.max_response_length, "
        "which also counts the tokens of tools and the environment.",
    )
    max_tool_calls: int = Field(16, gt=0, description="Most tool calls.")
    observation_tokens: int = Field(
        1024,
        gt=0,
        description="Most tokens of one message from a tool or the environment; the rest is cut off.",
    )
    step_s: float = Field(
        10.0, gt=0, description="Longest time for one tool call; a longer one returns an error to the policy."
    )
    tool_s: float = Field(60.0, gt=0, description="Longest time for all tool calls of an episode together.")
    retries: int = Field(
        2,
        ge=0,
        description="How often an episode is tried again after its environment was lost; then its prompt "
        "group goes back to the mailbox.",
    )
    max_open: int | None = Field(
        None,
        gt=0,
        description="Most open episodes of a server, including those that wait for a tool; null: four times "
        "rollout.max_num_seqs.",
    )
    max_context_tokens: int | None = Field(
        None,
        gt=0,
        description="Most tokens of all open episodes of a server together; beyond it, a new episode begins "
        "only when another ends. null: as many as the engine's KV cache holds.",
    )
    tool_processes: int = Field(2, gt=0, description="Processes per rollout server that call rollout.tools.")
    tool_memory_mib: int = Field(
        2048, gt=0, description="Most memory of a process that calls rollout.tools, in MiB."
    )
    call_format: Literal["auto", "tagged", "json", "xml", "glm"] = Field(
        "auto",
        description="How the policy writes tool calls. tagged: JSON in <tool_call> tags; xml: in these tags, "
        "a tag for the function and one for each parameter (Qwen 3 Coder, Qwen 3.5); glm: in these tags, the "
        "name, and tags for keys and values (GLM-4.5); json: the answer is JSON and nothing else; auto: by "
        "the chat template.",
    )
    show_tools: bool = Field(
        True, description="The chat template describes the tools to the model; false: the prompts do."
    )


class EnvironmentConfig(Section):
    """An environment that serves paceline.rpc.v1.EnvironmentService, or attaches to rollout servers."""

    address: str | None = Field(
        None, description="host:port of an environment that serves; use either address or attached."
    )
    attached: str | None = Field(
        None,
        description="Name under which environments attach to rollout servers (at service.rollout_port); use "
        "either address or attached.",
    )
    call_s: float = Field(
        60.0, gt=0, description="Longest time for one call of the environment: open, step or grade."
    )
    token_file: str | None = Field(
        None,
        description="File, on the hosts of the rollout servers, with the token that the environment "
        "requires. null: the run's own token is sent.",
    )
    drives: bool = Field(
        False,
        description="The environment is an agent that leads the conversation: it asks rollout servers for "
        "the policy's answers, over an OpenAI-compatible address (docs/environments.md).",
    )
    port: int = Field(
        0,
        ge=0,
        lt=65536,
        description="With drives or attached: where rollout servers answer agents; 0: any free port.",
    )

    @property
    def is_driven(self) -> bool:
        """Whether an agent requests the policy's answers over HTTP."""
        return self.drives or self.attached is not None

    @model_validator(mode="after")
    def _reached_in_one_way(self) -> EnvironmentConfig:
        if (self.address is None) == (self.attached is None):
            raise ValueError(
                f"address={self.address}, attached={self.attached}: give an address to call, or a name "
                "under which environments attach"
            )
        return self


EngineKwargs = dict[str, bool | int | float | str | dict[str, object]]


class OtherEngineConfig(Section):
    """Rollout servers with another engine; everything else that they need is in `rollout`."""

    replicas: int = Field(
        1,
        ge=0,
        description="How many of rollout.replicas run it. 0: only servers that you start yourself, with "
        "--engine.",
    )
    python: str | None = Field(None, description="rollout.python for this engine.")
    engine_kwargs: EngineKwargs = Field({}, description="rollout.engine_kwargs for this engine.")


class RolloutConfig(Section):
    """Rollout servers: one engine each."""

    name: str = Field("vllm", description="The engine: a name in `paceline.engines.registry`.")
    python: str | None = Field(
        None,
        description="The Python interpreter of the rollout servers that `paceline train` starts, in an "
        "environment of their own with the engine and this version of Paceline; null: the command's own. An "
        "engine whose packages do not go with the learner's needs one.",
    )
    replicas: int = Field(
        1, gt=0, description="Rollout servers that `paceline train` starts; others may join."
    )
    other_engines: dict[str, OtherEngineConfig] = Field(
        {},
        description="Servers with other engines than rollout.name, by the engine's name: {sglang: {replicas: "
        "1, python: sglang/bin/python}}. Servers with rollout.name come first. Which engine answers a prompt "
        "depends on which server is free.",
    )
    validation_servers: int = Field(
        0,
        ge=0,
        description="How many of the replicas only answer held-out prompts, while the others and the learner "
        "go on training; docs/evaluate.md. 0: all servers validate between two steps.",
    )
    tensor_model_parallel_size: int = Field(1, gt=0, description="GPUs (or CPU ranks) per engine.")
    n: int = Field(8, gt=0, description="Samples per training prompt.")
    temperature: float = Field(
        1.0, gt=0, description="Temperature of training samples; the learner divides its logits by it."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Must be 1: other values change the sampled distribution and are refused.",
    )
    top_k: int = Field(
        0, ge=0, description="Must be 0: other values change the sampled distribution and are refused."
    )
    val: ValSamplingConfig = ValSamplingConfig()
    gpu_memory_utilization: float = Field(
        0.85, gt=0, lt=1, description="Share of a GPU's memory that an engine may take."
    )
    sleep: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether engines free the GPU memory of weights and KV cache while the learner trains. "
        "auto: on shared GPUs, `paceline train` chooses the setting with the shorter estimated step.",
    )
    kv_cache_gib: int = Field(
        1,
        gt=0,
        description="CPU: largest KV cache of an engine in GiB; it is smaller if max_num_seqs samples need "
        "less.",
    )
    max_num_seqs: int = Field(256, gt=0, description="Most sequences that an engine decodes at once.")
    sampler: Literal["auto", "engine", "batched"] = Field(
        "auto",
        description="What draws tokens. engine: vLLM draws row by row, since each request has a seed, and "
        "sends every token's log-probability with the token. batched: one draw for the whole batch, by seed "
        "and position; a sample's log-probabilities are fetched when it ends. This is faster, but the same "
        "seed gives other samples. auto: batched if an engine has one GPU; engine if it has several or runs "
        "on a CPU.",
    )
    in_flight: Literal["wait", "keep", "recompute"] = Field(
        "wait",
        description="With barrier.mode: bounded, when a server takes new weights. wait: when every sample "
        "that was begun is complete. keep, recompute: at once; samples under way stop between two tokens "
        "and go on with the new weights. The keys and values of their tokens are kept, or computed again. "
        "Which tokens are of which version then depends on speed.",
    )
    max_groups_in_flight: int | None = Field(
        None,
        gt=0,
        description="Most prompt groups that a server takes at once; null: enough to fill max_num_seqs.",
    )
    enforce_eager: bool = Field(False, description="No CUDA graphs, no compilation (always so on a CPU).")
    threads: int | None = Field(
        None, gt=0, description="CPU: threads per engine rank; null: all cores, divided among the replicas."
    )
    devices: tuple[int, ...] | None = Field(
        None,
        description="GPU indices, divided among the replicas in order; null: all that the learner leaves.",
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Longest time for a prompt group in the engine; null: 0.2 s per token of "
        "data.max_response_length, at least 600 s.",
    )
    tools: tuple[str, ...] = Field(
        (),
        description="Python functions that the policy may call between its turns, as module:function or "
        "path/to/file.py:function; docs/environments.md.",
    )
    environment: EnvironmentConfig | None = Field(
        None, description="A service that answers the policy's turns and may grade them; replaces tools."
    )
    episode: EpisodeConfig = EpisodeConfig()
    max_deliveries: int = Field(
        6,
        gt=0,
        description="Most attempts, over all servers, to sample a prompt group before it is dropped and the "
        "reason recorded; an attempt whose server died counts.",
    )
    save_progress_s: float = Field(
        5.0,
        ge=0,
        description="Interval at which a server saves the tokens of unfinished samples, once their prompt "
        "group has been under way for that long; if the server dies, another one continues from there. 0: "
        "only when the server leaves. Needs draws by seed and position (rollout.sampler: batched).",
    )
    engine_kwargs: EngineKwargs = Field(
        {},
        description="Further arguments of the engine (vLLM's AsyncEngineArgs, SGLang's ServerArgs); what "
        "breaks exactness is refused.",
    )

    @property
    def training_servers(self) -> int:
        """Rollout servers that answer training prompts."""
        return self.replicas - self.validation_servers

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The engines of the run's servers, `name` first."""
        return (self.name, *self.other_engines)

    def engine_at(self, index: int) -> str:
        """Returns the engine of a server that the launcher starts, by its number.

        Numbers from `replicas` on are servers that join later; for them it is `name`.
        """
        others = [name for name, other in self.other_engines.items() for _ in range(other.replicas)]
        first = self.replicas - len(others)
        return others[index - first] if first <= index < self.replicas else self.name

    def with_engine(self, name: str) -> RolloutConfig:
        """Returns the settings of the servers with one of `engine_names`, as if there were no others."""
        own = self.other_engines.get(name)
        chosen = {} if own is None else {"python": own.python, "engine_kwargs": own.engine_kwargs}
        return self.model_copy(update={"name": name, "other_engines": {}, **chosen})

    def with_kwargs(self, name: str, kwargs: EngineKwargs) -> RolloutConfig:
        """Returns the settings with other `engine_kwargs` for one of `engine_names`."""
        changed: dict[str, object] = {"engine_kwargs": kwargs}
        if name != self.name:
            other = self.other_engines[name].model_copy(update=changed)
            changed = {"other_engines": {**self.other_engines, name: other}}
        return self.model_copy(update=changed)

    def check_servers(self) -> None:
        """Raises ValueError if the other engines or validation leave no server where one is needed."""
        others, count = sum(other.replicas for other in self.other_engines.values()), self.replicas
        if others >= count:
            raise ValueError(
                f"other_engines take {others} of replicas={count} and leave no server with {self.name}: set "
                f"replicas, which counts all servers, above {others}, or change rollout.name"
            )
        if self.validation_servers >= count:
            raise ValueError(
                f"validation_servers={self.validation_servers} of replicas={count} leave no server for "
                f"training prompts: set replicas, which counts all servers, above {self.validation_servers}"
            )

    @model_validator(mode="after")
    def _servers_suffice(self) -> RolloutConfig:
        if self.name in self.other_engines:
            raise ValueError(
                f"other_engines has {self.name}, which is rollout.name: remove it there; the "
                "servers without another engine run it anyway"
            )
        self.check_servers()
        return self

    @model_validator(mode="after")
    def _answered_once(self) -> RolloutConfig:
        if self.tools and self.environment is not None:
            raise ValueError("tools and environment are both set: an environment brings its own tools")
        return self

    @model_validator(mode="after")
    def _unbiased(self) -> RolloutConfig:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}: truncated sampling draws from another distribution "
                "than the one that the loss divides by; write top_p: 1.0 and top_k: 0"
            )
        return self
