"""The learner's ranks: this process's place among them, its device, and the groups that they form."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from paceline.config.services import LearnerConfig
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.learner.distributed.mesh import RankGroup, form_fsdp_mesh, form_rows_mesh
from paceline.service.addresses import choose_for_gloo, choose_for_nccl, is_loopback, join
from paceline.service.ports import warn_of_kernel
from paceline.weights.transport import rendezvous

WRITE_TIMEOUT_S = 3600.0
"""How long a rank that has written its shards of a checkpoint waits for the slowest one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """A process's place in the group, as torchrun or `paceline train` sets it.

    `num_local_ranks` counts the ranks on this host, this one included.
    """

    rank: int
    world_size: int
    local_rank: int
    num_local_ranks: int
    master_host: str
    master_port: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; with none set, a group of one.

        Without LOCAL_WORLD_SIZE all ranks are on this host.

        Raises:
            ConfigError: only some are set, or one is not a number.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if not any(name in environ for name in names):
            return cls(
                rank=0, world_size=1, local_rank=0, num_local_ranks=1, master_host="127.0.0.1", master_port=0
            )
        missing = [name for name in names if name not in environ]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} not set; start the learner with torchrun or `paceline train`"
            )
        try:
            rank, world_size, local_rank = (int(environ[name]) for name in names[:3])
            port = int(environ["MASTER_PORT"])
            num_local_ranks = int(environ.get("LOCAL_WORLD_SIZE", world_size))
        except ValueError as error:
            raise ConfigError(
                f"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_PORT must be numbers: {error}"
            ) from None
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK={rank} must be in 0..{world_size - 1} (WORLD_SIZE={world_size})")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            num_local_ranks=num_local_ranks,
            master_host=environ["MASTER_ADDR"].strip("[]"),
            master_port=port,
        )

    def use_interface(self, host: str) -> None:
        """Has gloo and NCCL connect this rank to the others over the interface of `host`.

        Raises:
            ConfigError: ranks are on several hosts, and other hosts cannot reach this one.
        """
        if self.num_local_ranks < self.world_size and is_loopback(host):
            raise ConfigError(
                f"{self.world_size - self.num_local_ranks} of the learner's {self.world_size} ranks are on "
                f"other hosts and cannot reach this one on {host}; start it with --host ADDRESS or INTERFACE "
                "(or PACELINE_HOST)"
            )
        choose_for_gloo(host)
        choose_for_nccl(host)
        warn_of_kernel(host)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The group of learner processes, formed: a mesh with named dimensions, as `mesh` describes it.

    Attributes:
        world: all ranks. They agree on errors and on sizes that fit into memory, and check a checkpoint
            together; rank 0 takes commands and writes for all.
        data: the ranks that get different rows. Sums over rows and tokens, and so losses and metrics, run
            over it, never over `world`.
        context: the ranks that have the same rows and share their tokens; None if each rank has all
            tokens of its rows.
        fsdp: all ranks as FSDP sees them: "shard", the ranks that share one copy of the parameters, after
            "replicate" if there are several copies. Gradients are averaged over both.
        experts: all ranks by the experts that they have: `fsdp` with "expert" as its last dimension, the
            ranks over which the experts of a layer are divided; None if no rank has experts of its own.
        tensors: all ranks by the parts of matrices that they have, with "tensor" as the last dimension: the
            ranks of `context`; None if matrices are not divided.
        control: a gloo group of all ranks beside the default one, for commands and their outcomes.
        storage: another gloo group, for the thread that writes checkpoints.
        store: the key-value store that formed the group; a dying rank leaves its reason there.
        num_local: ranks on this host, this one included.
    """

    device: torch.device
    world: RankGroup
    data: RankGroup
    context: RankGroup | None
    fsdp: DeviceMesh
    control: dist.ProcessGroup
    storage: dist.ProcessGroup
    store: Store
    experts: DeviceMesh | None = None
    tensors: DeviceMesh | None = None
    num_local: int = 1


def use_threads(wanted: int | None, environment: RankEnvironment) -> None:
    """Sets torch's threads: `wanted`, else OMP_NUM_THREADS, else this host's cores divided by its ranks."""
    if wanted is None and "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(wanted or max(1, (os.cpu_count() or 1) // environment.num_local_ranks))


def choose_device(wanted: str, environment: RankEnvironment, devices: tuple[int, ...] | None) -> torch.device:
    """Returns the device of this rank.

    Args:
        wanted: auto, cpu or cuda.
        devices: GPU indices by local rank; ignored if CUDA_VISIBLE_DEVICES is set.

    Raises:
        ConfigError: `devices` is too short.
        EnvironmentLackError: there is no GPU for this rank.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = environment.local_rank
    if devices is not None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        if index >= len(devices):
            raise ConfigError(
                f"learner.devices lists {len(devices)} GPUs, local rank {index} finds none; add one"
            )
        index = devices[index]
    count = torch.cuda.device_count()
    if index >= count:
        raise EnvironmentLackError(
            f"local rank {environment.local_rank} wants GPU {index}, this process sees {count}; lower "
            "learner.world_size or set learner.device=cpu"
        )
    return torch.device("cuda", index)


def open_store(environment: RankEnvironment, timeout_s: float) -> Store:
    """Opens the key-value store where the ranks meet; rank 0 serves it, unless torchrun's agent does.

    Rank 0 listens on MASTER_ADDR only. torchrun's agent listens on every interface; with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 its store is for the agents alone, and rank 0 serves the ranks.

    Raises:
        EnvironmentLackError: MASTER_ADDR is not an address of rank 0's machine, or MASTER_PORT is taken.
        RuntimeError: rank 0 does not answer within `timeout_s`.
    """
    if environment.world_size == 1:
        return HashStore()
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = environment.master_host, environment.master_port
    if environment.rank != 0 or served_by_agent:
        timeout = datetime.timedelta(seconds=timeout_s)
        store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        # The agent keeps its store when it restarts the ranks, including entries of the lost ranks.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"start-{start}", store) if served_by_agent else store
    try:
        return rendezvous.open_store(host, timeout_s, port=port)
    except OSError as error:
        raise EnvironmentLackError(
            f"learner rank 0 cannot listen on {join(host, port)} ({error.strerror or error}): MASTER_ADDR "
            "must be an address of the machine of rank 0, and MASTER_PORT a free port there"
        ) from error


def form_group(
    environment: RankEnvironment,
    store: Store,
    device: torch.device,
    timeout_s: float,
    *,
    context: int = 1,
    fsdp_size: int | None = None,
    expert: int = 1,
    tensor: int = 1,
) -> Ranks:
    """Forms the process groups; every rank calls it.

    Args:
        store: key-value store through which the ranks meet.
        timeout_s: bounds this and every later wait of one rank for another.
        context: ranks that share the tokens of each row.
        fsdp_size: ranks that share one copy of the parameters; None: all.
        expert: ranks over which the experts of a layer are divided.
        tensor: ranks over which the matrices of a layer are divided: 1, or `context`.

    Raises:
        ConfigError: `context` or `fsdp_size` does not divide the number of ranks, or `expert` or `tensor`
            does not divide `fsdp_size`.
        RuntimeError: a rank did not join in time.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    # cuDNN computes float32 convolutions in TF32 by default. A vision tower begins with one, and log-probs
    # were 0.006 nats off the engine's.
    torch.backends.cudnn.allow_tf32 = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("paceline", store),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    rows = form_rows_mesh(device.type, context, timeout)
    return Ranks(
        device=device,
        world=RankGroup.of(dist.group.WORLD),
        data=RankGroup.of(rows.get_group("data")),
        context=RankGroup.of(rows.get_group("context")) if context > 1 else None,
        fsdp=form_fsdp_mesh(device.type, fsdp_size, timeout),
        experts=form_fsdp_mesh(device.type, fsdp_size, timeout, expert=expert) if expert > 1 else None,
        tensors=form_fsdp_mesh(device.type, fsdp_size, timeout, tensor=tensor) if tensor > 1 else None,
        control=dist.new_group(backend="gloo", timeout=timeout),
        storage=dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=WRITE_TIMEOUT_S)),
        store=store,
        num_local=environment.num_local_ranks,
    )


def join_group(settings: LearnerConfig, environment: RankEnvironment, store: Store) -> Ranks:
    """Forms the group by a configuration's settings; raises as `choose_device` and `form_group`."""
    use_threads(settings.threads, environment)
    return form_group(
        environment,
        store,
        choose_device(settings.device, environment, settings.devices),
        settings.collective_timeout_s,
        context=settings.num_context_ranks,
        fsdp_size=settings.ranks_per_copy,
        expert=settings.num_expert_ranks,
        tensor=settings.tensor_parallel,
    )


def leave_group() -> None:
    """Destroys all process groups of this rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
