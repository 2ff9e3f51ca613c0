"""Forms weight groups in which learner ranks stand in for rollout ranks on the same GPU or host.

A rollout rank that shares a GPU with a learner rank exchanges no messages with other ranks: the learner rank
receives its elements into staging that both can access, and the two tell each other their progress.

    learner     pack round k; wait until the rollout rank has scattered k - 2; copy its own part, receive the
                parts of other learners; when all have arrived: "ready k"
    rollout     wait for "ready k"; scatter it; when that is done: "free k"

Plan, rounds and places in staging are as in any other group. A rollout rank without a learner rank at its
place exchanges messages as in any other group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.core.errors import WeightSyncError
from paceline.weights.plan.spec import WeightGroupSpec
from paceline.weights.transport.group import DTYPES, Message, Pending, WeightGroup
from paceline.weights.transport.rendezvous import Deadline, epoch_store, make_signal_group
from paceline.weights.transport.shared import SharedStaging, Ticket, aligned
from paceline.weights.transport.staging import NUM_SLOTS, Slice, StagingLayout, lay_out

_TICKET: Final = "staging/{rank}"
_TAG_READY, _TAG_FREE, _NUM_SIGNALS = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind:
    """A rollout rank for which this learner rank stands in; it takes part in `num_rounds` rounds."""

    rank: int
    num_rounds: int
    layout: StagingLayout
    staging: SharedStaging
    slots: list[torch.Tensor]


class SharedGroup(WeightGroup):
    """Represents a rank in a group with stand-ins; see `group_kind`."""

    def _take_staging(self) -> None:
        self._signals: Any = None
        self._behind: list[_Behind] = []
        self._opened: SharedStaging | None = None
        self._in_front = self.spec.stand_ins.get(self.rank)
        if self._in_front is not None:
            return  # opened once the learner rank has allocated it
        behind = {
            rank: lay_out(self.plan, self.spec.num_learners, rank)
            for rank, learner in self.spec.stand_ins.items()
            if learner == self.rank
        }
        # This rank takes part in every round of the ranks behind it.
        rounds = max(layout.num_rounds for layout in (self.layout, *behind.values()))
        self.layout = self.layout.padded(rounds)
        super()._take_staging()
        try:
            for rank, layout in behind.items():
                self._behind.append(self._allocate_for(rank, layout, rounds))
        except BaseException:
            self.abort()
            raise

    def _allocate_for(self, rank: int, layout: StagingLayout, rounds: int) -> _Behind:
        dtype = DTYPES[self.spec.wire_dtype]
        num_bytes = sum(aligned(size * dtype.itemsize) for size in layout.slot_sizes)
        try:
            staging = SharedStaging.allocate(num_bytes, self.device)
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"{self.spec.rank_ref(self.rank)} has no memory for {num_bytes >> 20} MiB of staging that it "
                f"shares with {self.spec.rank_ref(rank)}: {error}; lower weights.staging_mib"
            ) from error
        slots = staging.slots(layout.slot_sizes, dtype)
        return _Behind(
            rank=rank,
            num_rounds=layout.num_rounds,
            layout=layout.padded(rounds),
            staging=staging,
            slots=slots,
        )

    @property
    def staging_bytes(self) -> int:
        """Staging memory in bytes that this rank allocated; opened memory counts at the learner rank."""
        if self._in_front is not None:
            return 0
        return super().staging_bytes + sum(behind.staging.ticket.num_bytes for behind in self._behind)

    def abort(self) -> None:
        """Aborts the group and closes the shared memory."""
        super().abort()
        signals, self._signals = self._signals, None
        if signals is not None:
            signals.abort()
        behind, self._behind = self._behind, []
        for rank in behind:
            rank.slots.clear()
            rank.staging.close()
        if self._opened is not None:
            if self._on_gpu:
                # Only this process's own copies may still read from it, and these finish soon.
                torch.cuda.current_stream(self.device).synchronize()
            self._opened.close()
        self._opened = None

    # --- connecting

    def announce(self, store: Store) -> None:
        """Tells the rollout ranks where their staging is, before the roll call."""
        store = epoch_store(store, self.spec.epoch)
        for behind in self._behind:
            words = [self.plan.fingerprint.hex(), behind.staging.ticket.to_bytes().hex()]
            store.set(_TICKET.format(rank=behind.rank), " ".join(words))

    def _make_groups(self, store: Store, deadline: Deadline) -> None:
        if self._in_front is not None:
            self._open(store)
        self._signals = make_signal_group(self.spec, self.rank, store, deadline)
        if self._in_front is None:
            super()._make_groups(store, deadline)

    def _open(self, store: Store) -> None:
        words = epoch_store(store, self.spec.epoch).get(_TICKET.format(rank=self.rank)).decode().split()
        fingerprint, ticket = (bytes.fromhex(word) for word in words)
        self._check_plan(fingerprint, self.spec.stand_ins[self.rank])
        self._opened = SharedStaging.open(Ticket.from_bytes(ticket), self.device)
        self._slots = self._opened.slots(self.layout.slot_sizes, DTYPES[self.spec.wire_dtype])

    def _greeting_pairs(self) -> tuple[list[int], list[int]]:
        if self._in_front is not None:
            return [], []
        learners = range(self.spec.num_learners)
        others = [rank for rank in learners if rank != self.rank]
        if self.rank not in learners:
            return [], others
        return [rank for rank in self.spec.wire_ranks if rank != self.rank], others

    # --- a push

    def send(
        self,
        shards: Mapping[str, torch.Tensor],
        deadline: Deadline,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Does a learner rank's part of a push, and the transfers for the rollout ranks behind it."""
        with self._aborting():
            following: Callable[[], None] | None = None
            for number, packing in enumerate(self.copies(shards)):
                packing.run()
                self._await_free(number, deadline)
                self._copy_own(number)
                complete = self._completion(number, self._post_round(number, deadline), deadline)
                if following is not None:
                    following()
                following = complete
            if meanwhile is not None:
                meanwhile()
            if following is not None:
                following()
            self._finish(deadline)

    def receive(self, deadline: Deadline) -> Iterator[int]:
        """Yields each round's number when its elements are in staging: a rollout rank's part of a push."""
        in_front = self._in_front
        if in_front is None:
            yield from super().receive(deadline)
            return
        with self._aborting():
            freeing: list[Pending] = []
            for number in range(self.layout.num_rounds):
                self._signal([], [in_front], number, _TAG_READY, deadline).wait(deadline)
                yield number
                self._finish(deadline)
                if number + NUM_SLOTS < self.layout.num_rounds:
                    freeing.append(self._signal([in_front], [], number, _TAG_FREE, deadline))
            for pending in freeing:
                pending.wait(deadline)

    def _await_free(self, number: int, deadline: Deadline) -> None:
        """Waits until the rollout ranks behind this rank no longer read the slot of a round."""
        if number >= NUM_SLOTS:
            waiting = self._taking_part(number)
            self._signal([], waiting, number - NUM_SLOTS, _TAG_FREE, deadline).wait(deadline)

    def _taking_part(self, number: int) -> list[int]:
        """Returns the rollout ranks behind this rank that take part in a round."""
        return [behind.rank for behind in self._behind if number < behind.num_rounds]

    def _copy_own(self, number: int) -> None:
        """Copies this rank's own elements to the rollout ranks behind it."""
        places = {part.key: part for part in self.layout.sends[number]}
        for behind in self._behind:
            for part in behind.layout.receives[number]:
                if part.key.sender == self.rank:
                    _view(behind.slots, part).copy_(_view(self._slots, places[part.key]), non_blocking=True)

    def _round_messages(self, number: int) -> tuple[list[Message], list[Message]]:
        """Returns the messages of a round, without those to a rollout rank behind the sender."""
        behind = {other.rank for other in self._behind}
        sends, receives = super()._round_messages(number)
        sends = [message for message in sends if message[1] not in behind]
        for other in self._behind:
            for part in other.layout.receives[number]:
                if part.key.sender != self.rank:
                    receives.append((_view(other.slots, part), part.key.sender, self._tag_of(part)))
        return sends, receives

    def _tag_of(self, part: Slice) -> int:
        # One learner rank may receive a round's messages to several rollout ranks from the same sender.
        return super()._tag_of(part) * self.spec.world_size + part.key.receiver

    def _wire_rank(self, rank: int) -> int:
        return self.spec.wire_ranks.index(self.spec.stand_ins.get(rank, rank))

    def _completion(self, number: int, pending: Pending, deadline: Deadline) -> Callable[[], None]:
        """Returns a call to make after the next round starts: it awaits this round and signals "ready"."""
        copied = torch.cuda.current_stream(self.device).record_event() if self._on_gpu else None

        def complete() -> None:
            if copied is None:
                pending.wait(deadline)
            else:
                # On a separate stream: the next round's packing must not wait for this round's transfer.
                with torch.cuda.stream(self._completing):
                    self._completing.wait_event(copied)
                    pending.wait(deadline)
                    self._finish(deadline)
            self._signal(self._taking_part(number), [], number, _TAG_READY, deadline).wait(deadline)

        return complete

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @functools.cached_property
    def _completing(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def _signal(
        self, to: Sequence[int], origins: Sequence[int], number: int, kind: int, deadline: Deadline
    ) -> Pending:
        """Exchanges "ready" or "free" of a round with other ranks."""
        pending = Pending(on_stream=False)
        signals = self._live(self._signals)
        self._track(pending)
        tag = _NUM_SIGNALS * number + kind
        for call, peers in (("send", to), ("recv", origins)):
            for peer in peers:
                word = torch.zeros(1, dtype=torch.uint8, device="cpu")  # the default may be the GPU
                try:
                    pending.add(getattr(signals, call)([word], peer, tag), self.spec.rank_ref(peer))
                except RuntimeError as error:
                    raise deadline.translate(error, self.spec.rank_ref(peer)) from error
        return pending


def _view(slots: Sequence[torch.Tensor], part: Slice) -> torch.Tensor:
    return slots[part.slot][part.begin : part.begin + part.size]


def group_kind(spec: WeightGroupSpec) -> type[WeightGroup]:
    """Returns the kind of group that `spec` describes: with stand-ins, or without."""
    return SharedGroup if spec.shared else WeightGroup
