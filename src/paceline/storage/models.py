"""Finds a service's local model folder: its own path, or a copy of a URL or a hub repository."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import Literal

from paceline.config.model import ModelConfig
from paceline.storage.cache import Fetch, fetch
from paceline.storage.folder import Folder, is_url
from paceline.storage.hub import is_named, model_folder

log = logging.getLogger(__name__)

Service = Literal["controller", "rollout", "learner", "reward"]

# Only the learner reads weights; rollout servers get theirs by push.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def local_model(
    model: ModelConfig,
    service: Service,
    *,
    tell: Callable[[str], None] = log.info,
    stopped: Callable[[], bool] = lambda: False,
) -> ModelConfig:
    """Returns the model's section with the paths for a service on this machine; fetches remote folders.

    Args:
        service: which of `model.paths` applies; only the learner copies weights.
        tell: called with a message from time to time while files are copied.
        stopped: returns True to cancel the copy.

    Raises:
        ConfigError: fsspec does not know the URL's scheme.
        ModelError: a URL cannot be copied here, or a name of the hub cannot be fetched.
        InterruptedError: `stopped` returned True.
    """
    how = Fetch(
        max_bytes=int(model.cache_gib * 2**30),
        wanted=partial(_is_wanted, weights=service == "learner"),
        tell=tell,
        stopped=stopped,
    )
    own = getattr(model.paths, service)
    # A service's own folder has the tokenizer, too.
    tokenizer = None if own is not None else model.tokenizer_path
    changes = {
        "path": _local(own or model.path, how, weights=service == "learner"),
        "tokenizer_path": _local(tokenizer, how, weights=False) if tokenizer is not None else None,
    }
    return model.model_copy(update=changes)


def local_folder(place: str, model: ModelConfig, *, weights: bool = True) -> str:
    """Returns the path of another model folder, such as the critic's; copies a remote one first.

    Args:
        place: a path, a URL or a name of the hub.
        model: model of the run, with the disk limit of copies.
    """
    how = Fetch(max_bytes=int(model.cache_gib * 2**30), wanted=partial(_is_wanted, weights=weights))
    return _local(place, how, weights=weights)


def _local(place: str, how: Fetch, *, weights: bool) -> str:
    if is_named(place):
        return str(model_folder(place, weights=weights))
    return str(fetch(Folder.at(place), how)) if is_url(place) else place


def _is_wanted(name: str, *, weights: bool) -> bool:
    return weights or PurePosixPath(name).suffix not in _WEIGHTS
