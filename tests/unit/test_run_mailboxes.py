"""What the controller takes for lost: a missing marker, and a server that may lack the last messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.broker import Outgoing, names
from paceline.controller.batch.mailboxes import Mailboxes, blob_keys
from paceline.core.errors import LostDataError
from paceline.wire import encode_log_probs
from support.headers import scored
from support.memory_broker import MemoryBroker

RUN = "run"
PROMPTS = names.prompts(RUN, 3)


class ReplacedBroker(MemoryBroker):
    """A broker whose server can be replaced by one that holds the same data."""

    process = "first"

    async def incarnation(self) -> str:
        """The process of the server."""
        return self.process


async def opened(broker: MemoryBroker, *, own_server: bool) -> Mailboxes:
    mailboxes = Mailboxes(broker, RUN, own_server=own_server)
    await mailboxes.begin_anew()
    await broker.append([Outgoing(stream=PROMPTS, payload=b"p")])
    await mailboxes.check()
    return mailboxes


@pytest.mark.parametrize("own_server", [True, False])
async def test_missing_data_is_noticed_and_begun_anew(own_server: bool) -> None:
    broker = ReplacedBroker()
    mailboxes = await opened(broker, own_server=own_server)
    await broker.purge(names.prefix(RUN))
    with pytest.raises(LostDataError, match="it was emptied, or"):
        await mailboxes.check()
    await mailboxes.begin_anew()
    await mailboxes.check()


async def test_another_server_may_lack_the_last_messages() -> None:
    broker = ReplacedBroker()
    mailboxes = await opened(broker, own_server=False)
    broker.process = "second"
    with pytest.raises(LostDataError, match="another server took over"):
        await mailboxes.check()
    # A controller that starts now does not go on with what is there.
    later = Mailboxes(broker, RUN, own_server=False)
    with pytest.raises(LostDataError):
        await later.check()
    await later.begin_anew()
    assert await broker.length(PROMPTS) == 0
    await mailboxes.check()


async def test_the_runs_own_server_keeps_its_data() -> None:
    broker = ReplacedBroker()
    mailboxes = await opened(broker, own_server=True)
    broker.process = "second"
    await mailboxes.check()
    assert await broker.length(PROMPTS) == 1


async def test_a_clean_up_notices_the_loss_and_removes_nothing() -> None:
    broker = ReplacedBroker()
    mailboxes = await opened(broker, own_server=False)
    broker.process = "second"
    with pytest.raises(LostDataError):
        await mailboxes.clean_up(version=3, position="0-0", blob_keys=[])
    assert await broker.length(PROMPTS) == 1


async def test_mailboxes_are_idle_when_nobody_has_anything_left_to_do() -> None:
    """A slow reward service, or a server that has given a prompt back, is no loss of messages."""
    broker = MemoryBroker()
    mailboxes = Mailboxes(broker, RUN, own_server=True)
    await mailboxes.begin_anew()
    assert await mailboxes.idle(names.prompts(RUN, 3))
    for stream, group in ((PROMPTS, names.ROLLOUT_GROUP), (names.trajectories(RUN), names.REWARD_GROUP)):
        await broker.ensure_group(stream, group)
        await broker.append([Outgoing(stream=stream, payload=b"x")])
        assert not await mailboxes.idle(names.prompts(RUN, 3))
        (entry,) = await broker.read(stream, group, "a", max_entries=1, block_s=0)
        assert not await mailboxes.idle(names.prompts(RUN, 3))
        await broker.release(stream, group, "a", [entry.entry_id])
        assert not await mailboxes.idle(names.prompts(RUN, 3))
        await broker.ack(stream, group, [entry.entry_id])
        assert await mailboxes.idle(names.prompts(RUN, 3))
    await broker.append([Outgoing(stream=names.scored(RUN), payload=b"x")])
    assert await mailboxes.idle(names.prompts(RUN, 3))


async def test_the_learners_log_probs_are_read_and_cleaned_up() -> None:
    """Those that were cut off count as missing."""
    broker, header, cut, absent = MemoryBroker(), scored(0), scored(1), scored(2)
    mailboxes = await opened(broker, own_server=True)
    stored = encode_log_probs(np.array([-0.25, -1.5], np.float32))
    await broker.put_blob(names.learner_log_probs(header.blob_key), stored)
    await broker.put_blob(names.learner_log_probs(cut.blob_key), stored[:4])
    first, *others = await mailboxes.learner_log_probs([header, cut, absent])
    assert first is not None
    assert first.tolist() == [-0.25, -1.5]
    assert others == [None, None]
    await mailboxes.clean_up(version=3, position="0-0", blob_keys=[*blob_keys(header), *blob_keys(cut)])
    assert await mailboxes.learner_log_probs([header, cut]) == [None, None]


async def test_a_teachers_tokens_are_cleaned_up_with_the_sample() -> None:
    broker, header = MemoryBroker(), replace(scored(0), teacher_digest="ab" * 16)
    mailboxes = await opened(broker, own_server=True)
    key = names.teacher_top_k(header.blob_key, header.teacher_digest)
    await broker.put_blob(key, b"tokens")
    await mailboxes.clean_up(version=3, position="0-0", blob_keys=blob_keys(header))
    assert await broker.get_blobs([key]) == [None]


async def test_a_text_that_was_stored_and_is_gone_is_lost_data_for_who_needs_it() -> None:
    broker = MemoryBroker()
    mailboxes = await opened(broker, own_server=True)
    await broker.put_blob("text", b"here")
    stored, gone = replace(scored(1), text_key="text"), replace(scored(2), text_key="gone")
    assert await mailboxes.texts([stored, gone, scored(3)]) == ["here", "", ""]
    assert await mailboxes.texts([stored, scored(3)], required=True) == ["here", ""]
    with pytest.raises(LostDataError, match="has lost texts"):
        await mailboxes.texts([stored, gone], required=True)
