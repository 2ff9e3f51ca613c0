"""HOSTS.yaml: the hosts of a run, and the plan of its processes over them.

Controller, launcher and run directory are on the machine where `paceline up` runs; every other service runs
behind a remote shell, which is ssh unless the file names another.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pydantic import Field, field_validator

from paceline.config.base import Section
from paceline.config.reward import RewardModelConfig
from paceline.config.run import RunConfig
from paceline.core.cards import CARDS, read_gpus
from paceline.core.errors import ConfigError
from paceline.launch.planning import plan
from paceline.launch.planning.plan import ProcessSpec, Role
from paceline.service.addresses import DATA_HOST, is_loopback, join
from paceline.sizing.machine import Machine
from paceline.sizing.update import settle_copies


class Host(Section):
    """A host and the services that run there."""

    name: str = Field(description="Its name for the remote shell, such as USER@HOST.")
    address: str = Field(description="Address that its services listen on and that the others reach.")
    data_address: str | None = Field(
        None,
        description="Its address on the network for weights and for traffic between learner ranks; "
        "null: address.",
    )
    folder: str = Field(description="Working directory of its services.")
    python: str = Field("python3", description="Interpreter that has Paceline there.")
    env: dict[str, str] = Field(
        {}, description="Further variables of its services, such as PACELINE_TLS_DIR."
    )
    gpus: tuple[int, ...] = Field((), description="GPU indices: the learner's ranks take the first ones.")
    card: str | None = Field(
        None,
        description="Model of its GPUs, such as H100, for the memory plan; `paceline hosts init` asks the "
        "host.",
    )
    cores: int = Field(8, gt=0, description="CPU cores, which its learner ranks share if it has no GPU.")
    learner: int = Field(0, ge=0, description="Learner ranks.")
    rollout: int = Field(0, ge=0, description="Rollout servers.")
    reward: int = Field(0, ge=0, description="Reward services.")
    reward_models: tuple[str, ...] = Field(
        (),
        description="Models of reward.models, by name, whose replicas run here, with device: cuda:N on GPU "
        "N; a model that several hosts name has its replicas on each.",
    )

    @field_validator("card")
    @classmethod
    def _is_known(cls, card: str | None) -> str | None:
        return None if card is None else read_gpus(card)[1].name


class Hosts(Section):
    """The content of HOSTS.yaml: the hosts and the configuration."""

    config: str = Field(description="The run's configuration, relative to this file.")
    address: str = Field(description="Address of this machine that the hosts reach; the controller's.")
    shell: tuple[str, ...] = Field(
        ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "{name}"),
        description="Words before the command line, which is one word; {name} is the host's.",
    )
    learner_port: int = Field(
        29500, gt=0, le=65535, description="Free port of the first learner rank's host."
    )
    hosts: tuple[Host, ...] = Field(min_length=1, description="The hosts.")


class _Slot(NamedTuple):
    """Place `number` of `total` of a kind on a host."""

    host: Host
    number: int
    total: int


def with_hosts(config: RunConfig, hosts: Hosts) -> RunConfig:
    """Returns the configuration with the hosts' numbers of ranks and servers, and the controller's address.

    Raises:
        ConfigError: a service has no host, Redis cannot be reached from them, or sizes of groups do not
            divide the number of learner ranks.
    """
    counts = {kind: len(_slots(hosts, kind)) for kind in ("learner", "rollout", "reward")}
    missing = [kind for kind, count in counts.items() if not count]
    if missing:
        raise ConfigError(f"no host runs {' or '.join(missing)}: give one of them {missing[0]}: 1")
    learner, num_ranks = config.learner, counts["learner"]
    sizes = {
        "context_parallel": learner.num_context_ranks,
        "fsdp_size": learner.ranks_per_copy or 1,
        "expert_parallel": learner.num_expert_ranks,
        "tensor_parallel": learner.tensor_parallel,
    }
    for name, size in sizes.items():
        if num_ranks % size:
            raise ConfigError(f"learner.{name}={size} must divide the {num_ranks} learner ranks of the hosts")
    models = {model.name for model in config.reward.models}
    placed = {name for host in hosts.hosts for name in host.reward_models}
    if models != placed:
        raise ConfigError(
            f"reward.models names {_names(models)}, but the hosts run {_names(placed)}: add each model's "
            "name to a host, reward_models: [NAME]"
        )
    addresses = {"this machine": hosts.address} | {host.name: host.address for host in hosts.hosts}
    on_loopback = [name for name, address in addresses.items() if is_loopback(address)]
    if 0 < len(on_loopback) < len(addresses):
        raise ConfigError(
            f"the address of {on_loopback[0]}, {addresses[on_loopback[0]]}, leads every other host to "
            "itself: give the one that the others reach"
        )
    if config.broker.url is None and not on_loopback:
        raise ConfigError(
            "the run's own Redis server listens on loopback only: start one that all hosts reach, `paceline "
            f"redis DIR --host {hosts.address}`, and set broker.url as it says"
        )
    rollout = config.rollout.model_copy(update={"replicas": counts["rollout"], "devices": None})
    try:
        rollout.check_servers()
    except ValueError as error:
        raise ConfigError(f"the hosts' rollout servers are too few: {error}") from None
    return config.model_copy(
        update={
            "learner": learner.model_copy(update={"world_size": num_ranks, "devices": None}),
            "rollout": rollout,
            "service": config.service.model_copy(update={"host": hosts.address}),
        }
    )


def with_copies(config: RunConfig, hosts: Hosts) -> tuple[RunConfig, list[str]]:
    """Returns the configuration of `with_hosts` with `learner.fsdp_size` chosen, and the reason for the
    choice."""
    learners = [host for host in hosts.hosts if host.learner]
    totals = [CARDS[host.card].num_bytes for host in learners if host.card is not None]
    return settle_copies(config, [host.learner for host in learners], totals)


def members(
    hosts: Hosts, config: RunConfig, machine: Machine, *, controller_address: str, master_port: int
) -> list[ProcessSpec]:
    """Returns the members that `plan.members` makes for one machine, each placed on its host.

    Raises:
        ConfigError: a host has too few GPUs.
    """
    num_gpus = sum(len(host.gpus) for host in hosts.hosts)
    size = config.rollout.tensor_model_parallel_size
    is_colocated = config.placement == "colocated"
    if is_colocated:
        # This is only the number of GPUs that each needs; the hosts decide which ones.
        engines = {"devices": tuple(range(config.rollout.replicas * size))}
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update=engines)})
    cluster = Machine(num_cores=1, gpus=tuple(range(num_gpus)))
    models = config.reward.models
    config = config.model_copy(update={"reward": config.reward.model_copy(update={"models": ()})})
    specs = plan.members(
        config, cluster, controller_address=controller_address, master_port=hosts.learner_port
    )
    learners = [spec for spec in specs if spec.role is Role.LEARNER]
    rollouts = [spec for spec in specs if spec.role is Role.ROLLOUT]
    (reward,) = (spec for spec in specs if spec.role is Role.REWARD)
    return [
        *(
            _there(
                hosts, slot.host, spec, _server(slot, size, behind=0 if is_colocated else slot.host.learner)
            )
            for spec, slot in _placed(hosts, rollouts)
        ),
        *(_there(hosts, slot.host, spec, _rank(hosts, slot)) for spec, slot in _placed(hosts, learners)),
        *(_there(hosts, slot.host, spec, {}) for spec, slot in _placed(hosts, _rewards(hosts, reward))),
        *_reward_models(hosts, config, models),
    ]


def shell_words(hosts: Hosts, host: Host) -> tuple[str, ...]:
    """Returns the remote shell's command line, which runs `paceline.launch.remote` on a host."""
    remote = f"cd {shlex.quote(host.folder)} && exec {shlex.quote(host.python)} -m paceline.launch.remote"
    return (*(word.replace("{name}", host.name) for word in hosts.shell), remote)


def _slots(hosts: Hosts, kind: str) -> list[_Slot]:
    return [
        _Slot(host, index, getattr(host, kind))
        for host in hosts.hosts
        for index in range(getattr(host, kind))
    ]


def _placed(hosts: Hosts, specs: Sequence[ProcessSpec]) -> list[tuple[ProcessSpec, _Slot]]:
    return list(zip(specs, _slots(hosts, specs[0].role.value), strict=True))


def _server(slot: _Slot, size: int, *, behind: int) -> dict[str, str]:
    """Returns the server's GPUs, which come after the GPUs that only the learner uses."""
    host = slot.host
    if not host.gpus:
        return {}
    gpus = host.gpus[behind + slot.number * size :][:size]
    if len(gpus) < size:
        ranks = f"{behind} learner ranks and " if behind else ""
        raise ConfigError(
            f"{host.name} has {len(host.gpus)} GPUs for {ranks}{host.rollout} rollout servers of {size}: "
            "correct its gpus, learner or rollout"
        )
    return _visible(gpus)


def _rank(hosts: Hosts, slot: _Slot) -> dict[str, str]:
    """Returns torchrun's environment for a rank; `plan.members` has set the rank and the world size."""
    first, host = _slots(hosts, "learner")[0].host, slot.host
    gpus = host.gpus[: slot.total]
    if host.gpus and len(gpus) < slot.total:
        raise ConfigError(
            f"{host.name} has {len(gpus)} GPUs for {slot.total} learner ranks: correct one of them"
        )
    threads = {} if gpus else {"OMP_NUM_THREADS": str(max(1, host.cores // slot.total))}
    return {
        "LOCAL_RANK": str(slot.number),
        "LOCAL_WORLD_SIZE": str(slot.total),
        "MASTER_ADDR": first.data_address or first.address,
        **threads,
        **_visible(gpus),
    }


def _visible(gpus: Sequence[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}


def _rewards(hosts: Hosts, reward: ProcessSpec) -> list[ProcessSpec]:
    """Returns as many copies of the reward service of `plan.members` as the hosts run.

    If it has a port, the copies of a host use that port and the following ones.
    """
    specs = []
    for number, slot in enumerate(_slots(hosts, "reward")):
        name = f"reward-{number}"
        words = [name if word == reward.member_id else word for word in reward.command]
        if "--port" in words:
            place = words.index("--port") + 1
            words[place] = str(int(words[place]) + slot.number)
        specs.append(replace(reward, name=name, member_id=name, command=tuple(words)))
    return specs


def _reward_models(
    hosts: Hosts, config: RunConfig, models: Sequence[RewardModelConfig]
) -> Iterator[ProcessSpec]:
    """Returns each model's replicas on the hosts that name it; every replica attaches to all reward
    services."""
    port = config.service.reward_port
    addresses = [join(slot.host.address, port + slot.number) for slot in _slots(hosts, "reward")]
    for model in models:
        numbers = itertools.count()
        for host in (host for host in hosts.hosts if model.name in host.reward_models):
            for replica in range(model.replicas):
                env = _visible(model.devices[replica:][:1])
                spec = plan.reward_model(config, model, next(numbers), addresses=addresses, env=env)
                yield _there(hosts, host, spec, {})


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _there(hosts: Hosts, host: Host, spec: ProcessSpec, env: dict[str, str]) -> ProcessSpec:
    """Returns the spec for a host, with its interpreter, address and variables, behind the remote shell."""
    python, *words = spec.command
    # An engine's own environment is at the same path on all hosts.
    words = [host.python if python == sys.executable else python, *words]
    if "--host" in words:
        words[words.index("--host") + 1] = host.address
    data = {DATA_HOST: host.data_address} if host.data_address else {}
    env = {**spec.env, **env, **data, **host.env}
    return replace(spec, command=tuple(words), env=env, shell=shell_words(hosts, host))
