"""Identities: runs, members, trajectories, and the seeds and keys derived from them."""

from __future__ import annotations

import enum
import hashlib
import re
import secrets
import time
from dataclasses import dataclass


class Purpose(enum.StrEnum):
    """The purposes for which Paceline itself requests prompt groups.

    TRAIN: for training. GREEDY: one greedy answer to a training prompt, whose score is a baseline (ReMax); it
    is never trained on. VALIDATE: for measuring. A dataflow may name others (`check_purpose`).
    """

    TRAIN = "train"
    GREEDY = "greedy"
    VALIDATE = "validate"


NEVER_TRAINED = (Purpose.GREEDY.value, Purpose.VALIDATE.value)
"""Purposes whose samples never become rows of a batch."""

_PURPOSE = re.compile(r"[a-z][a-z0-9_]{0,31}")


def check_purpose(name: str) -> str:
    """Returns a purpose's name unchanged; raises ValueError if the name is not allowed."""
    if not _PURPOSE.fullmatch(name):
        raise ValueError(
            f"a purpose is named {name[:40]!r}; write a lower-case letter, then at most 31 lower-case "
            "letters, digits and _"
        )
    return name


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class TrajectoryId:
    """Names one sample of one prompt in one step of a run.

    The order of the fields is the order of a batch: it never depends on arrival.
    """

    step: int
    purpose: str
    prompt_id: int
    sample_index: int

    @property
    def place(self) -> tuple[int, str, int]:
        """Its place among the rows of a step: prompt id, purpose, sample index."""
        return self.prompt_id, self.purpose, self.sample_index

    def __str__(self) -> str:
        return f"{self.purpose}:{self.step}:{self.prompt_id}:{self.sample_index}"

    @classmethod
    def parse(cls, text: str) -> TrajectoryId:
        """Reads the text that `str()` writes; raises ValueError on anything else."""
        purpose, step, prompt_id, sample_index = text.split(":")
        return cls(
            step=int(step),
            purpose=check_purpose(purpose),
            prompt_id=int(prompt_id),
            sample_index=int(sample_index),
        )


def sample_seed(
    *, run_seed: int, step: int, prompt_id: int, sample_index: int, purpose: str = Purpose.TRAIN
) -> int:
    """Returns the sampling seed of one trajectory, in [0, 2**31).

    A sample that is repeated after a crash gets the same tokens on any server. The same prompt gets different
    tokens in a later step or for another purpose.
    """
    words = f"{run_seed}/{step}/{prompt_id}/{sample_index}".encode()
    if purpose not in tuple(Purpose):
        words += f"/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 33


def new_run_id(name: str = "run") -> str:
    """Returns a run id that sorts by start time: NAME-YYYYMMDD-HHMMSS-xxxx (UTC)."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def run_id_for(folder_name: str, name: str) -> str:
    """Returns the id of a run in a folder: the folder's name if `new_run_id` made it, else a new id."""
    return folder_name if re.fullmatch(r".+-\d{8}-\d{6}-[0-9a-f]{4}", folder_name) else new_run_id(name)
