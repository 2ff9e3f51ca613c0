"""Environments of other libraries as environments of a run; each runs in a process of the user."""

from paceline.sdk.adapters.gym import gym_environment
from paceline.sdk.adapters.mcp import mcp_environment
from paceline.sdk.adapters.verifiers import verifiers_environment, verifiers_rows

__all__ = ["gym_environment", "mcp_environment", "verifiers_environment", "verifiers_rows"]
