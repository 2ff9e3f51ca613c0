"""What the controller takes for lost: a missing marker, and a server that may lack the last messages."""

from __future__ import annotations

import pytest

from paceline.broker import Outgoing, names
from paceline.broker.memory import MemoryBroker
from paceline.controller.batch.mailboxes import Mailboxes
from paceline.core.errors import LostDataError

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
    assert await mailboxes.idle(3)
    for stream, group in ((PROMPTS, names.ROLLOUT_GROUP), (names.trajectories(RUN), names.REWARD_GROUP)):
        await broker.ensure_group(stream, group)
        await broker.append([Outgoing(stream=stream, payload=b"x")])
        assert not await mailboxes.idle(3)
        (entry,) = await broker.read(stream, group, "a", max_entries=1, block_s=0)
        assert not await mailboxes.idle(3)
        await broker.release(stream, group, "a", [entry.entry_id])
        assert not await mailboxes.idle(3)
        await broker.ack(stream, group, [entry.entry_id])
        assert await mailboxes.idle(3)
    await broker.append([Outgoing(stream=names.scored(RUN), payload=b"x")])
    assert await mailboxes.idle(3)
