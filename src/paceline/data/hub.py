"""Fetches data sets of the Hugging Face hub: finds the files of a repository that form a split."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config.base import Files, Section
from paceline.config.mixture import TrainSetConfig
from paceline.config.run import RunConfig
from paceline.config.validation import ValSetConfig
from paceline.core.errors import DataError
from paceline.storage.hub import CARD, CONVERTED, DATA_SUFFIXES, HubName, is_named, pinned, snapshot

_HELD_OUT = ("validation", "test", "val", "valid", "dev", "eval")


def local_files(places: Iterable[str], split: str) -> list[Path]:
    """Returns the local files of data files and data sets, in order; downloads missing ones.

    Args:
        places: paths, or names of data sets on the hub.
        split: "train" or "val", for names without a split; "val" also finds "validation", "test" and others.

    Raises:
        DataError: there is no such data set, configuration or split, or it cannot be fetched.
    """
    files: list[Path] = []
    for place in places:
        name = HubName.parse(place)
        files += [Path(place)] if name is None else _files(name, split)
    return files


def uses_hub(config: RunConfig) -> bool:
    """Returns whether the run names a model or data set on the hub."""
    model = config.model
    own = (model.path, model.tokenizer_path, config.critic.path)
    places = (*own, *config.frozen_folders.values(), *dict(model.paths).values())
    held_out = [file for prompts in config.held_out_sets for file in prompts.files]
    training = [file for prompts in config.data.training_sets for file in prompts.files]
    files = (*training, *held_out)
    return any(is_named(place) for place in (*places, *files) if place)


def pinned_run(config: RunConfig, known: Collection[str] = ()) -> RunConfig:
    """Returns the configuration with every hub name pinned to a commit, for all services and restarts.

    Args:
        known: pinned names of an earlier start of the run, which are kept.

    Raises:
        ModelError, DataError: a model or data set is not on the hub, or cannot be reached.
    """

    def model(place: str | None) -> str | None:
        return None if place is None else pinned(place, "model", known)

    def files(places: Files) -> Files:
        return tuple(pinned(place, "dataset", known) for place in places)

    def pinned_sets(sets: Mapping[str, TrainSetConfig | ValSetConfig]) -> Mapping[str, Section]:
        return {
            name: prompts.model_copy(update={"files": files(prompts.files)}) for name, prompts in sets.items()
        }

    section, data, critic = config.model, config.data, config.critic
    changes = {"path": model(section.path), "tokenizer_path": model(section.tokenizer_path)}
    return config.model_copy(
        update={
            "model": section.model_copy(update=changes),
            "critic": critic.model_copy(update={"path": model(critic.path)}),
            "algorithm": config.algorithm.with_places(lambda place: pinned(place, "model", known)),
            "data": data.model_copy(
                update={
                    "train_files": files(data.train_files),
                    "val_files": files(data.val_files),
                    **{key: pinned_sets(getattr(data, key)) for key in ("train_sets", "val_sets")},
                }
            ),
        }
    )


def _files(name: HubName, split: str) -> Sequence[Path]:
    """Returns the files of a split, found by the README's `configs` or else by the files' names.

    For a data set without parquet or JSONL files, uses the hub's conversion.
    """
    wanted = (name.split,) if name.split else _HELD_OUT if split == "val" else (split,)
    subset, listed = _chosen(name, _card(snapshot("dataset", name, (CARD,))))
    if listed is None:
        return _named_after(name, wanted) or _converted(name, subset, wanted)
    found_split = next((candidate for candidate in wanted if candidate in listed), None)
    if found_split is None:
        raise DataError(
            f"{name} has no split {' or '.join(wanted)}; its configuration {subset!r} has "
            f"{', '.join(sorted(listed))}: name one as {name.repo}:{subset}:SPLIT"
        )
    return _matching(name, listed[found_split]) or _converted(name, subset, (found_split,))


def _card(folder: Path) -> dict[str, Any]:
    """Returns the front matter of a data set's README; {} if there is none or it is unreadable."""
    import yaml

    try:
        text = (folder / CARD).read_text(encoding="utf-8")
        tree = yaml.safe_load(text.split("---", 2)[1]) if text.startswith("---") else {}
    except (OSError, IndexError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _chosen(name: HubName, card: dict[str, Any]) -> tuple[str, dict[str, tuple[str, ...]] | None]:
    """Returns a configuration and its file patterns by split, None if the README lists none.

    Raises:
        DataError: there are several configurations, and neither the name nor the README selects one.
    """
    configs = {
        str(entry.get("config_name")): entry
        for entry in card.get("configs") or ()
        if isinstance(entry, dict) and entry.get("data_files")
    }
    if not configs:
        return name.subset, None
    usual = [key for key, entry in configs.items() if entry.get("default") is True] + ["default", "main"]
    choices = [name.subset] if name.subset else [*usual, *(configs if len(configs) == 1 else ())]
    subset = next((key for key in choices if key in configs), None)
    if subset is None:
        raise DataError(
            f"{name} has the configurations {', '.join(sorted(configs))}; name one as {name.repo}:CONFIG"
        )
    return subset, _patterns(configs[subset]["data_files"])


def _patterns(files: Any) -> dict[str, tuple[str, ...]]:
    """Returns patterns by split; files without a split belong to "train"."""
    if isinstance(files, str):
        return {"train": (files,)}
    if all(isinstance(entry, str) for entry in files):
        return {"train": tuple(files)}
    paths = {str(entry["split"]): entry["path"] for entry in files}
    return {split: (path,) if isinstance(path, str) else tuple(path) for split, path in paths.items()}


def _named_after(name: HubName, splits: Sequence[str]) -> Sequence[Path]:
    """Returns the repository's files that are named after a split."""
    folders = [f"{name.subset}/", f"data/{name.subset}/"] if name.subset else ["", "data/"]
    for split in splits:
        patterns = [f"{folder}{split}{rest}" for folder in folders for rest in ("-*", ".*", "/*", "_*")]
        files = _matching(name, patterns)
        if files:
            return files
    return ()


def _converted(name: HubName, subset: str, splits: Sequence[str]) -> Sequence[Path]:
    """Returns a split's files from the hub's conversion.

    Raises:
        DataError: the hub has no conversion, or several configurations have this split.
    """
    for split in splits:
        try:
            files = _matching(replace(name, revision=CONVERTED), [f"{subset or '*'}/{split}/*.parquet"])
        except DataError as error:
            raise DataError(
                f"{name} has no parquet or JSONL files of a split {' or '.join(splits)}, and the hub has no "
                f"conversion ({error}); convert it to a file and name that file"
            ) from error
        if len({file.parent for file in files}) > 1:
            choices = ", ".join(sorted(file.parts[-3] for file in files))
            raise DataError(f"{name} has the configurations {choices}; name one as {name.repo}:CONFIG")
        if files:
            return files
    raise DataError(
        f"{name} has no parquet or JSONL files of a split {' or '.join(splits)}; name one as "
        f"{name.repo}:CONFIG:SPLIT"
    )


def _matching(name: HubName, patterns: Sequence[str]) -> Sequence[Path]:
    """Returns the files with rows that match a pattern, sorted by path."""
    folder = snapshot("dataset", name, patterns)
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in files if path.suffix in DATA_SUFFIXES)
