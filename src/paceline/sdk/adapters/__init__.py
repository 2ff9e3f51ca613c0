"""Wraps environments of other libraries as environments of a run; each runs in the user's process.

`paceline.sdk.adapters.reasoning_gym` needs its library and must be imported separately.
"""

from paceline.sdk.adapters.gym import gym_environment
from paceline.sdk.adapters.mcp import mcp_environment
from paceline.sdk.adapters.nemo_gym import nemo_gym_environment, nemo_gym_rows
from paceline.sdk.adapters.textarena import textarena_environment
from paceline.sdk.adapters.verifiers import verifiers_environment, verifiers_rows

__all__ = [
    "gym_environment",
    "mcp_environment",
    "nemo_gym_environment",
    "nemo_gym_rows",
    "textarena_environment",
    "verifiers_environment",
    "verifiers_rows",
]
