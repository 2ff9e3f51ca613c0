"""Serves the run's reward as a `RewardService`, for any caller."""

from __future__ import annotations

from paceline.core.errors import EnvironmentLackError
from paceline.core.scoring import RewardDescription
from paceline.reward.scoring.scorer import Scorer
from paceline.rpc.v1 import reward_pb2, reward_pb2_grpc
from paceline.wire.calls.protobuf import description_to_proto, score_items_from_proto, score_result_to_proto


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Answers once `scorer` is set; `has_groups` says whether it scores samples of a prompt together."""

    def __init__(self) -> None:
        self.scorer: Scorer | None = None
        self.has_groups = False

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        """Scores the items; an item's error does not affect the others.

        Raises:
            InvalidMessageError: an item is malformed.
            EnvironmentLackError: the service is still starting.
        """
        if self.scorer is None:
            raise EnvironmentLackError("the reward service is still starting: try again")
        items = score_items_from_proto(request.items)
        scores = await self.scorer.score(items, run_id=request.run_id, step=request.step)
        return reward_pb2.ScoreResponse(
            results=[score_result_to_proto(score.to_result()) for score in scores]
        )

    async def Describe(
        self, request: reward_pb2.DescribeRewardRequest, context: object
    ) -> reward_pb2.RewardDescription:
        """Returns the version of the contract; names no data sources, since all are scored."""
        return description_to_proto(RewardDescription(name="paceline", groups=self.has_groups))
