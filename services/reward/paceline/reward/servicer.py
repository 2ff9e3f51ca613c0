"""`RewardService.Score` as the reward service itself serves it: the run's whole reward, for whoever asks."""

from __future__ import annotations

from paceline.core.errors import EnvironmentLackError
from paceline.core.reward_function import one_line
from paceline.core.scoring import ScoreResult
from paceline.reward.consumer import Scorer
from paceline.reward.remote.client import join_error
from paceline.reward.scoring import Verdict
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.wire.protobuf import score_item_from_proto, score_result_to_proto


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Answers once `scorer` is set."""

    def __init__(self) -> None:
        self.scorer: Scorer | None = None

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        """Scores the items; an item's error does not touch the others.

        Raises:
            InvalidMessageError: an item is malformed.
            EnvironmentLackError: the service is still starting.
        """
        if self.scorer is None:
            raise EnvironmentLackError("the reward service is still starting: try again")
        items = [score_item_from_proto(item) for item in request.items]
        verdicts = await self.scorer.score(items, run_id=request.run_id, step=request.step)
        return reward_pb2.ScoreResponse(results=[score_result_to_proto(_result(one)) for one in verdicts])


def _result(verdict: Verdict) -> ScoreResult:
    return ScoreResult(
        trajectory_id=verdict.trajectory_id,
        reward=verdict.reward,
        components=verdict.components,
        error=None if verdict.error is None else one_line(join_error(*verdict.error)),
    )
