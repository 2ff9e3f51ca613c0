"""What outsiders import: reward servers and clients, those that attach to a run, without torch."""

from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.sdk.attach import RewardAttachment, attach_reward
from paceline.sdk.client import RewardClient
from paceline.sdk.server import RewardServer, serve_reward

__all__ = [
    "RewardAttachment",
    "RewardClient",
    "RewardServer",
    "ScoreItem",
    "ScoreResult",
    "attach_reward",
    "serve_reward",
]
