"""The run's data in the broker: creates it, notices its loss, cleans it up, and starts it anew.

    check -> begin_anew if it is lost -> (steps: prompts, trajectories, scored, blobs; clean_up) -> purge

A marker is stored with the first data. If the marker is gone, the broker has lost the data, say because a
server without persistence was restarted. If the marker names another process of the server, the last messages
may be lost: an older snapshot was loaded, or a replica that lagged took over. The run's own server loses no
data when its process ends. Single messages are lost if the mailboxes are idle although a collection is not
complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.broker import names
from paceline.broker.base import Broker
from paceline.broker.log import is_after, read_all
from paceline.core.errors import InvalidMessageError, LostDataError
from paceline.core.samples.trajectory import Float32Array, ScoredHeader, Trajectory
from paceline.wire import decode_log_probs, decode_scored, decode_trajectory

T = TypeVar("T")

_OWN_SERVER = "the run's own server"


class Mailboxes:
    """Owns the streams and blobs of a run.

    Args:
        run_id: part of their names.
        own_server: whether the server was started for this run and keeps its data when it dies.

    Attributes:
        scored: name of the stream of scored headers.
    """

    def __init__(self, broker: Broker, run_id: str, *, own_server: bool) -> None:
        self._broker, self._run_id, self._own_server = broker, run_id, own_server
        self.scored = names.scored(run_id)

    async def check(self) -> None:
        """Creates missing consumer groups; raises LostDataError if the run's data is gone."""
        (marker,) = await self._broker.get_blobs([names.marker(self._run_id)])
        if marker != await self._server():
            raise LostDataError(
                "the message broker has lost the run's data, or its last messages: it was emptied, or "
                "started again, or another server took over"
            )
        await self._create_groups()

    async def idle(self, *prompts: str) -> bool:
        """Returns whether no service has work left for the run, so that `scored` is complete.

        Mailboxes are checked in the order in which messages pass through them, so that none is missed on its
        way.
        """
        stages = (
            *((stream, names.ROLLOUT_GROUP) for stream in prompts),
            (names.trajectories(self._run_id), names.REWARD_GROUP),
        )
        for stream, group in stages:
            if not await self._broker.all_done(stream, group):
                return False
        return True

    async def begin_anew(self) -> None:
        """Removes the run's data and creates empty mailboxes."""
        await self.purge()
        await self._create_groups()
        await self._broker.put_blob(names.marker(self._run_id), await self._server())

    async def purge(self) -> None:
        """Removes all of the run's data."""
        await self._broker.purge(names.prefix(self._run_id))

    async def clean_up(self, *, version: int, position: str, blob_keys: Sequence[str]) -> None:
        """Removes the data of finished steps: blobs, prompts of `version`, log entries up to `position`.

        Raises:
            LostDataError: there is nothing left to remove, because the run's data is gone.
        """
        await self.check()
        await self._broker.delete_blobs(blob_keys)
        await self._broker.delete_streams([names.prompts(self._run_id, version)])
        await self._broker.advance(self.scored, names.CONTROLLER_GROUP, position)
        for stream in (names.trajectories(self._run_id), self.scored):
            await self._broker.trim(stream)

    async def leftovers(self, position: str) -> dict[int, list[str]]:
        """Returns the keys of the blobs that log entries up to `position` ("": all entries) name, by step."""
        keys: dict[int, list[str]] = {}
        async for entry in read_all(self._broker, self.scored):
            if position and is_after(entry.entry_id, position):
                break
            try:
                message = decode_scored(entry.payload)
            except InvalidMessageError:
                continue
            if isinstance(message, ScoredHeader):
                keys.setdefault(message.trajectory_id.step, []).extend(blob_keys(message))
        return keys

    async def texts(self, headers: Sequence[ScoredHeader], *, required: bool = False) -> list[str]:
        """Returns the responses' texts; "" if none is stored. Raises what `text_blobs` raises."""
        blobs = await self.text_blobs(headers, required=required)
        return [blob.decode(errors="replace") for blob in blobs]

    async def text_blobs(self, headers: Sequence[ScoredHeader], *, required: bool = False) -> list[bytes]:
        """Returns the responses' texts in UTF-8; b"" if none is stored.

        Raises:
            LostDataError: a text was stored and is gone, though `required`.
        """
        stored = await self._broker.get_blobs([header.text_key for header in headers if header.text_key])
        if required and None in stored:
            raise LostDataError("the message broker has lost texts of the step's samples")
        blobs = iter(stored)
        return [(next(blobs) or b"") if header.text_key else b"" for header in headers]

    async def trajectories(self, headers: Sequence[ScoredHeader]) -> list[Trajectory | None]:
        """Returns the samples' tokens and log-probs; None if they are gone."""
        blobs = await self._broker.get_blobs([header.blob_key for header in headers])
        return await asyncio.to_thread(lambda: [_decoded(decode_trajectory, blob) for blob in blobs])

    async def learner_log_probs(self, headers: Sequence[ScoredHeader]) -> list[Float32Array | None]:
        """Returns the learner's log-probs of the sampled tokens; None if it has stored none."""
        keys = [names.learner_log_probs(header.blob_key) for header in headers]
        blobs = await self._broker.get_blobs(keys)
        return [
            _decoded(decode_log_probs, blob, header.num_response_tokens)
            for blob, header in zip(blobs, headers, strict=True)
        ]

    async def _server(self) -> bytes:
        return (_OWN_SERVER if self._own_server else await self._broker.incarnation()).encode()

    async def _create_groups(self) -> None:
        await self._broker.ensure_group(names.trajectories(self._run_id), names.REWARD_GROUP)
        await self._broker.ensure_group(self.scored, names.CONTROLLER_GROUP)


class ValMailboxes(Mailboxes):
    """Owns the streams of the validation of one version, beside training.

    If the broker has lost them, only the validation begins again, whatever becomes of the run's other data.
    """

    def __init__(self, broker: Broker, run_id: str, version: int) -> None:
        super().__init__(broker, run_id, own_server=False)
        self.scored, self._prompts = names.val_scored(run_id, version), names.val_prompts(run_id, version)

    async def check(self) -> None:
        """Creates missing consumer groups of the validation."""
        await self._create_groups()

    async def begin_anew(self) -> None:
        """Removes the streams and creates empty ones."""
        await self._broker.delete_streams([self.scored, self._prompts])
        await self._create_groups()

    async def purge(self) -> None:
        """Removes the streams and the blobs of the answers."""
        left = await self.leftovers("")
        await self._broker.delete_blobs([key for keys in left.values() for key in keys])
        await self._broker.delete_streams([self.scored, self._prompts])


def _decoded(decode: Callable[..., T], blob: bytes | None, *args: int) -> T | None:
    """Returns the content of a blob; None if it is gone or cannot be read."""
    try:
        return None if blob is None else decode(blob, *args)
    except InvalidMessageError:
        return None


def blob_keys(header: ScoredHeader) -> list[str]:
    """Returns the keys of the blobs that a sample may have: its arrays, its text, a teacher's tokens, the
    learner's log-probs."""
    if not header.blob_key:
        return []
    keys = [*trained_keys(header), header.text_key, names.learner_log_probs(header.blob_key)]
    return [key for key in keys if key]


def trained_keys(header: ScoredHeader) -> list[str]:
    """Returns the keys of the blobs without which a sample cannot be trained."""
    teacher = [names.teacher_top_k(header.blob_key, header.teacher_digest)] if header.teacher_digest else []
    return [header.blob_key, *teacher]
