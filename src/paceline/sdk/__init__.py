"""The SDK for users: rewards and environments, served or attached to a run, without torch."""

from paceline.core.samples.chat import Message
from paceline.core.scoring import ScoreItem, ScoreResult
from paceline.sdk.agent import agent
from paceline.sdk.attached.attach_environment import EnvironmentAttachment, attach_environment
from paceline.sdk.attached.attach_reward import RewardAttachment, attach_reward
from paceline.sdk.client import RewardClient
from paceline.sdk.environment import Environment, Observation, Outcome, tool
from paceline.sdk.served.environment_server import EnvironmentServer, serve_environment
from paceline.sdk.served.reward_server import RewardServer, serve_reward

__all__ = [
    "Environment",
    "EnvironmentAttachment",
    "EnvironmentServer",
    "Message",
    "Observation",
    "Outcome",
    "RewardAttachment",
    "RewardClient",
    "RewardServer",
    "ScoreItem",
    "ScoreResult",
    "agent",
    "attach_environment",
    "attach_reward",
    "serve_environment",
    "serve_reward",
    "tool",
]
