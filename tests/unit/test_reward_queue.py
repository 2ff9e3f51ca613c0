"""How many items each scorer has to score yet, as the reward service exports it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.config.reward import RewardConfig, RewardFunctionConfig, RewardServiceConfig
from paceline.core.scoring import ScoreItem
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.weighted_sum import WeightedSum
from paceline.rpc.v1 import reward_pb2
from paceline.service.observability import metrics
from paceline.service.observability.telemetry import Telemetry
from support.reward_servers import OddServer, serving

WAITING = """\
import os, time

def waits(response, mark):
    time.sleep(0.01)  # results of shorter calls go to the pool together with the next one's
    while not os.path.exists(f"{mark}-{response}"):
        time.sleep(0.01)
    return 1.0

def waits_for_group(items):
    return [waits("group", item.ground_truth) for item in items]
"""


class Waiting(OddServer):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        await self.may_answer.wait()
        return await super().Score(request, context)


def exported(reader: InMemoryMetricReader) -> dict[str, float]:
    """The gauge's values by scorer, as an exporter reads them."""
    data = reader.get_metrics_data()
    return {
        str((point.attributes or {})["scorer"]): float(point.value)  # type: ignore[union-attr]
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == metrics.REWARD_QUEUE.name
        for point in metric.data.data_points
    }


def put_mark(mark: Path, name: str) -> None:
    Path(f"{mark}-{name}").touch()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110  a test's own look
            await asyncio.sleep(0.01)


async def test_each_scorer_counts_what_it_has_no_score_for_yet(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    mark = tmp_path / "mark"
    items = [
        ScoreItem(
            trajectory_id=str(number), prompt="", response=response, ground_truth=str(mark),
            data_source=source, group="a",
        )
        for number, (response, source) in enumerate([("1", "math"), ("2", "math"), ("3", "code")])
    ]  # fmt: skip
    server, reader = Waiting(), InMemoryMetricReader()
    async with serving(server) as address:
        config = RewardConfig(
            functions=(
                RewardFunctionConfig(name=f"{tmp_path}/waiting.py:waits"),
                RewardFunctionConfig(name=f"{tmp_path}/waiting.py:waits_for_group", group=True),
            ),
            services=(
                RewardServiceConfig(name="judge", address=address, data_sources=("math",), timeout_s=60.0),
            ),
            num_processes=1,
            timeout_s=60.0,
        )
        total = WeightedSum.configured(ScorerSettings(config=config))
        await total.start()
        meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")
        Telemetry(trace.NoOpTracer(), [], meter).observe(metrics.REWARD_QUEUE, total.queues)
        none = {"functions": 0.0, "group functions": 0.0, "judge": 0.0}
        assert exported(reader) == none
        scoring = asyncio.create_task(total.score(items))
        await until(lambda: exported(reader) == {"functions": 3.0, "group functions": 3.0, "judge": 2.0})
        put_mark(mark, "1")  # the first of three items, all of which are in the queue of one process
        await until(lambda: exported(reader) == {"functions": 2.0, "group functions": 3.0, "judge": 2.0})
        server.may_answer.set()
        await until(lambda: exported(reader) == {"functions": 2.0, "group functions": 3.0, "judge": 0.0})
        put_mark(mark, "group")
        await until(lambda: exported(reader) == {"functions": 2.0, "group functions": 0.0, "judge": 0.0})
        for response in ("2", "3"):
            put_mark(mark, response)
        assert [score.reward for score in await scoring] == [3.0, 3.0, 2.0]
        assert exported(reader) == none
        # Nor does a caller that gives up leave its items behind.
        server.may_answer.clear()
        scoring = asyncio.create_task(total.score(items))
        await until(lambda: exported(reader)["judge"] == 2.0)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        assert exported(reader) == none
        server.may_answer.set()
        await total.close()
