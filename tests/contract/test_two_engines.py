"""A weight group of a learner and two servers with different engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.core.errors import WeightSyncError
from paceline.weights.digest.agreement import disagreement, model_digest
from support.engine_contract import fake_sglang_subject, fake_subject

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


async def test_a_push_to_servers_of_two_engines_leaves_one_digest_and_both_follow_it(tmp_path: Path) -> None:
    async with fake_subject(tmp_path) as first, fake_sglang_subject(tmp_path) as second:
        learner, engines = first.learner, (first.engine, second.engine)
        layouts = [await engine.describe() for engine in engines]
        assert [len(each) for each in layouts] == [2, 1]
        spec = await learner.spec(first.engine, rollout_layouts=(*layouts[0], *layouts[1]))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(learner._in_thread(lambda: learner._publisher.join(spec)))
            tasks.create_task(first.engine.join(spec, 1, 120.0))
            tasks.create_task(second.engine.join(spec, 3, 120.0))
        digests = set()
        for version in (1, 2):
            learner.set_seed(version)
            sending = asyncio.ensure_future(
                learner._in_thread(lambda v=version: learner._publisher.publish(v))
            )
            received = await asyncio.gather(*(engine.receive(version, 60.0) for engine in engines))
            sent = await sending
            for receipt in received:
                assert disagreement(sent.reports[0], receipt.reports) is None
                assert model_digest(receipt.reports) == model_digest(sent.reports)
            digests.add(model_digest(sent.reports))
        assert len(digests) == 2
        # What lies in the parameters of each, asked of each.
        for engine in engines:
            assert model_digest(await engine.digest(2)) in digests
        await asyncio.gather(*(engine.leave() for engine in engines))
        with pytest.raises(WeightSyncError, match="no weight group has been joined"):
            await second.engine.receive(3, 5.0)
