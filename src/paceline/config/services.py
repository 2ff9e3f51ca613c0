"""Sections of the run and its processes: `trainer`, `learner`, `barrier`, `broker`, `weights`, `service`,
`telemetry`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, field_validator, model_validator

from paceline.config.base import Section, own_path
from paceline.core.errors import ConfigError
from paceline.core.ports import read_ports

Port = Annotated[int, Field(ge=0, le=65535)]


class ProfileConfig(Section):
    """Which training steps torch's profiler records, on which learner ranks."""

    steps: tuple[int, ...] = Field(
        (),
        description="Training steps to record, counted from 1; the first steps are slower: they compile "
        "and fill caches. Each step's profile goes to profile/ in the run directory; `paceline profile` "
        "joins it with the services' spans.",
    )
    ranks: tuple[int, ...] = Field((0,), description="Learner ranks that record.")


class TrainerConfig(Section):
    """Sets the length of the run, its folder and its checkpoints."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="Name of the run: its folder is runs/NAME, and its id begins with it.",
    )
    run_dir: str | None = Field(
        None,
        description="Folder to which the run writes all of its files; null: runs/NAME, with trainer.name.",
    )
    total_steps: int | None = Field(
        None,
        ge=0,
        description="Training steps; 0: only validate the starting model. null: as many as total_epochs "
        "gives.",
    )
    total_epochs: float | None = Field(
        None,
        gt=0,
        description="Passes over the training prompts of all sets together; an epoch has as many full steps "
        "of data.train_batch_size as the prompts suffice for. If total_steps is set, too, the run ends at "
        "whichever comes first. null: total_steps sets the length.",
    )
    seed: int = Field(
        0, ge=0, description="Governs prompt order, sampling, model and value-head initialisation."
    )
    test_freq: int | None = Field(
        None,
        ge=0,
        description="Steps between validations; one more follows the last step. null: only after the last "
        "step; 0: never after a step.",
    )
    val_before_train: bool = Field(True, description="Validate the starting model, before step 1.")
    save_freq: int = Field(
        50,
        ge=0,
        description="Steps between checkpoints; a restarted learner goes back to the newest. A checkpoint is "
        "always written at the end, after Ctrl-C and after a rollback; 0: only then.",
    )
    checkpoint_url: str | None = Field(
        None,
        description="Path or fsspec URL (s3://BUCKET/FOLDER) that the controller and all learner ranks "
        "reach; checkpoints go to CHECKPOINT_URL/RUN_ID. null: to checkpoints/ in the run directory.",
    )
    keep_checkpoints: int = Field(2, gt=0, description="How many of the newest checkpoints are kept.")
    dataflow: Annotated[str, AfterValidator(own_path)] | None = Field(
        None,
        description="Function that carries out each training step with the verbs draw, sample, train and "
        "publish, as path/to/file.py:function or module:function (docs/python.md). null: each step samples "
        "its prompts and trains on all samples.",
    )
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto: go on with the interrupted run in run_dir, if there is one. never: move an "
        "earlier run aside (run_dir.1, run_dir.2, ...) and begin again.",
    )
    save_trajectories: bool = Field(
        True, description="Write each step's trajectories to trajectories/step_NNNNNN.parquet."
    )

    save_tokens: bool = Field(
        True,
        description="save_trajectories: also write token ids and the log-probs of engine and learner. A row "
        "without a response_mask has a 1 for each token.",
    )
    loggers: tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...] = Field(
        (),
        description="Experiment trackers to which `paceline train` sends the configuration, the metrics and "
        "samples from validations; docs/observability.md.",
    )
    export_model: bool = Field(
        True,
        description="At the end of a run, `paceline train` writes the last weights as a Hugging Face folder, "
        "model/ in the run directory.",
    )

    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.total_steps is None and self.total_epochs is None:
            raise ValueError("the length of the run is missing: set total_steps or total_epochs")
        return self

    @property
    def num_steps(self) -> int:
        """Training steps of the run; with total_epochs, the number is known once the prompts are read."""
        assert self.total_steps is not None, "the epochs were not counted"
        return self.total_steps

    def saves_after(self, step: int) -> bool:
        """Returns whether a checkpoint is due after a step by save_freq, or because it is the last step."""
        return step == self.num_steps or (self.save_freq > 0 and step % self.save_freq == 0)

    def validates_after(self, step: int, *, every: int = 1) -> bool:
        """Returns whether a validation follows a step; 0 is the start.

        Args:
            every: with k, only every k-th validation between the first and the last counts.
        """
        if step == 0:
            return self.val_before_train
        if step == self.num_steps:
            return self.test_freq != 0
        return bool(self.test_freq) and step % (every * (self.test_freq or 1)) == 0


class LearnerConfig(Section):
    """Sets the learner group's ranks and devices."""

    world_size: int = Field(
        1, gt=0, description="Processes that `paceline train` starts, one per GPU or share of the CPU cores."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if the machine has a GPU.")
    devices: tuple[int, ...] | None = Field(
        None, description="GPU indices of the ranks; null: the first world_size."
    )
    context_parallel: Literal["auto"] | Annotated[int, Field(gt=0)] = Field(
        "auto",
        description="Ranks that share the tokens of each row, so that rows which are too long for one GPU "
        "can be trained on; must divide world_size and the model's attention heads. auto: the fewest ranks "
        "with which the longest rows fit into memory by the memory plan, and into "
        "actor.ppo_max_token_len_per_gpu if the file sets it. Must be 1 for training on pairs.",
    )
    fsdp_size: Literal["auto"] | Annotated[int, Field(gt=0)] | None = Field(
        "auto",
        description="Ranks that share one copy of weights and optimizer state; must divide world_size. null: "
        "all ranks. A smaller number is hybrid sharding (HSDP): each group of this many neighbouring ranks, "
        "say those of a host, gathers weights among themselves, and gradients are averaged over the groups. "
        "auto: with `paceline up`, the ranks of one host, if the memory plan has room for a copy on each "
        "host; otherwise all ranks.",
    )
    expert_parallel: Literal["auto"] | Annotated[int, Field(gt=0)] = Field(
        "auto",
        description="Ranks over which the experts of each layer are divided: a rank gathers only its part of "
        "them, and tokens go to the ranks of their experts and back. Must divide fsdp_size, and the model's "
        "experts. 1: every rank gathers all experts of a layer. auto: the fewest ranks with which the update "
        "fits into memory by the memory plan; 1 with `paceline up` and for training on pairs.",
    )
    tensor_parallel: int = Field(
        1,
        gt=0,
        description="Ranks over which the matrices of each layer are divided, for layers that are too large "
        "for one GPU. The same ranks share the tokens of each row, so context_parallel is this number, too. "
        "Must divide fsdp_size, and the model's attention heads. 1 for training on pairs.",
    )
    threads: int | None = Field(
        None, gt=0, description="CPU: torch threads per rank; null: the cores, divided among the ranks."
    )
    command_timeout_s: float = Field(
        3600.0, gt=0, description="Longest duration of a command (a training step, a checkpoint)."
    )
    collective_timeout_s: float = Field(
        300.0, gt=0, description="Longest time that a rank waits for another within a command."
    )
    rank_silent_s: float = Field(
        10.0,
        ge=3,
        description="Time after which a silent rank is considered lost; the whole group then restarts from "
        "its newest checkpoint.",
    )

    @model_validator(mode="after")
    def _divides_evenly(self) -> Self:
        if self.tensor_parallel > 1 and self.context_parallel not in ("auto", self.tensor_parallel):
            raise ValueError(
                f"learner.tensor_parallel={self.tensor_parallel}: these ranks also share the tokens of rows; "
                "leave out learner.context_parallel, or set it to the same number"
            )
        shared = "tensor_parallel" if self.tensor_parallel > 1 else "context_parallel"
        for name, size in ((shared, self.num_context_ranks), ("fsdp_size", self.num_shards)):
            if self.world_size % size:
                raise ValueError(f"learner.{name}={size} must divide learner.world_size={self.world_size}")
        for name, size in (("expert", self.num_expert_ranks), ("tensor", self.tensor_parallel)):
            if self.num_shards % size:
                raise ValueError(
                    f"learner.{name}_parallel={size} must divide the {self.num_shards} ranks that share a "
                    "copy of the weights (learner.fsdp_size)"
                )
        return self

    def require_experts(self, model: str, num_experts: int) -> None:
        """Checks that the policy's experts can be divided as `expert_parallel` says.

        Args:
            model: the policy, for the message.
            num_experts: its experts per layer.

        Raises:
            ConfigError: it has none, or a number that cannot be divided.
        """
        size = self.num_expert_ranks
        if size == 1:
            return
        if not num_experts:
            raise ConfigError(
                f"learner.expert_parallel={size} divides experts over ranks; {model} has no "
                "experts: leave it out"
            )
        if num_experts % size:
            raise ConfigError(
                f"the {num_experts} experts of {model} cannot be divided over {size} ranks; "
                f"set learner.expert_parallel to a divisor of {num_experts}"
            )

    @property
    def num_context_ranks(self) -> int:
        """Ranks that share the tokens of each row; 1 while the choice is still open."""
        return self.tensor_parallel if self.context_parallel == "auto" else self.context_parallel

    @property
    def num_expert_ranks(self) -> int:
        """Ranks over which the experts of each layer are divided; 1 while the choice is still open."""
        return 1 if self.expert_parallel == "auto" else self.expert_parallel

    @property
    def ranks_per_copy(self) -> int | None:
        """Ranks that share one copy of weights and optimizer state; None for all, or while the choice is
        open."""
        return None if self.fsdp_size == "auto" else self.fsdp_size

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of weights and optimizer state."""
        return self.ranks_per_copy or self.world_size

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks (with context parallelism: groups of ranks) that get different rows."""
        return self.world_size // self.num_context_ranks


# YAML 1.1 reads a bare off as a boolean.
WorkAhead = Annotated[
    Literal["off", "scores", "gradients"], BeforeValidator(lambda given: "off" if given is False else given)
]


class BarrierConfig(Section):
    """How a step's batch is collected, and what the learner computes before the batch is complete."""

    mode: Literal["strict", "bounded"] = Field(
        "strict",
        description="strict: every sample of a step comes from the weights that the step trains. bounded: "
        "samples may come from weights that are up to max_staleness versions older, so that servers sample "
        "the next steps while the learner trains; docs/decisions/0036-bounded-staleness.md.",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="bounded: how many versions older the weights that sampled a token may be than the "
        "weights that the step trains; also the number of steps that are sampled ahead. 0: the same as "
        "strict.",
    )
    work_ahead: WorkAhead = Field(
        "off",
        description="What the learner computes for finished samples while others are still being generated, "
        "if learner and servers use separate GPUs. Training stays strictly on policy. off: "
        "nothing. scores: old and reference log-probs and values. gradients: also forward and backward of "
        "the step's first mini-batch, prompt by prompt in order, with grpo, dr_grpo, rloo, opo, pass_at_k "
        "and remax. The numbers do not depend on how much was done ahead.",
    )
    prompts_per_chunk: int | None = Field(
        None,
        gt=0,
        description="work_ahead: prompts that the learner takes at a time; must divide every mini-batch "
        "size. null: the smallest divisor whose samples fill a micro-batch on every learner rank, assuming "
        "responses of half the longest length.",
    )
    collect_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Longest time for collecting a step's batch; null: three times "
        "rollout.request_timeout_s, which depends on the response length.",
    )
    stall_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Longest time without a new trajectory while a batch is collected, or without room in a "
        "mailbox; null: 1.5 times rollout.request_timeout_s, so that a group which timed out can be sampled "
        "again.",
    )

    @model_validator(mode="after")
    def _says_how_old(self) -> Self:
        if self.mode == "bounded" and self.max_staleness is None:
            raise ValueError("mode=bounded needs max_staleness: how many versions old a sample may be")
        if self.mode == "strict" and self.max_staleness:
            raise ValueError(
                f"max_staleness={self.max_staleness} is for mode=bounded; set that mode, or leave "
                "max_staleness out"
            )
        return self

    @property
    def bound(self) -> int:
        """How many versions the sampling policy may be behind the policy that is trained."""
        return self.max_staleness or 0


class BrokerConfig(Section):
    """Sets the message broker and its limits."""

    url: str | None = Field(
        None,
        description="redis://[:password@]host:port/db of a running server; "
        "null: `paceline train` starts a server for the run.",
    )
    blob_stores: Literal["auto"] | NonNegativeInt | tuple[str, ...] = Field(
        "auto",
        description="Further Redis servers, which hold the trajectories; the broker's server then has only "
        "their headers. A number: so many are started beside the run's own server. A list of addresses, with "
        "broker.url: one running server per host; a rollout server writes to the one of its own host. auto: "
        "one beside the run's own server if rows may have more than 8192 tokens, else none. A store that "
        "dies loses its samples, which are drawn again.",
    )
    insecure: bool = Field(
        False,
        description="Allow a server on another machine that requires no password; only for a network that "
        "you trust completely.",
    )
    lease_s: float = Field(
        5.0,
        gt=0,
        description="Duration of a lease: a message goes to another consumer if its consumer has not renewed "
        "the lease for this long.",
    )
    outage_timeout_s: float = Field(
        300.0,
        gt=0,
        description="How long services wait when the broker's server is unavailable (restart, failover, "
        "freeze, out of memory).",
    )
    max_memory_mib: int | None = Field(
        None,
        gt=0,
        description="Memory bound of each server that `paceline train` starts; services wait while it is "
        "full. null: a quarter of the machine's memory for all of them.",
    )
    max_stream_length: int = Field(
        100_000, gt=0, description="Most entries of a mailbox; while it is full, writers wait."
    )

    @model_validator(mode="after")
    def _stores_are_reachable(self) -> Self:
        if isinstance(self.blob_stores, int) and self.blob_stores and self.url is not None:
            raise ValueError(
                f"broker.blob_stores={self.blob_stores} starts servers beside the run's own, and broker.url "
                "names another: list the addresses of running servers, one per host"
            )
        if isinstance(self.blob_stores, tuple) and self.blob_stores and self.url is None:
            raise ValueError(
                "broker.blob_stores lists running servers, and without broker.url the run starts its own: "
                "set broker.url, or write a number"
            )
        if len(set(self.store_urls)) < len(self.store_urls):
            raise ValueError("broker.blob_stores names an address twice; each is one store")
        return self

    @property
    def store_urls(self) -> tuple[str, ...]:
        """The addresses of stores that already run."""
        return self.blob_stores if isinstance(self.blob_stores, tuple) else ()

    @property
    def has_secrets(self) -> bool:
        """Whether an address has a password."""
        return any("@" in url for url in (self.url or "", *self.store_urls))


class WeightsConfig(Section):
    """Sets how weights are pushed to rollout servers."""

    backend: Literal["auto", "gloo", "nccl", "shared"] = Field(
        "auto",
        description="auto: nccl between GPUs; gloo on CPUs and where learner and rollout share a GPU; with "
        "placement: colocated, shared. shared: a learner rank and a rollout rank on one GPU (or the CPU of "
        "one machine) exchange weights through memory that both can access; each must see the other's "
        "process, as in one container.",
    )
    staging_mib: int = Field(
        1024,
        gt=1,
        description="Most memory that a push uses on any rank besides the parameters; two rounds share it.",
    )
    relay: Literal["auto", "never", "always"] = Field(
        "auto",
        description="Whether rollout ranks that need the same weights pass them on to each other. auto: if "
        "otherwise the learner's network links would slow the push down, or several ranks of a node would "
        "receive the same weights over the network; always: wherever possible within a node, for tests.",
    )
    push_timeout_s: float = Field(30.0, gt=0, description="Longest duration of a push.")
    join_timeout_s: float = Field(60.0, gt=0, description="Longest duration of forming the weight group.")


class ServiceConfig(Section):
    """Addresses, heartbeats and deadlines of the services."""

    host: str = Field("127.0.0.1", description="Address that servers bind to.")
    insecure: bool = Field(
        False,
        description="Allow unencrypted traffic beyond loopback; only for a network that you trust "
        "completely. Services that are started by hand also need PACELINE_INSECURE=1.",
    )
    controller_port: Port = Field(0, description="Port of the controller; 0: any free port.")
    reward_port: Port = Field(
        0,
        description="Port of the reward service that `paceline train` starts, for clients that attach; 0: "
        "any free port.",
    )
    rollout_port: Port = Field(
        0,
        description="Port of the first rollout server that `paceline train` starts, for environments that "
        "attach; the other servers use the ports after it. 0: any free ports.",
    )
    ports: str | None = Field(
        None,
        description="FIRST-LAST, a range for firewalls: servers and the weight group's store use free ports "
        "of it, unless another setting names a port. NCCL and gloo use the kernel's range "
        "(net.ipv4.ip_local_port_range), which `paceline up` checks on every host. null: any port.",
    )
    heartbeat_s: float = Field(1.0, gt=0, description="How often members report.")
    suspect_after_s: float = Field(
        5.0,
        gt=0,
        description="Silence after which a member is suspected; five times as long while it starts.",
    )
    dead_after_s: float = Field(
        12.0,
        gt=0,
        description="Silence after which a member is considered dead; five times as long while it starts.",
    )
    recovery_timeout_s: float = Field(
        600.0, gt=0, description="Longest wait for a lost service to come back."
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Most restarts of a lost service by `paceline train` within restart_window_s; with one "
        "more the run ends. 0: never.",
    )
    restart_window_s: float = Field(
        300.0, gt=0, description="Length of the window in which restarts are counted."
    )
    rpc_timeout_s: float = Field(30.0, gt=0, description="Deadline of short calls.")
    startup_timeout_s: float = Field(300.0, gt=0, description="Longest wait for all services to register.")
    shutdown_timeout_s: float = Field(
        20.0, gt=0, description="Longest time for the ordered shutdown; then processes are killed."
    )
    max_message_mib: int = Field(64, gt=0, description="Largest gRPC message.")

    @field_validator("ports")
    @classmethod
    def _is_a_range(cls, ports: str | None) -> str | None:
        if ports is not None:
            try:
                read_ports(ports)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return ports


class TelemetryConfig(Section):
    """Sets where traces, metrics and logs go."""

    otlp_endpoint: str | None = Field(
        None, description="OTLP/gRPC endpoint; null: metrics.jsonl and spans.jsonl in the run directory."
    )
    prometheus_port: Port = Field(
        0,
        description="Port of the process's own Prometheus endpoint, on loopback; 0: none. `paceline train` "
        "gives it to the controller, and the next ports to the other services. PACELINE_PROMETHEUS_PORT "
        "overrides it.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Level of the services' logs."
    )
