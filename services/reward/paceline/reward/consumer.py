"""The reward service's mailbox work: trajectories in, scored headers out.

    trajectories mailbox -> blobs -> response texts -> gateway -> scored mailbox -> ack

Delivery is at least once: a batch is acknowledged after its scored headers are stored, and the barrier drops repeats. Unblocked
by: an entry in the mailbox. Deadlines: those of the gateway on every item, those of the broker on every command.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.broker import Broker, Entry, Mailbox, Outgoing, append_when_room, names
from paceline.core.errors import InvalidMessageError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.core.trajectory import ScoredHeader, TrajectoryHeader
from paceline.data.prompts import Decoder
from paceline.reward.scoring import Verdict, failed
from paceline.service.telemetry import current_traceparent, span
from paceline.wire import DEFAULT_LIMITS, decode_trajectory, decode_trajectory_header, encode_scored_header

_log = logging.getLogger(__name__)

_MAX_BATCHES = 8


class Scorer(Protocol):
    """Who gives the verdicts; `Gateway` in service."""

    async def score(self, items: Sequence[ScoreItem], *, run_id: str, step: int) -> list[Verdict]:
        """One verdict for each item, in the items' order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerOptions:
    """How the mailbox is worked.

    Args:
        run_id: whose trajectories.
        member_id: the consumer's name in its group, and the scorer's in the verdicts.
        lease_s: silence after which another reward service takes over what this one holds.
        max_stream_length: the scored mailbox's bound; writing waits above it.
        room_timeout_s: how long it may wait.
        max_entries: largest batch.
    """

    run_id: str
    member_id: str
    lease_s: float = 5.0
    max_stream_length: int = 100_000
    room_timeout_s: float = 300.0
    max_entries: int = 128


class Consumer:
    """Scores what the trajectories mailbox brings, several batches at a time."""

    def __init__(
        self, *, broker: Broker, scorer: Scorer, tokenizer: Decoder, options: ConsumerOptions
    ) -> None:
        self._broker, self._scorer, self._tokenizer, self._options = broker, scorer, tokenizer, options
        self.num_in_flight = 0
        self.num_scored = 0
        self.num_errors = 0

    async def run(self) -> None:
        """Works until cancelled; what is not done then goes back to the mailbox.

        Raises:
            BrokerError, DeadlineError: the broker is gone.
            RewardError: UNAVAILABLE, when worker processes cannot be started any more.
        """
        options = self._options
        box = Mailbox(
            self._broker,
            names.trajectories(options.run_id),
            names.REWARD_GROUP,
            options.member_id,
            lease_s=options.lease_s,
            max_entries=options.max_entries,
        )
        slots = asyncio.Semaphore(_MAX_BATCHES)
        async with box, asyncio.TaskGroup() as tasks:
            while True:
                await slots.acquire()
                entries = await box.take()
                if not entries:
                    slots.release()
                    continue
                self.num_in_flight += len(entries)
                task = tasks.create_task(self._process(box, entries), name=f"score {entries[0].entry_id}")
                task.add_done_callback(lambda _: slots.release())

    async def _process(self, box: Mailbox, entries: Sequence[Entry]) -> None:
        started = time.monotonic()
        traceparent = next((entry.traceparent for entry in entries if entry.traceparent), None)
        try:
            with span("reward.score", traceparent=traceparent, attributes={"num_items": len(entries)}):
                payloads = await self._score(entries, started)
                stream, parent = names.scored(self._options.run_id), current_traceparent()
                await append_when_room(
                    self._broker,
                    [Outgoing(stream=stream, payload=payload, traceparent=parent) for payload in payloads],
                    max_length=self._options.max_stream_length,
                    timeout_s=self._options.room_timeout_s,
                )
                await box.done(entries)
        finally:
            self.num_in_flight -= len(entries)

    async def _score(self, entries: Sequence[Entry], started: float) -> list[bytes]:
        """The scored headers of a batch, and the payloads that could not be read as they came."""
        headers: list[TrajectoryHeader] = []
        payloads: list[bytes] = []
        for entry in entries:
            try:
                headers.append(decode_trajectory_header(entry.payload))
            except InvalidMessageError as error:
                # Passed on as it is: the controller, whose journal it belongs in, will reject it as well.
                _log.error("entry %s of %s: %s", entry.entry_id, entry.stream, error)
                payloads.append(entry.payload)
        blobs = await self._broker.get_blobs([header.blob_key for header in headers])
        # Decoding holds no locks that matter and takes long for large batches: heartbeats and leases must go on.
        texts = await asyncio.to_thread(self._read_responses, headers, blobs)
        verdicts = await self._judge(headers, texts)
        seconds = time.monotonic() - started
        for header, text, verdict in zip(headers, texts, verdicts, strict=True):
            payloads.append(encode_scored_header(self._scored(header, text, verdict, seconds)))
        self.num_scored += len(headers)
        self.num_errors += sum(verdict.error is not None for verdict in verdicts)
        return payloads

    def _read_responses(
        self, headers: Sequence[TrajectoryHeader], blobs: Sequence[bytes | None]
    ) -> list[str | Verdict]:
        """Each response's text, or the verdict on a trajectory that cannot be read."""
        return [self._read_response(header, blob) for header, blob in zip(headers, blobs, strict=True)]

    def _read_response(self, header: TrajectoryHeader, blob: bytes | None) -> str | Verdict:
        trajectory_id = str(header.trajectory_id)
        if blob is None:
            message = f"the blob {header.blob_key} is gone: its step is over, or the broker lost it"
            return failed(trajectory_id, RewardErrorKind.UNAVAILABLE, message)
        try:
            trajectory = decode_trajectory(blob)
            if trajectory.trajectory_id != header.trajectory_id:
                raise InvalidMessageError(f"it holds {trajectory.trajectory_id}", reason="inconsistent")
            token_ids: list[int] = trajectory.response_token_ids.tolist()
            return self._tokenizer.decode(token_ids, skip_special_tokens=True)
        except (
            InvalidMessageError,
            OverflowError,
        ) as error:  # the latter from an id that the tokenizer cannot hold
            message = f"the blob {header.blob_key} cannot be read: {error}"
            return failed(trajectory_id, RewardErrorKind.UNAVAILABLE, message)

    async def _judge(
        self, headers: Sequence[TrajectoryHeader], texts: Sequence[str | Verdict]
    ) -> list[Verdict]:
        items = [
            ScoreItem(
                trajectory_id=str(header.trajectory_id),
                prompt=header.context.prompt_text,
                response=text,
                ground_truth=header.context.ground_truth,
                data_source=header.context.data_source,
                extra=header.context.extra,
            )
            for header, text in zip(headers, texts, strict=True)
            if isinstance(text, str)
        ]
        step = headers[0].trajectory_id.step if headers else 0
        scored = iter(await self._scorer.score(items, run_id=self._options.run_id, step=step))
        return [next(scored) if isinstance(text, str) else text for text in texts]

    def _scored(
        self, header: TrajectoryHeader, text: str | Verdict, verdict: Verdict, seconds: float
    ) -> ScoredHeader:
        error = None if verdict.error is None else (verdict.error[0].value, verdict.error[1])
        return ScoredHeader(
            run_id=header.run_id,
            trajectory_id=header.trajectory_id,
            policy=header.policy,
            blob_key=header.blob_key,
            num_prompt_tokens=header.num_prompt_tokens,
            num_response_tokens=header.num_response_tokens,
            finish_reason=header.finish_reason,
            server_id=header.server_id,
            generation_s=header.seconds,
            reward=verdict.reward,
            components=verdict.components,
            reward_error=error,
            scorer=self._options.member_id,
            reward_s=seconds,
            response_text=text[: DEFAULT_LIMITS.max_text_chars] if isinstance(text, str) else "",
        )
