"""Plans the processes of a run on this machine: commands, environments, and the cores and GPUs of each."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config.reward import RewardModelConfig
from paceline.config.run import RunConfig
from paceline.data.hub import uses_hub
from paceline.runs.run_dir import START
from paceline.service.identity.credentials import INSECURE, REWARD_TOKEN, TOKEN
from paceline.service.member.bootstrap import MAX_MESSAGE_MIB
from paceline.service.observability import prometheus
from paceline.service.ports import PORTS
from paceline.sizing.gpus import joined, share_gpus
from paceline.sizing.machine import Machine
from paceline.storage.hub import OFFLINE

# `--dry-run` shows this instead of an address that is known only after the start.
CONTROLLER_PLACE = "CONTROLLER_HOST:PORT"

# The sections of the configuration that each service reads.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "controller": (
        "placement", "trainer", "data", "model", "algorithm", "guard",
        "rollout", "reward", "barrier", "broker", "weights",
        "service", "telemetry",
    ),
    "rollout": ("rollout", "model", "data", "broker", "weights", "service", "telemetry"),
    "learner": (
        "learner", "actor", "critic", "algorithm", "guard", "model", "data", "rollout", "trainer", "broker",
        "weights", "service", "telemetry",
    ),
    "reward": ("reward", "model", "broker", "service", "telemetry"),
    "reward-model": ("reward",),
}  # fmt: skip


class Role(enum.Enum):
    """What a process does in the run."""

    CONTROLLER = "controller"
    ROLLOUT = "rollout"
    LEARNER = "learner"
    REWARD = "reward"
    REWARD_MODEL = "reward-model"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """Says how one process is started. `env` is added to the launcher's own environment.

    `member_id` is its name for the controller; several processes with the same id start and end together.
    `shell` is the command line of a remote shell, if the process runs on another host: `launch.remote` there
    gets command and environment through its input.
    """

    name: str
    role: Role
    command: tuple[str, ...]
    member_id: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = ()

    @property
    def token_variable(self) -> str:
        """The environment variable that gives it the run's token."""
        return REWARD_TOKEN if self.role is Role.REWARD_MODEL else TOKEN


def controller(config: RunConfig, run_dir: Path, address_file: Path) -> ProcessSpec:
    """Returns the controller, which is started first."""
    command = [
        *_module("controller"),
        "--config", str(run_dir / START),
        "--run-dir", str(run_dir),
        "--host", config.service.host,
        "--port", str(config.service.controller_port),
        "--address-file", str(address_file),
    ]  # fmt: skip
    return ProcessSpec(
        name="controller",
        role=Role.CONTROLLER,
        command=tuple(command),
        env=_common(config, num_threads=1) | _metrics_port(config, 0),
    )


def checks(config: RunConfig, run_dir: Path) -> list[ProcessSpec]:
    """Returns the checks that run while the controller starts, which itself checks data and model."""
    names = {Role.REWARD: "scorers"}
    if config.actor.policy_loss.type == "custom" or config.algorithm.is_own:
        names[Role.LEARNER] = "algorithm"
    return [
        ProcessSpec(
            name=f"{role.value}-check",
            role=role,
            command=(*_module(f"{role.value}.check"), name, str(run_dir / START)),
            env=_common(config, num_threads=1),
        )
        for role, name in names.items()
    ]


def members(
    config: RunConfig, machine: Machine, *, controller_address: str, master_port: int
) -> list[ProcessSpec]:
    """Returns rollout servers, learner ranks, reward service and reward models, in the order of their start.

    Raises:
        ConfigError: the configuration asks for more GPUs than there are.
    """
    learner_gpus, rollout_gpus = share_gpus(config, machine.gpus)
    specs = [
        *(
            _rollout(config, machine, index, gpus, controller_address)
            for index, gpus in enumerate(rollout_gpus)
        ),
        *_learners(config, machine, learner_gpus, controller_address, master_port),
        _reward(config, 0, controller_address),
    ]
    return [*_with_metrics_ports(config, specs, first=1), *_local_reward_models(config, machine)]


def newcomers(config: RunConfig, machine: Machine, *, controller_address: str) -> list[ProcessSpec]:
    """Returns a further rollout server and reward service, as they would join the members on this machine."""
    learner_gpus, rollout_gpus = share_gpus(config, machine.gpus)
    used = {*learner_gpus, *(gpu for gpus in rollout_gpus for gpu in gpus)}
    free = [gpu for gpu in machine.gpus if gpu not in used][: config.rollout.tensor_model_parallel_size]
    replicas = config.rollout.replicas
    specs = [
        _rollout(config, machine, replicas, free, controller_address),
        _reward(config, 1, controller_address),
    ]
    return _with_metrics_ports(config, specs, first=replicas + config.learner.world_size + 2)


def _with_metrics_ports(config: RunConfig, specs: Sequence[ProcessSpec], *, first: int) -> list[ProcessSpec]:
    return [
        # A rank adds its number itself, as it must when torchrun gives all ranks the same environment.
        replace(spec, env={**spec.env, **_metrics_port(config, number - _local_rank(spec))})
        for number, spec in enumerate(specs, start=first)
    ]


def scrape_targets(specs: Sequence[ProcessSpec]) -> list[dict[str, Any]]:
    """Returns the processes' metrics endpoints in the form of Prometheus' file_sd_configs; [] if there are
    none."""
    host = prometheus.wanted_host()
    address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return [
        {
            "targets": [f"{address}:{int(spec.env[prometheus.PORT]) + _local_rank(spec)}"],
            "labels": {"process": spec.name},
        }
        for spec in specs
        if prometheus.PORT in spec.env
    ]


def _rollout(
    config: RunConfig, machine: Machine, index: int, gpus: Sequence[int], controller_address: str
) -> ProcessSpec:
    name = f"rollout-{index}"
    number = config.service.rollout_port
    port = ("--port", str(number + index)) if number else ()
    # Newcomers, whose numbers follow, answer training prompts.
    validates = config.rollout.training_servers <= index < config.rollout.replicas
    role = ("--validates",) if validates else ()
    own = config.rollout.with_engine(config.rollout.engine_at(index))
    engine = ("--engine", own.name) if own.name != config.rollout.name else ()
    return ProcessSpec(
        name=name,
        role=Role.ROLLOUT,
        member_id=name,
        command=(
            *_module("rollout", python=own.python),
            *_member(config, controller_address, name),
            *port,
            *role,
            *engine,
        ),
        # The rollout service sets its threads and its engine's variables itself: it can also start alone.
        env=_common(config) | _devices(gpus, machine),
    )


def _reward(config: RunConfig, index: int, controller_address: str) -> ProcessSpec:
    name = f"reward-{index}"
    number = config.service.reward_port
    port = ("--port", str(number)) if number and index == 0 else ()
    return ProcessSpec(
        name="reward" if index == 0 else name,
        role=Role.REWARD,
        member_id=name,
        command=(*_module("reward"), *_member(config, controller_address, name), *port),
        env=_common(config, num_threads=1),
    )


def _local_reward_models(config: RunConfig, machine: Machine) -> list[ProcessSpec]:
    address = f"{config.service.host}:{config.service.reward_port}"
    return [
        reward_model(
            config, model, number, addresses=[address], env=_devices(model.devices[number:][:1], machine)
        )
        for model in config.reward.models
        for number in range(model.replicas)
    ]


def reward_model(
    config: RunConfig,
    model: RewardModelConfig,
    number: int,
    *,
    addresses: Sequence[str],
    env: Mapping[str, str],
) -> ProcessSpec:
    """Returns a replica of a reward model; it attaches to the reward services and is not a member of the run.

    Args:
        env: variables that say which GPU it sees.
    """
    command = [
        *_module("reward.models"), model.path,
        "--attach", *addresses,
        "--name", model.name,
        "--kind", model.kind,
        "--engine", model.engine,
        "--step-separator", model.step_separator,
        "--device", "cuda:0" if model.devices else "cpu",
        "--dtype", model.dtype,
        "--max-batch-tokens", str(model.max_batch_tokens),
        "--timeout", str(model.timeout_s),
        "--load-timeout", str(model.wait_for_s),
    ]  # fmt: skip
    if model.prompt_file is not None:
        command += [
            "--prompt-file", model.prompt_file,
            f"--pattern={model.pattern}",
            "--words", json.dumps(model.words),
            "--max-tokens", str(model.max_tokens),
        ]  # fmt: skip
    return ProcessSpec(
        name=f"reward-model-{model.name}-{number}",
        role=Role.REWARD_MODEL,
        command=tuple(command),
        env={**_common(config, num_threads=model.threads), **env},
    )


def _learners(
    config: RunConfig, machine: Machine, gpus: tuple[int, ...], controller_address: str, master_port: int
) -> list[ProcessSpec]:
    size = config.learner.world_size
    num_threads = config.learner.threads or max(1, machine.num_cores // size)
    specs = []
    for rank in range(size):
        ranks = torchrun_env(rank=rank, world_size=size, master_port=master_port)
        specs.append(
            ProcessSpec(
                name=f"learner-{rank}",
                role=Role.LEARNER,
                member_id="learner-0",
                command=(*_module("learner"), *_member(config, controller_address, "learner-0")),
                env=_common(config, num_threads=num_threads) | KEEP_MEMORY | ranks | _devices(gpus, machine),
            )
        )
    return specs


# glibc returns a large tensor's pages to the kernel when the tensor is freed and faults them in again for the
# next one; a learner allocates the same tensors in every step. Keeping the pages saved a tenth of a training
# step on a CPU.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}


def torchrun_env(*, rank: int, world_size: int, master_port: int) -> dict[str, str]:
    """Returns the environment that torchrun gives to a rank on one machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
    }


def _module(service: str, *, python: str | None = None) -> list[str]:
    return [python or sys.executable, "-m", f"paceline.{service}"]


def _member(config: RunConfig, controller_address: str, member_id: str) -> list[str]:
    return ["--controller", controller_address, "--member-id", member_id, "--host", config.service.host]


def _common(config: RunConfig, *, num_threads: int | None = None) -> dict[str, str]:
    variables = {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # Services share the cores: a thread that spins while it waits takes time from a thread that works.
        "OMP_WAIT_POLICY": "passive",
    }
    if not uses_hub(config):
        # A run reads local files only; asking the model hub would slow the start and could change results.
        variables[OFFLINE] = "1"
    if num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    variables[MAX_MESSAGE_MIB] = str(config.service.max_message_mib)
    if config.service.ports is not None:
        variables[PORTS] = config.service.ports
    if config.service.insecure:
        variables[INSECURE] = "1"
    return variables


def _local_rank(spec: ProcessSpec) -> int:
    return int(spec.env.get("LOCAL_RANK", 0))


def _metrics_port(config: RunConfig, number: int) -> dict[str, str]:
    """Gives each process of this machine its own port, counting up from the configured one."""
    base = prometheus.wanted_port(config.telemetry.prometheus_port)
    return {prometheus.PORT: str(base + number)} if base else {}


def _devices(gpus: Sequence[int], machine: Machine) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": joined(gpus)} if gpus or machine.gpus else {}
