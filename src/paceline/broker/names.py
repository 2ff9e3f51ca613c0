"""Names of a run's streams, consumer groups and blobs."""

from __future__ import annotations

ROLLOUT_GROUP = "rollout"
REWARD_GROUP = "reward"
CONTROLLER_GROUP = "controller"


def prefix(run_id: str) -> str:
    """The beginning of every name of the run."""
    return f"paceline:{run_id}:"


def prompts(run_id: str, version: int) -> str:
    """Prompt groups for exactly one policy version: a server at another version cannot even read them."""
    return f"{prefix(run_id)}prompts:v{version}"


def trajectories(run_id: str) -> str:
    """Headers of finished samples, for the scorers."""
    return f"{prefix(run_id)}trajectories"


def scored(run_id: str) -> str:
    """Scored headers, for the barrier."""
    return f"{prefix(run_id)}scored"


def blob(run_id: str, trajectory_id: str, server_id: str) -> str:
    """The arrays of one sample, with a key per server: the barrier admits one copy and deletes the others."""
    return f"{prefix(run_id)}blob:{trajectory_id}:{server_id}"


def text(blob_key: str) -> str:
    """The text of a sample's response, beside its arrays."""
    return f"{blob_key}:text"
