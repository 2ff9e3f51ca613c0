"""Names of a run's streams, consumer groups and blobs."""

from __future__ import annotations

ROLLOUT_GROUP = "rollout"
REWARD_GROUP = "reward"
CONTROLLER_GROUP = "controller"


def prefix(run_id: str) -> str:
    """Returns the beginning of every name of the run."""
    return f"paceline:{run_id}:"


def prompts(run_id: str, version: int | None) -> str:
    """Names the stream of prompt groups for one policy version, which servers at other versions do not read.

    None names the stream of runs that push weights while answers are being sampled; their servers may have a
    newer version.
    """
    return f"{prefix(run_id)}prompts" + ("" if version is None else f":v{version}")


def trajectories(run_id: str) -> str:
    """Names the stream of finished samples' headers, for the scorers."""
    return f"{prefix(run_id)}trajectories"


def scored(run_id: str) -> str:
    """Names the stream of scored headers, for the barrier."""
    return f"{prefix(run_id)}scored"


def val_prompts(run_id: str, version: int) -> str:
    """Names the stream of held-out prompts that validation servers answer with one policy version."""
    return f"{prefix(run_id)}val_prompts:v{version}"


def val_scored(run_id: str, version: int) -> str:
    """Names the stream of scored headers for the validation of one policy version during training."""
    return f"{prefix(run_id)}val_scored:v{version}"


def mailbox(stream: str) -> str:
    """Returns a stream's name without run and version, such as prompts, scored or val_prompts."""
    *before, last = stream.split(":")
    return before[-1] if before and last[:1] == "v" and last[1:].isdecimal() else last


def blob(run_id: str, trajectory_id: str, server_id: str, incarnation: str, store: str = "") -> str:
    """Names the arrays of one sample.

    Each start of a server has its own keys, so a repeated sample overwrites nothing. The barrier admits one
    copy and deletes the others.

    Args:
        store: name of the blob store that holds it and all that is stored beside it; "": the broker.
    """
    at = f"@{store}" if store else ""
    return f"{prefix(run_id)}blob{at}:{trajectory_id}:{server_id}:{incarnation}"


def store_of(key: str) -> str:
    """Returns the blob store that a key names; "" if the key is in the broker's own server."""
    return key.partition(":blob@")[2].partition(":")[0]


def text(blob_key: str) -> str:
    """Names the decoded response of the sample with this blob, for the saved trajectories."""
    return f"{blob_key}:text"


def teacher_top_k(blob_key: str, digest: str) -> str:
    """Names a served teacher's likeliest tokens for the sample with this blob.

    With their digest, because a teacher that is asked again gives other numbers.
    """
    return f"{blob_key}:teacher:{digest}"


def learner_log_probs(blob_key: str) -> str:
    """Names the learner's log-probs of the sample with this blob, for the saved trajectories."""
    return f"{blob_key}:learner"


def image(run_id: str, image_hash: str) -> str:
    """Names the pixels of an image of the run's prompts; kept as long as a step needs them."""
    return f"{prefix(run_id)}image:{image_hash}"


def marker(run_id: str) -> str:
    """Names a blob that the controller stores with the run's first data: without it, the data was lost.

    It names the server process that holds the data (`Broker.incarnation`); another may lack the last
    messages.
    """
    return f"{prefix(run_id)}marker"
