"""Forms the group that carries weights, pushes over it, and takes it down.

The group is separate from torch's default one, so that learner and inference engine are independent of each
other. A push goes round by round, with two staging slots on each side:

    learner     pack round k into slot k % 2 (once the send of k - 2 is done); send it; do not wait
    rollout     post the receive of round k + 1 and the relaying of round k; wait for round k; scatter it

On CUDA the caller's stream packs and scatters, NCCL's own stream transfers, round after round without a gap,
and a `wait` makes one stream wait for the other: the same order of calls overlaps all three. With gloo a
`wait` blocks the thread, and staging is in host memory even if the parameters are on a GPU. Sides that share
a GPU use gloo, because NCCL refuses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError, WeightSyncError
from paceline.core.members import SOME_MEMBER, LocalPart, Peer
from paceline.weights.geometry.layout import RankLayout, same_slices
from paceline.weights.geometry.parameters import AddressCache
from paceline.weights.geometry.views import Views
from paceline.weights.plan.plan import TransferPlan
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.transport.connecting import Connecting
from paceline.weights.transport.copies import CopyJob
from paceline.weights.transport.rendezvous import (
    Abandonment,
    Deadline,
    await_all,
    connect_store,
    make_process_group,
)
from paceline.weights.transport.staging import NUM_SLOTS, Slice, lay_out

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GREETING_BYTES: Final = 128
_TAG_GREETING, _TAG_DIGESTS, _TAG_ROUND = 1, 2, 16

Message = tuple[torch.Tensor, int, int]
"""A contiguous tensor, the peer's group rank, and a tag that is unique among the pair's pending messages"""


class WeightGroup:
    """Represents a rank in the weight group of one membership epoch.

    Every method that waits takes a Deadline. Any error aborts the group for good.
    """

    def __init__(
        self,
        spec: WeightGroupSpec,
        rank: int,
        plan: TransferPlan,
        device: torch.device,
        abandonment: Abandonment,
    ) -> None:
        self.spec, self.rank, self.plan, self.device = spec, rank, plan, device
        self._process_group: Any = None
        self._abandonment = abandonment
        self._pending: list[Pending] = []
        self.layout = lay_out(plan, spec.num_learners, rank)
        self._wire_device = device if spec.backend == "nccl" else torch.device("cpu")
        self._slots: list[torch.Tensor] = []
        self._copies = AddressCache[list[CopyJob]]()
        self._take_staging()

    @classmethod
    def form(
        cls,
        spec: WeightGroupSpec,
        *,
        rank: int,
        layout: RankLayout,
        device: torch.device,
        timeout_s: float,
        store: Store | None = None,
    ) -> WeightGroup:
        """Joins the group; returns when every rank has joined, is connected and has the same plan.

        Args:
            rank: group rank; learners come first.
            layout: this rank's current layout; must equal its layout in the spec.
            store: learner rank 0's own store; the other ranks connect to it.

        Raises:
            WeightSyncError: the spec describes another model, there is no memory for staging, or a peer
                computed another plan. The other ranks are told.
            DeadlineError, PeerLostError: a member did not join in time, or was lost.
        """
        deadline = Deadline("weight group join", timeout_s)
        store = store or connect_store(spec, deadline)
        # A separate connection, because the process group blocks its own.
        abandonment = Abandonment(store.clone(), spec.epoch)  # type: ignore[attr-defined]
        try:
            if not same_slices(spec.layout(rank), layout):
                raise WeightSyncError(
                    f"{spec.rank_ref(rank)}: the group spec describes other slices than this rank has; "
                    "it was made from an older description or for another rank"
                )
            # Allocated before the roll call: once NCCL connects, it waits for a rank that has failed.
            group = cls(spec, rank, spec.build_plan(), device, abandonment)
        except BaseException as error:
            abandonment.report(spec.rank_ref(rank), error)
            raise
        group.announce(store)
        await_all(spec, rank, store, deadline)
        group._connect(store, deadline)
        return group

    def announce(self, store: Store) -> None:
        """Publishes what the other ranks need before they connect; here nothing."""

    @property
    def staging_bytes(self) -> int:
        """Staging memory in bytes, allocated from `form` until `abort`."""
        return sum(slot.nbytes for slot in self._slots)

    def copies(self, parameters: Mapping[str, torch.Tensor]) -> list[CopyJob]:
        """Returns the copies of each round between this rank's parameters and staging.

        A learner packs its shards, a rollout rank scatters into its parameters. The copies are made again
        when a parameter has moved.
        """

        def make() -> list[CopyJob]:
            is_learner = self.rank < self.spec.num_learners
            return [
                CopyJob(own, staged) if is_learner else CopyJob(staged, own)
                for own, staged in self.layout.views(parameters, self._slots)
            ]

        return self._copies.get(parameters.values(), make)

    def staged(self, number: int) -> Views:
        """Returns the elements of a round's pieces in staging."""
        return self.layout.staged(number, self._slots)

    def send(
        self,
        shards: Mapping[str, torch.Tensor],
        deadline: Deadline,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Casts, packs and sends every round: a learner rank's part of a push.

        Args:
            shards: this rank's shards by name, as its layout describes them.
            meanwhile: called once while the last rounds are being transferred.
        """
        pending: list[Pending] = []
        with self._aborting():
            for number, packing in enumerate(self.copies(shards)):
                if number >= NUM_SLOTS:
                    pending[number - NUM_SLOTS].wait(deadline)
                packing.run()
                pending.append(self._post_round(number, deadline))
            if meanwhile is not None:
                meanwhile()
            for work in pending[-NUM_SLOTS:]:
                work.wait(deadline)
            self._finish(deadline)

    def receive(self, deadline: Deadline) -> Iterator[int]:
        """Yields each round's number when its elements are in staging: a rollout rank's part of a push.

        They stay there until the next round is requested. Meanwhile this rank sends what it relays.
        """
        with self._aborting():
            following = self._post_round(0, deadline)
            for number in range(self.layout.num_rounds):
                current = following
                if not current.on_stream:
                    # The data to relay must have arrived, and earlier sends from its slot must have ended.
                    # NCCL keeps this order by itself.
                    current.wait(deadline)
                following = self._post_round(number + 1, deadline)
                current.wait(deadline)
                yield number
            self._finish(deadline)

    def sum_at_first(self, values: torch.Tensor, deadline: Deadline) -> torch.Tensor:
        """Adds up int64 vectors of the learner ranks; rank 0 gets the sum, the others get their own back."""
        learners = range(1, self.spec.num_learners)
        values = values.to(self._wire_device)
        with self._aborting():
            if self.rank != 0:
                self._post([(values, 0, _TAG_DIGESTS)], [], deadline).wait(deadline)
                self._finish(deadline)
                return values
            shares = [torch.empty_like(values) for _ in learners]
            receives = [(share, peer, _TAG_DIGESTS) for share, peer in zip(shares, learners, strict=True)]
            self._post([], receives, deadline).wait(deadline)
            self._finish(deadline)
        return torch.stack([values, *shares]).sum(dim=0)

    def fail(self, error: BaseException) -> None:
        """Aborts the group; cancels the push if the error is this rank's own."""
        self.abort()
        # A rank that stops receiving reports its own error.
        if not isinstance(error, GeneratorExit):
            self._abandonment.report(self.spec.rank_ref(self.rank), error)

    def abort(self) -> None:
        """Closes all connections and frees staging; waiting peers get an error. May be repeated."""
        for pending in self._pending:
            pending.drop()
        self._pending = []
        if self._process_group is not None:
            self._process_group.abort()
        self._process_group = None
        self._slots = []
        self._copies.clear()

    def _take_staging(self) -> None:
        self._slots = self._allocate(self.layout.slot_sizes)

    def _allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        pinned = self.device.type == "cuda" and self._wire_device.type == "cpu"
        dtype = DTYPES[self.spec.wire_dtype]
        try:
            return [
                torch.empty(size, dtype=dtype, device=self._wire_device, pin_memory=pinned) for size in sizes
            ]
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self.spec.rank_ref(self.rank)} has no memory for {sum(sizes) * dtype.itemsize >> 20} "
                f"MiB of staging on {self._wire_device}: {error}; lower weights.staging_mib"
            ) from error

    def _connect(self, store: Store, deadline: Deadline) -> None:
        """Makes the process group and its connections, after all ranks have answered the roll call.

        Uses a thread: if a rank died now, NCCL would wait forever, and no call could end the wait.
        """

        def connect() -> None:
            try:
                self._make_groups(store, deadline)
            except PacelineError:
                raise
            except RuntimeError as error:
                raise deadline.translate(error, SOME_MEMBER) from error
            self._greet(deadline)

        with self._aborting():
            connecting = Connecting(connect, self.device)
            try:
                connecting.wait(deadline, self._abandonment)
            except BaseException:
                if connecting.is_alive():
                    # An abort would wait too, so the thread keeps the process group.
                    self._process_group = None
                raise

    def _make_groups(self, store: Store, deadline: Deadline) -> None:
        self._process_group = make_process_group(self.spec, self.rank, store, deadline)

    def _post_round(self, number: int, deadline: Deadline) -> Pending:
        """Starts this rank's sends and receives of a round; none if there is no such round."""
        if number >= self.layout.num_rounds:
            return self._post([], [], deadline)
        return self._post(*self._round_messages(number), deadline)

    def _round_messages(self, number: int) -> tuple[list[Message], list[Message]]:
        """Returns the messages that this rank sends in a round, and those that it receives."""
        sends = [self._message(part, part.key.receiver) for part in self.layout.sends[number]]
        receives = [self._message(part, part.key.sender) for part in self.layout.receives[number]]
        return sends, receives

    def _message(self, part: Slice, peer: int) -> Message:
        return self._slots[part.slot][part.begin : part.begin + part.size], peer, self._tag_of(part)

    def _tag_of(self, part: Slice) -> int:
        return _TAG_ROUND + part.key.round * self.plan.num_channels + part.key.channel

    def _wire_rank(self, rank: int) -> int:
        """Returns the process group's number of the rank that receives messages for a group rank."""
        return rank

    def _post(self, sends: Sequence[Message], receives: Sequence[Message], deadline: Deadline) -> Pending:
        pending = Pending(on_stream=self.spec.backend == "nccl")
        self._track(pending)
        calls = [("send", *message) for message in sends] + [("recv", *message) for message in receives]
        if not calls:
            return pending
        if pending.on_stream:
            # One NCCL group per round: outside a group each pair would get its own communicator.
            self._live(self._process_group)._start_coalescing()
        for call, tensor, peer, tag in calls:
            try:
                act = getattr(self._live(self._process_group), call)
                pending.add(act([tensor], self._wire_rank(peer), tag), self.spec.rank_ref(peer))
            except RuntimeError as error:
                raise deadline.translate(error, self.spec.rank_ref(peer)) from error
        if pending.on_stream:
            pending.drop()
            try:
                pending.add(self._live(self._process_group)._end_coalescing(), SOME_MEMBER)
            except RuntimeError as error:
                raise deadline.translate(error, SOME_MEMBER) from error
        return pending

    def _track(self, pending: Pending) -> None:
        """Records transfers that an abort must drop."""
        self._pending = [other for other in self._pending if not other.done] + [pending]

    def _live(self, process_group: Any) -> Any:
        """Returns a process group of this rank; raises WeightSyncError for None: it was aborted."""
        if process_group is None:
            raise WeightSyncError(
                f"{self.spec.rank_ref(self.rank)}: the weight group was aborted; form a new one"
            )
        return process_group

    def _greet(self, deadline: Deadline) -> None:
        """Exchanges a small message per pair that will communicate: connects them and compares plans."""
        own = torch.zeros(_GREETING_BYTES, dtype=torch.uint8)
        own[:32] = torch.frombuffer(bytearray(self.plan.fingerprint), dtype=torch.uint8)
        own = own.to(self._wire_device)
        targets, origins = self._greeting_pairs()
        received = [(torch.empty_like(own), origin, _TAG_GREETING) for origin in origins]
        sends = [(own, to, _TAG_GREETING) for to in targets]
        self._post(sends, received, deadline).wait(deadline)
        self._finish(deadline)
        for greeting, origin, _ in received:
            self._check_plan(bytes(greeting[:32].tolist()), origin)

    def _check_plan(self, fingerprint: bytes, origin: int) -> None:
        if fingerprint != self.plan.fingerprint:
            raise WeightSyncError(
                f"{self.spec.rank_ref(self.rank)} and {self.spec.rank_ref(origin)} computed different "
                "transfer plans; both must run the same version of Paceline and get the same spec"
            )

    def _greeting_pairs(self) -> tuple[list[int], list[int]]:
        """Returns the ranks to which this one sends, and those from which it receives."""
        num_learners, world = self.spec.num_learners, self.spec.world_size
        learner = self.rank < num_learners
        targets = [*range(num_learners, world), *([0] if self.rank else [])] if learner else []
        relaying = self.plan.relay_pairs_of(self.rank)
        targets += [to for origin, to in relaying if origin == self.rank]
        origins = [*(range(1, num_learners) if self.rank == 0 else range(0 if learner else num_learners))]
        origins += [origin for origin, to in relaying if to == self.rank]
        return targets, origins

    def _finish(self, deadline: Deadline) -> None:
        """Waits until the device has finished everything that was queued; returns at once on the CPU."""
        if self.device.type != "cuda":
            return
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        # NCCL's transfers are queued too, so any member may be the cause of a hang.
        peer = SOME_MEMBER if self.spec.backend == "nccl" else LocalPart.DEVICE
        # CUDA has no wait with a deadline, hence the polling.
        self._abandonment.rest()
        while not done.query():
            deadline.remaining(peer)
            self._abandonment.check(deadline.phase)
            time.sleep(50e-6)

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Aborts the group if the block fails, so that no peer waits for a rank that has given up.

        NCCL's peers do not notice an abort, so they are told through the rendezvous store.
        """
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise


class Pending:
    """Pending transfers, each with its peer. Waits for each only once: gloo hangs on a second wait."""

    def __init__(self, *, on_stream: bool) -> None:
        self._works: list[tuple[Any, Peer]] = []
        self.on_stream = on_stream

    def add(self, work: Any, peer: Peer) -> None:
        """Adds a transfer, with the peer to blame if it fails."""
        self._works.append((work, peer))

    def wait(self, deadline: Deadline) -> None:
        """Waits until all have ended; on a stream, makes the stream wait."""
        while self._works:
            work, peer = self._works.pop(0)
            try:
                if self.on_stream:
                    # In a group without a watchdog, `wait` blocks the caller.
                    work.synchronize()
                else:
                    work.wait(deadline.remaining(peer))
            except RuntimeError as error:
                raise deadline.translate(error, peer) from error
            finally:
                # The traceback of an error would keep the transfer, and so the connections, alive.
                del work

    @property
    def done(self) -> bool:
        """Whether all transfers were waited for."""
        return not self._works

    def drop(self) -> None:
        """Forgets all transfers still pending."""
        self._works = []
