"""The reward service's mailbox work: trajectories in, scored headers out.

    trajectories mailbox -> blobs -> response texts -> scorer -> scored mailbox -> ack

Delivery is at least once: a batch is acknowledged after its scored headers are stored, and the barrier drops
repeats. Unblocked by: an entry in the mailbox. Deadlines: the scorer's per item, the broker's per command.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.broker import Broker, Entry, Mailbox, Outgoing, append_when_room, names
from paceline.core.errors import InvalidMessageError, RewardErrorKind
from paceline.core.scoring import ScoreItem
from paceline.core.trajectory import ScoredHeader, TrajectoryHeader
from paceline.data.prompts import Decoder
from paceline.reward.scorer import Scorer
from paceline.reward.scores import Score, failed
from paceline.service.telemetry import current_traceparent, span
from paceline.wire import decode_trajectory, decode_trajectory_header, encode_scored_header

_log = logging.getLogger(__name__)

_MAX_BATCHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerOptions:
    """How the consumer takes from one mailbox and writes to the other.

    Args:
        run_id: the run whose trajectories are scored.
        member_id: the consumer's name in its group, and the scorer's name in the scored headers.
        lease_s: silence after which another reward service takes over the entries that this one has taken.
        max_stream_length: the scored mailbox's bound; writing waits above it.
        room_timeout_s: how long writing may wait.
        max_entries: largest batch.
        save_texts: whether the responses' texts are stored beside their arrays.
    """

    run_id: str
    member_id: str
    lease_s: float = 5.0
    max_stream_length: int = 100_000
    room_timeout_s: float = 300.0
    max_entries: int = 128
    save_texts: bool = True


class Consumer:
    """Scores the trajectories that the mailbox delivers, several batches at a time."""

    def __init__(
        self, *, broker: Broker, scorer: Scorer, tokenizer: Decoder, options: ConsumerOptions
    ) -> None:
        self._broker, self._scorer, self._tokenizer, self._options = broker, scorer, tokenizer, options
        self.num_in_flight = 0
        self._stopping = False

    def stop(self) -> None:
        """Makes `run` take no more entries and return when those under way are scored."""
        self._stopping = True

    async def run(self) -> None:
        """Works until stopped, or cancelled; unfinished entries then go back to the mailbox.

        Raises:
            BrokerError, DeadlineError: the broker is gone.
            RewardError: UNAVAILABLE, when child processes cannot be started any more.
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
            while not self._stopping:
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
                messages = await self._score(entries, started)
                parent = current_traceparent()
                await append_when_room(
                    self._broker,
                    [replace(message, traceparent=parent) for message in messages],
                    max_length=self._options.max_stream_length,
                    timeout_s=self._options.room_timeout_s,
                )
                await box.done(entries)
        finally:
            self.num_in_flight -= len(entries)

    async def _score(self, entries: Sequence[Entry], started: float) -> list[Outgoing]:
        """The scored headers of a batch, and the payloads that could not be read, unchanged."""
        stream = names.scored(self._options.run_id)
        headers: list[TrajectoryHeader] = []
        messages: list[Outgoing] = []
        for entry in entries:
            try:
                headers.append(decode_trajectory_header(entry.payload))
            except InvalidMessageError as error:
                # Passed on unchanged: the controller will reject it as well, and notes it in the journal.
                _log.error("entry %s of %s: %s", entry.entry_id, entry.stream, error)
                messages.append(Outgoing(stream=stream, payload=entry.payload))
        blobs = await self._broker.get_blobs([header.blob_key for header in headers])
        # In a thread: decoding a large batch takes long, and heartbeats and leases must go on.
        texts = await asyncio.to_thread(self._read_responses, headers, blobs)
        scores = await self._score_texts(headers, texts)
        seconds = time.monotonic() - started
        for header, text, score in zip(headers, texts, scores, strict=True):
            text_blob = self._text_blob(header, text)
            scored = self._scored_header(header, next(iter(text_blob), ""), score, seconds)
            payload = encode_scored_header(scored)
            messages.append(Outgoing(stream=stream, payload=payload, blobs=text_blob))
        return messages

    def _text_blob(self, header: TrajectoryHeader, text: str | Score) -> dict[str, bytes]:
        """The response's text by its key; {} where texts are not kept, or the response could not be read."""
        if not self._options.save_texts or not isinstance(text, str):
            return {}
        return {names.text(header.blob_key): text.encode(errors="backslashreplace")}

    def _read_responses(
        self, headers: Sequence[TrajectoryHeader], blobs: Sequence[bytes | None]
    ) -> list[str | Score]:
        """The text of each response, or the error of a trajectory that cannot be read."""
        return [self._read_response(header, blob) for header, blob in zip(headers, blobs, strict=True)]

    def _read_response(self, header: TrajectoryHeader, blob: bytes | None) -> str | Score:
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
        except (InvalidMessageError, OverflowError) as error:  # the latter: an id too large for the tokenizer
            message = f"the blob {header.blob_key} cannot be read: {error}"
            return failed(trajectory_id, RewardErrorKind.UNAVAILABLE, message)

    async def _score_texts(
        self, headers: Sequence[TrajectoryHeader], texts: Sequence[str | Score]
    ) -> list[Score]:
        """One score per trajectory; those whose text could not be read keep their error."""
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

    def _scored_header(
        self, header: TrajectoryHeader, text_key: str, score: Score, seconds: float
    ) -> ScoredHeader:
        error = None if score.error is None else (score.error[0].value, score.error[1])
        return ScoredHeader(
            run_id=header.run_id,
            trajectory_id=header.trajectory_id,
            policy=header.policy,
            blob_key=header.blob_key,
            blob_digest=header.blob_digest,
            num_prompt_tokens=header.num_prompt_tokens,
            num_response_tokens=header.num_response_tokens,
            finish_reason=header.finish_reason,
            server_id=header.server_id,
            generation_s=header.seconds,
            reward=score.reward,
            components=score.components,
            reward_error=error,
            scorer=self._options.member_id,
            reward_s=seconds,
            text_key=text_key,
        )
