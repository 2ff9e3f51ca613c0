"""DISPATCH and COLLECT: prompt groups out, scored trajectories in, until the barrier closes.

    prompt ids -> prompts:vN mailbox -> (rollout, reward) -> scored mailbox -> barrier -> batch
                        ^-------------- refill <- groups that teach nothing ------'

Unblocked by: a scored header, a change in the fleet. Deadlines: barrier.collect_timeout_s for the collection,
barrier.stall_timeout_s without a single header.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.broker import names
from paceline.broker.backpressure import append_when_room
from paceline.broker.base import Broker, Entry, Outgoing
from paceline.broker.mailbox import Mailbox
from paceline.controller.batch.barrier import Barrier, DroppedGroup, Verdict
from paceline.controller.batch.refill import DEGENERATE, Refill
from paceline.controller.progress import Run
from paceline.core.errors import DeadlineError, InvalidMessageError
from paceline.core.ids import Purpose, sample_seed
from paceline.core.policy import PolicyTag
from paceline.core.trajectory import GroupRefusal, PromptGroup, SamplingSpec, ScoredHeader
from paceline.data.prompts import Prompt
from paceline.service.telemetry import current_traceparent
from paceline.wire import decode_scored, encode_prompt_group

_TAKE = 512
_BLOCK_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The prompts of one collection; `with_greedy` adds one greedy answer to each prompt's samples."""

    step: int
    purpose: Purpose
    policy: PolicyTag
    prompts: Mapping[int, Prompt]
    num_samples: int
    sampling: SamplingSpec
    with_greedy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The result of an order.

    Attributes:
        samples: headers of the groups to train, in (prompt id, sample index) order.
        num_groups: all groups that were asked for.
        greedy: the greedy answers by prompt id.
        set_aside: the samples of groups that a refill set aside.
        num_extra: groups that a refill asked for; None without a refill.
        blob_keys: all blobs that were seen, trained on or not; they are deleted when the step commits.
        gen_s: seconds until the last sample was generated.
        reward_s: seconds that its scoring took beyond that.
        wait_s: seconds between the first and the last arrival.
    """

    samples: Sequence[ScoredHeader]
    dropped: Sequence[DroppedGroup]
    verdicts: Counter[Verdict]
    num_groups: int
    greedy: Mapping[int, ScoredHeader] = field(default_factory=dict)
    set_aside: Sequence[ScoredHeader] = ()
    num_extra: int | None = None
    blob_keys: Sequence[str] = ()
    gen_s: float = 0.0
    reward_s: float = 0.0
    wait_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of the samples."""
        return sum(header.num_prompt_tokens + header.num_response_tokens for header in self.samples)


class Collector:
    """Sends prompts out and collects batches.

    Args:
        box: the run's mailbox of scored headers.
        check_fleet: raises where waiting has become pointless, say with no rollout server left.
        count: called with (admitted, wanted) as trajectories come in.
    """

    def __init__(
        self,
        run: Run,
        *,
        broker: Broker,
        box: Mailbox,
        check_fleet: Callable[[], object],
        count: Callable[[int, int], None],
    ) -> None:
        self._config, self._run_id, self._journal = run.config, run.id, run.journal
        self._broker, self._box = broker, box
        self._check_fleet, self._count = check_fleet, count

    async def dispatch(self, order: Order) -> None:
        """Appends one message per prompt, in the order of `order.prompts`, and one for its greedy answer."""
        stream = names.prompts(self._run_id, order.policy.version)
        await self._broker.ensure_group(stream, names.ROLLOUT_GROUP)
        traceparent = current_traceparent()
        messages = [
            Outgoing(
                stream=stream,
                payload=encode_prompt_group(group),
                traceparent=traceparent,
            )
            for prompt in order.prompts.values()
            for group in self._groups(order, prompt)
        ]
        await append_when_room(
            self._broker,
            messages,
            max_length=self._config.broker.max_stream_length,
            timeout_s=self._config.stall_timeout_s,
        )

    async def collect(self, order: Order, refill: Refill | None = None) -> Batch:
        """Waits for the barrier to close; meanwhile `refill` replaces groups that teach nothing.

        Raises:
            DeadlineError: nothing came for barrier.stall_timeout_s, or not all within
                barrier.collect_timeout_s.
        """
        barrier = Barrier(
            step=order.step,
            purpose=order.purpose,
            policy=order.policy,
            expected=dict.fromkeys(order.prompts, order.num_samples),
            with_greedy=order.with_greedy,
        )
        blob_keys: list[str] = []
        limits = self._config
        began = time.monotonic()
        first = last_progress = None
        last: ScoredHeader | None = None
        self._count(0, barrier.num_wanted)
        while not barrier.closed:
            entries = await self._box.take(_TAKE, block_s=_BLOCK_S)
            now = time.monotonic()
            if entries:
                headers = await self._admit(barrier, entries)
                blob_keys += [key for header in headers for key in (header.blob_key, header.text_key) if key]
                first, last_progress = first or now, now
                last = headers[-1] if headers else last
                if refill is not None:
                    await self._refill(refill, order, barrier, headers)
                self._count(barrier.num_admitted, barrier.num_wanted)
                continue
            self._check_fleet()
            waited, silent = now - began, now - (last_progress or began)
            if waited > limits.collect_timeout_s or silent > limits.stall_timeout_s:
                raise self._overdue(barrier, waited if waited > limits.collect_timeout_s else silent)
        ended = time.monotonic()
        reward_s = min(last.reward_s, ended - began) if last is not None else 0.0
        return Batch(
            samples=barrier.batch(),
            dropped=barrier.dropped,
            verdicts=barrier.verdicts,
            num_groups=barrier.num_groups,
            greedy=barrier.greedy(),
            set_aside=barrier.aside(),
            num_extra=None if refill is None else refill.num_extra,
            blob_keys=blob_keys,
            gen_s=ended - began - reward_s,
            reward_s=reward_s,
            wait_s=ended - (first or ended),
        )

    async def texts(self, headers: Sequence[ScoredHeader]) -> list[str]:
        """The responses' texts; "" where none is stored."""
        blobs = iter(await self._broker.get_blobs([header.text_key for header in headers if header.text_key]))
        texts = [next(blobs) if header.text_key else None for header in headers]
        return ["" if text is None else text.decode(errors="replace") for text in texts]

    async def discard(self, batch: Batch) -> None:
        """Deletes the blobs of a batch."""
        await self._broker.delete_blobs(batch.blob_keys)

    async def clean_up(self, policy: PolicyTag, batch: Batch) -> None:
        """Deletes what the step of `policy` left in the broker, once the next version is committed."""
        await self.discard(batch)
        await self._broker.delete_streams([names.prompts(self._run_id, policy.version)])
        for stream in (names.trajectories(self._run_id), names.scored(self._run_id)):
            await self._broker.trim(stream)

    async def _admit(self, barrier: Barrier, entries: Sequence[Entry]) -> list[ScoredHeader]:
        headers: list[ScoredHeader] = []
        for entry in entries:
            try:
                message = decode_scored(entry.payload)
                if isinstance(message, GroupRefusal):
                    self._refused(barrier, message)
                else:
                    headers.append(message)
            except InvalidMessageError as error:
                self._journal.record(
                    "message_rejected", stream="scored", reason=error.reason, message=str(error)
                )
        # Only this task reads the barrier, so no one sees it change before the journal has the same verdicts.
        fates = []
        for header in headers:
            verdict = barrier.judge(header)
            barrier.apply(header, verdict)
            fates.append(_fate(header, verdict))
        self._journal.record_all(fates)
        await self._box.done(entries)
        return headers

    def _refused(self, barrier: Barrier, refusal: GroupRefusal) -> None:
        """Drops a group of this collection that the rollout servers have given up."""
        self._journal.record(
            "refusal",
            step=refusal.step,
            prompt=refusal.prompt_id,
            reason=refusal.reason,
            message=refusal.message,
            server=refusal.server_id,
        )
        concerned = (refusal.run_id, refusal.step, refusal.policy) == (
            self._run_id,
            barrier.step,
            barrier.policy,
        ) and refusal.purpose in (barrier.purpose, Purpose.GREEDY)
        if concerned and refusal.prompt_id in barrier.missing:
            barrier.drop(refusal.prompt_id, reason=f"rollout:{refusal.reason}", message=refusal.message)

    async def _refill(
        self, refill: Refill, order: Order, barrier: Barrier, headers: Sequence[ScoredHeader]
    ) -> None:
        """Judges the groups that `headers` may have completed; dispatches prompts for those set aside."""
        replacement = refill.settle(barrier, (header.trajectory_id.prompt_id for header in headers))
        if not replacement.set_aside:
            return
        self._journal.record(
            "refill",
            step=order.step,
            reason=DEGENERATE,
            set_aside=sorted(replacement.set_aside.items()),
            prompts=list(replacement.prompts),
        )
        if replacement.prompts:
            await self.dispatch(replace(order, prompts=replacement.prompts))

    def _groups(self, order: Order, prompt: Prompt) -> list[PromptGroup]:
        """A prompt's messages: for its samples, and for its greedy answer where one is wanted."""
        seeds = tuple(
            sample_seed(
                run_seed=self._config.trainer.seed,
                step=order.step,
                prompt_id=prompt.prompt_id,
                sample_index=index,
            )
            for index in range(order.num_samples)
        )
        samples = PromptGroup(
            run_id=self._run_id,
            step=order.step,
            purpose=order.purpose,
            prompt_id=prompt.prompt_id,
            prompt_token_ids=prompt.token_ids,
            sampling=order.sampling,
            seeds=seeds,
            policy=order.policy,
            context=prompt.context,
        )
        if not order.with_greedy:
            return [samples]
        greedy = replace(order.sampling, temperature=0.0)
        return [samples, replace(samples, purpose=Purpose.GREEDY, sampling=greedy, seeds=seeds[:1])]

    def _overdue(self, barrier: Barrier, seconds: float) -> DeadlineError:
        missing = barrier.missing
        return DeadlineError(
            phase="COLLECT",
            peer="the rollout and reward services",
            seconds=round(seconds, 1),
            hint=f"{len(missing)} prompt groups of step {barrier.step} are incomplete (the first is prompt "
            f"{missing[0]}); look into the rollout and reward logs, or raise barrier.stall_timeout_s",
        )


def _fate(header: ScoredHeader, verdict: Verdict) -> dict[str, str]:
    fate = {
        "event": "trajectory",
        "id": str(header.trajectory_id),
        "verdict": verdict.value,
        "server": header.server_id,
    }
    if header.reward_error is not None:
        fate["error"] = ": ".join(header.reward_error)
    if verdict in (Verdict.WRONG_VERSION, Verdict.WRONG_DIGEST):
        fate["policy"] = str(header.policy)
    return fate


def reward_components(batch: Iterable[ScoredHeader]) -> dict[str, float]:
    """Mean of every reward component over the trajectories that have it."""
    sums: dict[str, list[float]] = {}
    for header in batch:
        for name, value in header.components.items():
            sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(sums.items())}
