"""What outsiders import: reward servers and clients in ten lines, without torch."""

from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.sdk.client import RewardClient
from paceline.sdk.server import RewardServer, serve_reward

__all__ = ["RewardClient", "RewardServer", "ScoreItem", "ScoreResult", "serve_reward"]
