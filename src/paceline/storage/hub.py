"""Fetches models and data sets by their names on the Hugging Face hub, into huggingface_hub's cache.

`ORG/NAME`, with `@REVISION` (a branch, a tag or a commit), and for data with `:CONFIG:SPLIT` after it. A
place that exists, or whose first folder exists, is a path. `hf://ORG/NAME` is always a name of the hub.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.core.errors import DataError, ModelError, PacelineError

Kind = Literal["model", "dataset"]

OFFLINE = "HF_HUB_OFFLINE"
"""If set to 1, huggingface_hub uses only its cache."""

DATA_SUFFIXES = (".parquet", ".jsonl", ".ndjson")
"""Endings of files with rows; a place with such an ending is a path."""

CONVERTED = "refs/convert/parquet"
"""The branch on which the hub keeps every data set as parquet."""

CARD = "README.md"
"""The card of a repository; a data set's says which files belong to which split."""

_SCHEME = "hf://"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9._/-]+))?"
    rf"(?::(?P<subset>[A-Za-z0-9._-]*))?(?::(?P<split>[A-Za-z0-9._-]+))?"
)
_COMMIT = re.compile("[0-9a-f]{40}")
_MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors",)
# Other programs' copies of the same weights.
_NOT_OURS = ("original/*", "onnx/*", "*/*.safetensors")
_ERRORS: dict[Kind, type[PacelineError]] = {"model": ModelError, "dataset": DataError}


@dataclass(frozen=True, kw_only=True, slots=True)
class HubName:
    """Names a repository of the hub, or a part of it.

    Attributes:
        repo: ORG/NAME.
        revision: None for the default branch.
        subset: configuration of a data set; "" for its default.
        split: "" for the split that the caller wants.
    """

    repo: str
    revision: str | None = None
    subset: str = ""
    split: str = ""

    @classmethod
    def parse(cls, place: str) -> HubName | None:
        """Parses a place as a name; None if it is a path or another URL."""
        text = place.removeprefix(_SCHEME)
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        if text == place and _is_path(text, match["repo"]):
            return None
        return cls(
            repo=match["repo"],
            revision=match["revision"],
            subset=match["subset"] or "",
            split=match["split"] or "",
        )

    @property
    def is_pinned(self) -> bool:
        """Whether its revision is a commit or the hub's conversion of a data set."""
        return self.revision == CONVERTED or bool(_COMMIT.fullmatch(self.revision or ""))

    def __str__(self) -> str:
        """Writes the name in a form that cannot be taken for a path."""
        revision = f"@{self.revision}" if self.revision else ""
        rest = f":{self.subset}:{self.split}" if self.split else f":{self.subset}" if self.subset else ""
        return f"{_SCHEME}{self.repo}{revision}{rest}"


def _is_path(text: str, repo: str) -> bool:
    return Path(text).suffix in DATA_SUFFIXES or Path(text).exists() or Path(repo).parent.is_dir()


def is_named(place: str) -> bool:
    """Returns whether a place is a name on the hub."""
    return HubName.parse(place) is not None


def model_folder(place: str, *, weights: bool) -> Path:
    """Returns the local snapshot of a model; fetches missing files.

    Raises:
        ModelError: there is no such model or revision, or it is not in the cache and cannot be fetched.
    """
    name = HubName.parse(place)
    assert name is not None, place
    patterns = (*_MODEL_FILES, *(_WEIGHTS if weights else ()))
    folder = snapshot("model", name, patterns, ignore=_NOT_OURS)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} has no config.json: it is not a model for transformers; choose another")
    if weights and not any(folder.glob(_WEIGHTS[0])):
        raise ModelError(f"{name} has no weights as safetensors; choose a model or a revision that has them")
    return folder


def pinned(place: str, kind: Kind, known: Collection[str] = ()) -> str:
    """Returns the place with a commit instead of a branch, if it is a name of the hub.

    All services then use that commit, also when the run is continued later.

    Args:
        place: a path, a URL or a name.
        kind: whether the name is a model or a data set.
        known: names pinned earlier; a name without a revision takes its commit from there.

    Raises:
        ModelError, DataError: there is no such repository or revision, or it cannot be fetched.
    """
    name = HubName.parse(place)
    if name is None or name.is_pinned:
        return str(name or place)
    for earlier in filter(None, map(HubName.parse, known)):
        if replace(earlier, revision=None) == name:
            return str(earlier)
    files = ("config.json",) if kind == "model" else (CARD,)
    return str(replace(name, revision=snapshot(kind, name, files).name))


def snapshot(kind: Kind, name: HubName, patterns: Sequence[str], ignore: Sequence[str] = ()) -> Path:
    """Returns a folder with matching files of a repository; the folder's name is the commit.

    Raises:
        ModelError, DataError: there is no such repository or revision, or it cannot be fetched.
    """
    from huggingface_hub import constants, snapshot_download

    with _hub_errors(kind, name):
        return Path(
            snapshot_download(
                name.repo,
                repo_type=kind,
                revision=name.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignore),
                local_files_only=constants.HF_HUB_OFFLINE,
                library_name="paceline",
            )
        )


def push_model(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Uploads a folder to the hub as one commit of a model, which is created if missing.

    Returns:
        The commit's address.

    Raises:
        ModelError: the name is invalid, or the hub refuses it or cannot be reached.
    """
    from huggingface_hub import HfApi, constants, errors

    name, hub = HubName.parse(f"{_SCHEME}{repo}"), constants.ENDPOINT
    if name is None or str(name) != f"{_SCHEME}{name.repo}":
        raise ModelError(f"{repo!r} is not the name of a model on the hub; give ORG/NAME")
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{name.repo} was not pushed: {OFFLINE}=1 forbids network access")
    api = HfApi(endpoint=hub, library_name="paceline")
    try:
        api.create_repo(name.repo, private=private or None, exist_ok=True)
        done = api.upload_folder(repo_id=name.repo, folder_path=folder, commit_message=message)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "; set HF_TOKEN to a token that may write there" if status in (401, 403) else ""
        raise ModelError(f"{hub} did not take {name.repo} (HTTP {status}){hint}: {error}") from error
    except (OSError, RuntimeError, ValueError) as error:
        why = f"{error} {error.__cause__ or ''}".strip()
        raise ModelError(f"{name.repo} could not be pushed to {hub}: {why}") from error
    return str(done.commit_url)


@contextlib.contextmanager
def _hub_errors(kind: Kind, name: HubName) -> Iterator[None]:
    """Turns errors of huggingface_hub into errors of this program that say what to do."""
    from huggingface_hub import constants, errors

    what, error_type, hub = kind.replace("dataset", "data set"), _ERRORS[kind], constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as error:
        raise error_type(
            f"{name}: the owner of this {what} asks for consent; accept the terms on its page at {hub} and "
            "set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise error_type(
            f"{name.repo} is not a folder or file here, and {hub} has no {what} of this name (or it is "
            "private: set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise error_type(
            f"{name.repo} has no revision {name.revision} at {hub}; correct what follows the @"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise error_type(_unreachable(what, name, hub, offline=constants.HF_HUB_OFFLINE)) from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise error_type(f"the {what} {name.repo} cannot be fetched from {hub}: {error}") from error


def _unreachable(what: str, name: HubName, hub: str, *, offline: bool) -> str:
    why = "and nothing may be fetched (--offline)" if offline else f"and {hub} cannot be reached"
    instead = "without --offline" if offline else "with a network"
    return (
        f"{name.repo} is not a folder or file here, this {what} is not in huggingface_hub's cache, or only "
        f"in part, {why}: start once {instead}, set HF_ENDPOINT to a mirror, or give the path of a copy"
    )
