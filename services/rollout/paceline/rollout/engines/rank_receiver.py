"""One rollout rank's part of weight pushes, for any engine: describe, join, receive, digest, leave.

There are two paths into the model. The direct path scatters every slice into the live parameters, in place,
so that captured CUDA graphs stay valid. The general path, for models that cannot be written in place,
assembles full tensors, one after another, and passes them to the engine's own loader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from paceline.core.errors import WeightSyncError
from paceline.core.members import RankRef
from paceline.weights.digest.agreement import DigestReport, SliceDigest, pack_places
from paceline.weights.digest.job import DigestJob, DigestPart, TensorDigester
from paceline.weights.geometry.layout import RankLayout, TensorSlice
from paceline.weights.geometry.parameters import AddressCache, ParameterIndex, part_of
from paceline.weights.geometry.views import Views
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.receipt import PushReceipt
from paceline.weights.transport.group import DTYPES, WeightGroup
from paceline.weights.transport.place import place_of
from paceline.weights.transport.rendezvous import Deadline
from paceline.weights.transport.shared_group import group_kind

Describe = Callable[[nn.Module], RankLayout]
LoadFull = Callable[[Iterator[tuple[str, torch.Tensor]]], None]


class RankReceiver:
    """Receives pushes on one tensor-parallel rank.

    Args:
        describe: returns the slices that the model needs, or `full_tensors` if it takes the general path.
        load_full: loads full tensors under their names in the learner's state dict; called only on the
            general path.

    `rank_ref` is this rank's place in its group, from the first join on.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, describe: Describe, load_full: LoadFull
    ) -> None:
        self._model, self._device = model, device
        self._describe, self._load_full = describe, load_full
        self._digester = TensorDigester(device)
        self.rank_ref: RankRef | None = None
        self._group: WeightGroup | None = None
        self._layout: RankLayout | None = None
        self._places: bytes | None = None
        self._job = AddressCache[DigestJob]()
        self._index = ParameterIndex(model)

    def describe(self) -> RankLayout:
        """Returns the slices that this rank needs, and its place."""
        if self._layout is None:
            self._layout = self._describe(self._model).at(place_of(self._device))
        return self._layout

    def join(self, spec: WeightGroupSpec, rank: int, timeout_s: float) -> None:
        """Leaves the current group, if any, and joins the group of `spec` as group rank `rank`."""
        self.leave()
        # An engine may repack its weights after the first describe, so describe again once per group.
        self._layout, self._places, self._index = None, None, ParameterIndex(self._model)
        self._job.clear()
        if not spec.num_learners <= rank < spec.world_size:
            raise WeightSyncError(
                f"group rank {rank} is no rollout rank: these are {spec.num_learners}..{spec.world_size - 1}"
            )
        self.rank_ref = spec.rank_ref(rank)
        self._group = group_kind(spec).form(
            spec, rank=rank, layout=self.describe(), device=self._device, timeout_s=timeout_s
        )
        slices = self.describe().slices
        if slices:
            self._warm_up(self._group, slices)

    @torch.no_grad()
    def receive(self, version: int, timeout_s: float) -> PushReceipt:
        """Receives this rank's part of one push.

        After an error the model may be a mixture of versions: it must not be served.
        """
        group = self._group
        if group is None:
            raise WeightSyncError(f"version {version} cannot be received: no weight group has been joined")
        deadline = Deadline(f"receiving weights of version {version}", timeout_s)
        began = time.perf_counter()
        try:
            if self.describe().full_tensors:
                slices = self._receive_full(group, deadline)
            else:
                copies = group.copies(self._index.current())
                for number in group.receive(deadline):
                    copies[number].run()
                slices = []
        except BaseException as error:
            # NCCL's peers do not notice that this rank has stopped.
            group.fail(error)
            self.leave()
            raise
        received = time.perf_counter()
        name = str(group.spec.rank_ref(group.rank))
        report = (
            DigestReport.of(rank=name, version=version, slices=slices)
            if slices
            else self.digest(version, name)
        )
        rank = group.rank - group.spec.num_learners
        return PushReceipt(
            version=version,
            reports=(report,),
            num_bytes=group.plan.received_bytes(rank),
            relayed_bytes=group.plan.relayed_bytes(rank),
            transfer_ms=1e3 * (received - began),
            digest_ms=1e3 * (time.perf_counter() - received),
            peak_extra_bytes=group.staging_bytes,
        )

    @torch.no_grad()
    def digest(self, version: int, rank_name: str) -> DigestReport:
        """Returns digests of all slices in the live parameters; `version` and `rank_name` label them."""
        slices = self.describe().slices
        if not slices:
            raise WeightSyncError(
                f"{rank_name}: the model's weights are not pushed in place, so its parameters "
                "cannot be compared with the checkpoint's tensors; digests are computed during the receive"
            )
        totals = self._digest_job(slices, self._index.current()).run()
        if self._places is None:
            self._places = pack_places(slices)
        values = self._digester.read_array(totals)
        return DigestReport(rank=rank_name, version=version, places=self._places, values=values)

    def _digest_job(self, slices: tuple[TensorSlice, ...], params: dict[str, nn.Parameter]) -> DigestJob:
        """Returns the cached job; makes it again when a parameter's storage has moved."""

        def make() -> DigestJob:
            parts = [
                DigestPart(
                    name=part.name,
                    global_shape=part.global_shape,
                    box=part.box,
                    values=part_of(params, part.param, part.local_box),
                    output=index,
                )
                for index, part in enumerate(slices)
            ]
            return DigestJob(
                self._digester, parts, len(parts), DTYPES[self.describe().dtype], are_received=True
            )

        return self._job.get(params.values(), make)

    def leave(self) -> None:
        """Closes the connections of the current group. May be repeated."""
        if self._group is not None:
            self._group.abort()
        self._group = None

    @torch.no_grad()
    def _warm_up(self, group: WeightGroup, slices: tuple[TensorSlice, ...]) -> None:
        params = self._index.current()
        self._digest_job(slices, params).warm_up()
        for copies in group.copies(params):
            copies.warm_up()

    def _receive_full(self, group: WeightGroup, deadline: Deadline) -> list[SliceDigest]:
        """Loads full tensors as they become complete; digests each before the loader gets it."""
        totals: list[tuple[TensorSlice, torch.Tensor]] = []
        layout = group.spec.expanded_rollout_layouts()[group.rank - group.spec.num_learners]
        parts = {part.name: part for part in layout.slices}
        dtype = DTYPES[group.spec.wire_dtype]

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in _complete_tensors(group, deadline, parts, self._device):
                part = parts[name]
                total = self._digester.add(name, part.global_shape, part.box, tensor, dtype)
                totals.append((part, total))
                yield name, tensor

        self._load_full(tensors())
        if len(totals) != len(parts):
            raise WeightSyncError(
                f"the engine's loader took {len(totals)} of {len(parts)} tensors; the model is partly loaded"
            )
        values = self._digester.finish([total for _, total in totals])
        return [
            SliceDigest(name=part.name, global_shape=part.global_shape, box=part.box, value=value)
            for (part, _), value in zip(totals, values, strict=True)
        ]


def _complete_tensors(
    group: WeightGroup, deadline: Deadline, parts: dict[str, TensorSlice], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Assembles pieces and yields each tensor once it is complete; the tensor then belongs to the caller."""
    building: dict[str, torch.Tensor] = {}
    dtype, places = DTYPES[group.spec.wire_dtype], group.layout.places
    missing = np.array([parts[name].box.volume for name in places.names], dtype=np.int64)
    for number in group.receive(deadline):
        pieces = group.layout.pieces(number)
        used, own = np.unique(places.name[pieces], return_inverse=True)
        names = [places.names[index] for index in used.tolist()]
        for name in names:
            if name not in building:
                building[name] = torch.empty(parts[name].global_shape, dtype=dtype, device=device)
        shape = places.shape[pieces]
        targets = Views.of_boxes([building[name] for name in names], own, places.start[pieces], shape)
        for target, values in zip(targets, group.staged(number), strict=True):
            target.copy_(values)
        np.subtract.at(missing, places.name[pieces], shape.prod(axis=1))
        for name in [places.names[index] for index in used[missing[used] == 0].tolist()]:
            yield name, building.pop(name)
