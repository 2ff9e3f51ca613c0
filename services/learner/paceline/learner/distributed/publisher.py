"""Sends the policy: describes this learner rank's FSDP2 shards and sends them to the rollout ranks."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.core.errors import ModelError, WeightSyncError
from paceline.learner.distributed.shards import own_box
from paceline.weights.digest.agreement import Atom, DigestReport, digest_atoms, pack_places
from paceline.weights.digest.job import DigestJob, DigestPart, TensorDigester
from paceline.weights.geometry.cover import Need, Supply, assign_sources
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.geometry.parameters import AddressCache, ParameterIndex
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt
from paceline.weights.transport.group import DTYPES, WeightGroup
from paceline.weights.transport.place import place_of
from paceline.weights.transport.rendezvous import Deadline, open_store
from paceline.weights.transport.shared_group import group_kind

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_STORE_TIMEOUT_S = 60.0


class WeightPublisher:
    """Sends weight pushes from one learner rank; only the training thread uses it.

    Args:
        model: a Hugging Face model under `fully_shard` (or not sharded at all), the same on every rank.
        host: address on which learner rank 0 listens for the rendezvous.
        advertise: address at which rollout ranks reach learner rank 0, if that is not `host`.
        exclude: names of parameters that are not part of the policy (a value head); they are not sent.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        host: str = "127.0.0.1",
        advertise: str = "",
        exclude: Collection[str] = (),
    ) -> None:
        self._device, self._host = device, host
        self._advertise = advertise or host
        self._exclude = frozenset(exclude) | _tied_names(model)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._index = ParameterIndex(model)
        names = {path: _state_dict_name(path) for path in self._index.current()}
        self._names = {path: name for path, name in names.items() if name not in self._exclude}
        self._store: Any = None
        self._group: WeightGroup | None = None
        self._digester = TensorDigester(device)
        self._atoms: list[Atom] = []
        self._places = b""
        self._supplies: list[Supply] = []
        self._job = AddressCache[DigestJob]()

    def layout(self) -> RankLayout:
        """Returns the slices that this rank holds, under the names of the Hugging Face state dict.

        Raises:
            ModelError: a parameter's shard is not a box, or the dtypes are mixed.
        """
        slices = []
        dtypes: dict[torch.dtype, str] = {}
        for name, param in self._parameters().items():
            dtypes.setdefault(param.dtype, name)
            if not param.ndim:
                raise ModelError(f"{name}: a parameter without dimensions cannot be published; exclude it")
            box = own_box(param, name)
            if box.volume:
                offset = (0,) * len(box.start)
                shape = tuple(param.shape)
                slices.append(TensorSlice(name=name, global_shape=shape, box=box, param=name, offset=offset))
        if len(dtypes) != 1:
            raise ModelError(
                f"the policy's parameters must share one dtype, got {dtypes} (dtype: an example)"
            )
        dtype = str(next(iter(dtypes))).removeprefix("torch.")
        return RankLayout(dtype=dtype, slices=tuple(slices), place=place_of(self._device))

    def open_store(self) -> tuple[str, int]:
        """Opens the rendezvous store on learner rank 0, once; returns its address for the group spec."""
        if self._rank != 0:
            raise WeightSyncError(f"only learner rank 0 has a store, this is rank {self._rank}")
        if self._store is None:
            self._store = open_store(self._host, _STORE_TIMEOUT_S)
        return self._advertise, self._store.port

    def join(self, spec: WeightGroupSpec) -> None:
        """Leaves the current group, if any, and joins the group that `spec` describes, with all others.

        Raises:
            WeightSyncError: the spec does not fit this rank.
            DeadlineError, PeerLostError: a member did not join within `spec.timeout_s`, or went away.
        """
        self.leave()
        if self._rank == 0 and self._store is None:
            raise WeightSyncError(
                "learner rank 0 has no store; call open_store() for the address in the spec"
            )
        self._atoms = digest_atoms(spec.expanded_rollout_layouts())
        self._places = pack_places(self._atoms)
        needs = [
            Need(name=atom.name, global_shape=atom.global_shape, box=atom.box, label="the digest")
            for atom in self._atoms
        ]
        self._supplies = assign_sources(spec.learner_layouts, needs).of_source(self._rank)
        self._job.clear()
        self._group = group_kind(spec).form(
            spec,
            rank=self._rank,
            layout=self.layout(),
            device=self._device,
            timeout_s=spec.timeout_s,
            store=self._store,
        )
        self._warm_up(self._group)

    @torch.no_grad()
    def _warm_up(self, group: WeightGroup) -> None:
        shards = {name: _local(param) for name, param in self._parameters().items()}
        for packing in group.copies(shards):
            packing.warm_up()
        self._digest_job(shards, DTYPES[group.spec.wire_dtype]).warm_up()

    @torch.no_grad()
    def publish(self, version: int, *, timeout_s: float | None = None) -> PushReceipt:
        """Sends this rank's part of the current parameters; every member of the group must take part.

        Returns:
            This rank's receipt. Rank 0's contains the report for all learner ranks, the others contain none.

        Raises:
            WeightSyncError: no group has been joined, or it was aborted.
            DeadlineError, PeerLostError: a rollout rank stalled or died. This rank has left the group.
        """
        group = self._group
        if group is None:
            raise WeightSyncError(f"version {version} cannot be published: no weight group has been joined")
        deadline = Deadline(f"weight push of version {version}", timeout_s or group.spec.timeout_s)
        shards = {name: _local(param) for name, param in self._parameters().items()}
        job = self._digest_job(shards, DTYPES[group.spec.wire_dtype])
        shares: list[torch.Tensor] = []
        began = time.perf_counter()
        try:
            group.send(shards, deadline, lambda: shares.append(job.run()))
            transfer_ms = 1e3 * (time.perf_counter() - began)
            totals = group.sum_at_first(shares[0], deadline)
        except BaseException:
            self.leave()
            raise
        return PushReceipt(
            version=version,
            reports=(self._report(version, totals),) if self._rank == 0 else (),
            num_bytes=group.plan.sent_bytes(self._rank),
            relayed_bytes=0,
            transfer_ms=transfer_ms,
            digest_ms=job.last_ms,
            peak_extra_bytes=group.staging_bytes,
        )

    def leave(self) -> None:
        """Closes the connections of the current group; waiting peers get an error. May be repeated."""
        if self._group is not None:
            self._group.abort()
        self._group = None

    def _digest_job(self, shards: dict[str, torch.Tensor], wire_dtype: torch.dtype) -> DigestJob:
        """Returns the job that computes digests; made once per group, and again when a shard has moved."""

        def make() -> DigestJob:
            parts = [
                DigestPart(
                    name=part.name,
                    global_shape=part.global_shape,
                    box=supply.box,
                    values=shards[part.param][part.to_local(supply.box).slices],
                    output=supply.need,
                )
                for supply in self._supplies
                for part in (supply.source_slice,)
            ]
            return DigestJob(self._digester, parts, len(self._atoms), wire_dtype)

        return self._job.get(shards.values(), make)

    def _report(self, version: int, totals: torch.Tensor) -> DigestReport:
        values = self._digester.read_array(totals)
        return DigestReport(rank="learner", version=version, places=self._places, values=values)

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Returns the policy's sharded parameters by state-dict name."""
        for module in self._sharded:
            # After a forward without gradients the root stays gathered and shows stale full tensors.
            module.reshard()
        parameters = self._index.current()
        return {name: parameters[path] for path, name in self._names.items()}


def _tied_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of tied parameters, for which the checkpoint holds no tensor of their own."""
    config = getattr(model, "config", None)
    if config is None:
        return frozenset()
    config = config.get_text_config()
    return frozenset({"lm_head.weight"}) if getattr(config, "tie_word_embeddings", False) else frozenset()


def _state_dict_name(path: str) -> str:
    for wrapper in _WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def _local(param: torch.Tensor) -> torch.Tensor:
    # Without gradients `to_local` returns the same, but takes 4 microseconds per parameter.
    return param._local_tensor if isinstance(param, DTensor) else param.detach()
