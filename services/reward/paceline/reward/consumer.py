"""The reward service's mailbox work: trajectories in, scored headers out.

    trajectories mailbox -> blobs -> response texts -> scorer -> scored mailbox -> ack
                                    token ids      -> teacher -> blobs, if there is one

Delivery is at least once: a batch is acknowledged together with its scored headers, and the barrier drops
repeats. If a scorer or the teacher times out, crashes or cannot be reached, the item goes back to the mailbox
and is delivered again, up to reward.max_deliveries times. The samples of a prompt that are scored together
are one entry: it is delivered, scored and acknowledged as one. Unblocked by: an entry in the mailbox.
Deadlines: the scorer's and the teacher's per item, the broker's per command.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.broker import Broker, Entry, Mailbox, Outgoing, names
from paceline.core.errors import GIVEN_ERRORS, InvalidMessageError, RewardError, RewardErrorKind
from paceline.core.ids import NEVER_TRAINED, Purpose
from paceline.core.policy import PolicyTag
from paceline.core.samples.trajectory import (
    SampleHeader,
    ScoredHeader,
    Trajectory,
    TrajectoryHeader,
    sampled_spans,
)
from paceline.core.scoring import ScoreItem
from paceline.core.text import encodable, encoded
from paceline.data.prompts import Decoder, TokenIds
from paceline.reward.placing import TokenRewards, token_rewards
from paceline.reward.scoring.scorer import Scorer
from paceline.reward.scoring.scores import Score, failed
from paceline.reward.teacher.teacher import Teacher
from paceline.service.observability.telemetry import current_traceparent, span
from paceline.service.threads import in_thread
from paceline.wire import (
    blob_digest,
    decode_scored,
    decode_trajectory,
    decode_trajectory_headers,
    encode_group_refusal,
    encode_scored_header,
    encode_teacher,
    refusal_of,
)
from paceline.wire.records import values_of

_log = logging.getLogger(__name__)

_MAX_BATCHES = 8
MAX_ENTRIES = 128
"""Most entries of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerOptions:
    """How the consumer takes from one mailbox and writes to the other.

    Args:
        member_id: name of this scorer in the scored headers.
        incarnation: changes with each restart of the service.
        lease_s: silence after which another reward service takes over the entries that this one has taken.
        max_stream_length: the scored mailbox's bound; writing waits above it.
        room_timeout_s: longest time in seconds that writing may wait.
        save_texts: whether the responses' texts are stored beside their arrays.
        max_deliveries: deliveries after which an error that might have passed is the trajectory's score.
        reports_beside: whether scores of held-out prompts go to the mailbox of validations beside training.
    """

    run_id: str
    member_id: str
    incarnation: str = "0"
    lease_s: float = 5.0
    max_stream_length: int = 100_000
    room_timeout_s: float = 300.0
    max_entries: int = MAX_ENTRIES
    save_texts: bool = True
    max_deliveries: int = 4
    reports_beside: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Texts:
    """The scored text (the policy's last answer), and the text kept for people, in UTF-8.

    In the record of an episode, text that the policy did not write stands in the brackets U+27E6 and U+27E7.
    `token_ids` are those of the scored text; the first of them is the response's token `first`. `trajectory`
    is what the teacher is asked about, with its blob's digest; None if it is not asked.
    """

    response: str
    record: bytes
    token_ids: TokenIds = ()
    first: int = 0
    trajectory: Trajectory | None = None
    blob_digest: str = ""


class _Sample(NamedTuple):
    """A sample with its score; `text` is the error of one that cannot be read, `teacher` the blob for it."""

    header: TrajectoryHeader
    text: _Texts | Score
    score: Score
    teacher: bytes | None


class Consumer:
    """Scores the trajectories that the mailbox delivers, several batches at a time."""

    def __init__(
        self,
        *,
        broker: Broker,
        scorer: Scorer,
        tokenizer: Decoder,
        options: ConsumerOptions,
        teacher: Teacher | None = None,
    ) -> None:
        self._broker, self._scorer, self._tokenizer, self._options = broker, scorer, tokenizer, options
        self._teacher = teacher
        self.num_in_flight = 0
        self._stopping = False

    def stop(self) -> None:
        """Makes `run` take no more entries and return when those under way are scored."""
        self._stopping = True

    async def run(self) -> None:
        """Works until stopped, or cancelled; unfinished entries then go back to the mailbox.

        Raises:
            BrokerError, DeadlineError: the broker is gone.
            RewardError: UNAVAILABLE, when a scorer cannot score any more. Errors that would be fatal at a
                start become this error, too, because the scorer has worked and a restart may help.
        """
        try:
            await self._work()
        except* GIVEN_ERRORS as group:
            cause: BaseException = group
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            raise RewardError(f"scoring has ended: {cause}", kind=RewardErrorKind.UNAVAILABLE) from group

    async def _work(self) -> None:
        options = self._options
        box = Mailbox(
            self._broker,
            names.trajectories(options.run_id),
            names.REWARD_GROUP,
            f"{options.member_id}/{options.incarnation}",
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
                    # A server that came back without its data has lost the group too.
                    await self._broker.ensure_group(names.trajectories(options.run_id), names.REWARD_GROUP)
                    continue
                self.num_in_flight += len(entries)
                task = tasks.create_task(self._process(box, entries), name=f"score {entries[0].entry_id}")
                task.add_done_callback(lambda _: slots.release())

    async def _process(self, box: Mailbox, entries: Sequence[Entry]) -> None:
        started = time.monotonic()
        traceparent = next((entry.traceparent for entry in entries if entry.traceparent), None)
        try:
            with span("reward.score", traceparent=traceparent, attributes={"num_items": len(entries)}):
                answers = await self._answers(entries, started)
                again = [entry for entry in entries if entry.entry_id not in answers]
                if again:
                    _log.warning("%d of %d items are delivered again", len(again), len(entries))
                    await box.give_back(again)
                if not answers:
                    return
                parent = current_traceparent()
                await box.finish(
                    [entry for entry in entries if entry.entry_id in answers],
                    [
                        replace(message, traceparent=parent)
                        for of_entry in answers.values()
                        for message in of_entry
                    ],
                    max_length=self._options.max_stream_length,
                    timeout_s=self._options.room_timeout_s,
                )
        finally:
            self.num_in_flight -= len(entries)

    async def _answers(self, entries: Sequence[Entry], started: float) -> dict[str, list[Outgoing]]:
        """Returns the answers to entries by id; entries that another delivery may score have none."""
        answers: dict[str, list[Outgoing]] = {}
        headers: dict[str, tuple[TrajectoryHeader, ...]] = {}
        groups: set[str] = set()
        for entry in entries:
            try:
                decoded = decode_trajectory_headers(entry.payload)
            except InvalidMessageError as error:
                answers[entry.entry_id] = [self._refusal(entry, error)]
                continue
            if isinstance(decoded, tuple):
                groups.add(entry.entry_id)
            headers[entry.entry_id] = decoded if isinstance(decoded, tuple) else (decoded,)
        scored = await self._scored_entries(headers, groups)
        seconds = time.monotonic() - started
        deliveries = {entry.entry_id: entry.deliveries for entry in entries}
        for entry_id, samples in scored.items():
            # An unreadable entry stays unreadable; only errors of scorers are temporary.
            may_pass = any(isinstance(s.text, _Texts) and s.score.may_be_retried for s in samples)
            if may_pass and deliveries[entry_id] < self._options.max_deliveries:
                continue
            answers[entry_id] = [self._scored(sample, seconds) for sample in samples]
        return answers

    async def _scored_entries(
        self, headers: Mapping[str, Sequence[TrajectoryHeader]], groups: Container[str]
    ) -> dict[str, list[_Sample]]:
        """Returns each entry's samples with scores; those of an entry in `groups` are scored together."""
        flat = [header for of_entry in headers.values() for header in of_entry]
        blobs = await self._broker.get_blobs([header.blob_key for header in flat])
        # In a thread: decoding a large batch takes long, and heartbeats and leases must go on.
        texts = await in_thread(lambda: list(map(self._read_response, flat, blobs)))
        keys = [(header.trajectory_id, name in groups) for name, own in headers.items() for header in own]
        names_of_groups = [
            f"{key.purpose}:{key.step}:{key.prompt_id}" if is_grouped else "" for key, is_grouped in keys
        ]
        async with asyncio.TaskGroup() as tasks:
            scoring = tasks.create_task(self._score_texts(flat, texts, names_of_groups))
            asking = [tasks.create_task(self._ask_teacher(text)) for text in texts]
        samples = iter(
            _Sample(header, text, *_joined(score, task.result()))
            for header, text, score, task in zip(flat, texts, scoring.result(), asking, strict=True)
        )
        return {
            entry_id: list(itertools.islice(samples, len(of_entry))) for entry_id, of_entry in headers.items()
        }

    def _refusal(self, entry: Entry, error: InvalidMessageError) -> Outgoing:
        """Returns a refusal that drops an unreadable header's group, which can never be scored completely."""
        _log.error("entry %s of %s: %s", entry.entry_id, entry.stream, error)
        refusal = refusal_of(
            entry.payload,
            server_id=self._options.member_id,
            reason=error.reason,
            detail=str(error),
            deliveries=entry.deliveries,
        )
        if refusal is None:
            # Not even the group can be read: the controller journals the message, unchanged.
            return Outgoing(stream=names.scored(self._options.run_id), payload=entry.payload)
        stream = self._stream(refusal.purpose, refusal.policy)
        return Outgoing(stream=stream, payload=encode_group_refusal(refusal))

    def _stream(self, purpose: str, policy: PolicyTag) -> str:
        """Names the mailbox of the scores of samples with this purpose."""
        run_id = self._options.run_id
        is_beside = self._options.reports_beside and purpose == Purpose.VALIDATE
        return names.val_scored(run_id, policy.version) if is_beside else names.scored(run_id)

    async def _ask_teacher(self, text: _Texts | Score) -> bytes | RewardError | None:
        """Returns the teacher's tokens as a blob, or why there are none; None if it is not asked."""
        if self._teacher is None or isinstance(text, Score) or text.trajectory is None:
            return None
        try:
            top_k = await self._teacher.top_k(text.trajectory)
        except RewardError as error:
            return error
        return encode_teacher(top_k, of=text.blob_digest)

    def _scored(self, sample: _Sample, seconds: float) -> Outgoing:
        """Returns the scored header, with blobs of the response's text, if texts are kept, and for the
        teacher's tokens."""
        header, text, score, teacher = sample
        blobs: dict[str, bytes] = {}
        if self._options.save_texts and isinstance(text, _Texts):
            blobs[names.text(header.blob_key)] = text.record
        text_key, teacher_digest = next(iter(blobs), ""), ""
        if teacher is not None:
            teacher_digest = blob_digest(teacher)
            blobs[names.teacher_top_k(header.blob_key, teacher_digest)] = teacher
        placed: TokenRewards = ()
        if isinstance(text, _Texts) and score.placed:
            placed = token_rewards(score.placed, text.token_ids, self._tokenizer, first=text.first)
        try:
            scored = self._scored_header(header, text_key, score, seconds)
            scored = replace(scored, token_rewards=placed, teacher_digest=teacher_digest)
            payload = encode_scored_header(scored)
            decode_scored(payload)
        except InvalidMessageError as error:  # the barrier would refuse it, as with thousands of components
            score = failed(score.trajectory_id, RewardErrorKind.WRONG_TYPE, str(error))
            payload = encode_scored_header(self._scored_header(header, text_key, score, seconds))
        stream = self._stream(header.trajectory_id.purpose, header.policy)
        return Outgoing(stream=stream, payload=payload, blobs=blobs)

    def _read_response(self, header: TrajectoryHeader, blob: bytes | None) -> _Texts | Score:
        """Returns the texts of a response, or the error of a trajectory that cannot be read."""
        trajectory_id = str(header.trajectory_id)
        if blob is None:
            message = f"the blob {header.blob_key} is gone: its step is over, or the broker lost it"
            return failed(trajectory_id, RewardErrorKind.LOST, message)
        try:
            if blob_digest(blob, like=header.blob_digest) != header.blob_digest:
                raise InvalidMessageError("its digest is not the header's", reason="wrong_digest")
            trajectory = decode_trajectory(blob)
            texts = self._texts_of(trajectory, is_episode=header.episode is not None)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything on ids that it does not know
            message = f"the blob {header.blob_key} cannot be read: {error}"
            return failed(trajectory_id, RewardErrorKind.UNAVAILABLE, message)
        if self._teacher is None or header.trajectory_id.purpose in NEVER_TRAINED:
            return texts
        return replace(texts, trajectory=trajectory, blob_digest=header.blob_digest)

    def _texts_of(self, trajectory: Trajectory, *, is_episode: bool) -> _Texts:
        """Decodes the sampled tokens; for an episode, also the environment's answers, for people."""
        token_ids = trajectory.response_token_ids
        if not is_episode:
            text, record = encoded(self._tokenizer.decode(token_ids, skip_special_tokens=True))
            return _Texts(response=text, record=record, token_ids=token_ids)
        spans = sampled_spans(trajectory.response_mask)
        first, stop = spans[-1] if spans else (0, 0)
        scored, begin = token_ids[first:stop], first
        response = encodable(self._tokenizer.decode(scored, skip_special_tokens=True))
        edges = [0, *(edge for span in spans for edge in span), len(token_ids)]
        pieces = []
        for number, (first, stop) in enumerate(itertools.pairwise(edges)):
            if first < stop:
                text = self._tokenizer.decode(token_ids[first:stop], skip_special_tokens=False)
                pieces.append(text if number % 2 else f"\u27e6{text}\u27e7")
        _, record = encoded("".join(pieces))
        return _Texts(response=response, record=record, token_ids=scored, first=begin)

    async def _score_texts(
        self,
        headers: Sequence[TrajectoryHeader],
        texts: Sequence[_Texts | Score],
        groups: Sequence[str],
    ) -> list[Score]:
        """Returns one score per trajectory; those whose text could not be read keep their error."""
        items = [
            ScoreItem(
                trajectory_id=str(header.trajectory_id),
                prompt=header.context.prompt_text,
                response=text.response,
                ground_truth=header.context.ground_truth,
                data_source=header.context.data_source,
                extra=header.context.extra,
                episode=header.episode,
                group=group,
                val_set=header.context.val_set,
            )
            for header, text, group in zip(headers, texts, groups, strict=True)
            if isinstance(text, _Texts)
        ]
        step = headers[0].trajectory_id.step if headers else 0
        scored = iter(await self._scorer.score(items, run_id=self._options.run_id, step=step))
        return [next(scored) if isinstance(text, _Texts) else text for text in texts]

    def _scored_header(
        self, header: TrajectoryHeader, text_key: str, score: Score, seconds: float
    ) -> ScoredHeader:
        error = None if score.error is None else (score.error[0].value, score.error[1])
        return ScoredHeader(
            **values_of(header, of=SampleHeader),
            generation_s=header.seconds,
            reward=score.reward,
            components=score.components,
            reward_error=error,
            scorer=self._options.member_id,
            reward_s=seconds,
            text_key=text_key,
            normalized=score.normalized,
        )


def _joined(score: Score, answer: bytes | RewardError | None) -> tuple[Score, bytes | None]:
    """Returns the score, which is an error if the teacher has not answered, and the blob for its tokens."""
    if not isinstance(answer, RewardError):
        return score, answer
    if score.error is None:
        score = failed(score.trajectory_id, answer.kind, str(answer), score.seconds)
    return score, None
