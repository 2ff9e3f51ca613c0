"""What ranks exchange outside of training: bytes, and whether all ranks succeeded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from paceline.core import errors
from paceline.core.errors import ConfigError, PacelineError
from paceline.learner.distributed.ranks import Ranks

T = TypeVar("T")


class CommandError(PacelineError):
    """Wraps an error after which every rank is as it was before the command, so the ranks go on."""

    def __init__(self, cause: PacelineError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def attempt(ranks: Ranks, act: Callable[[], T]) -> T:
    """Runs something that may fail on some ranks and changes nothing if it fails, then agrees on the outcome.

    Raises:
        CommandError: a PacelineError was raised on some rank.
    """
    failure: CommandError | None = None
    try:
        result = act()
    except PacelineError as error:
        failure = CommandError(error)
    agree(ranks, failure)
    return result


def agree(ranks: Ranks, error: CommandError | None) -> None:
    """Tells all ranks whether any failed; if so, all raise the error of the lowest rank that failed.

    Every rank must call it at the same place, before it changes anything.

    Raises:
        CommandError: this rank's own error, or one with the class and message of another rank's.
    """
    if ranks.world.size > 1:
        note = b"" if error is None else json.dumps([type(error.cause).__name__, str(error)]).encode()
        for rank, other in enumerate(gather_bytes(note, ranks)):
            if other and (error is None or rank < ranks.world.rank):
                name, message = json.loads(other)
                raise CommandError(_error_of(name, f"learner rank {rank}: {message}"))
    if error is not None:
        raise error


def require_same(ranks: Ranks, text: str) -> None:
    """Raises ConfigError on every rank unless all ranks pass the same text; every rank calls it."""
    texts = [text.decode() for text in gather_bytes(text.encode(), ranks)]
    if len(set(texts)) > 1:
        listing = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
        raise ConfigError(
            f"the algorithm's step goes on differently from rank to rank ({listing}); base it on values that "
            "are equal on all ranks, not on a rank's own rows"
        )


def broadcast_bytes(data: bytes, ranks: Ranks) -> bytes:
    """Returns rank 0's bytes on every rank, over the control group."""
    length = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(length, 0, group=ranks.control)
    payload = torch.empty(int(length.item()), dtype=torch.uint8)
    if ranks.world.rank == 0:
        payload = _tensor(data)
    dist.broadcast(payload, 0, group=ranks.control)
    return payload.numpy().tobytes()


def gather_bytes(data: bytes, ranks: Ranks) -> list[bytes]:
    """Returns every rank's bytes on every rank, over the control group."""
    if ranks.world.size == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world.size)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=ranks.control)
    lengths = [int(size.item()) for size in sizes]
    if not any(lengths):
        return [b""] * ranks.world.size
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = _tensor(data)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=ranks.control)
    return [part[:size].numpy().tobytes() for part, size in zip(parts, lengths, strict=True)]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _error_of(name: str, message: str) -> PacelineError:
    """Returns another rank's error, from its class name and message."""
    kind = getattr(errors, name, PacelineError)
    try:
        error = kind(message)
    except TypeError:  # the class's constructor needs more than a message
        error = PacelineError(message)
    return error if isinstance(error, PacelineError) else PacelineError(message)
