"""Reads the sizes of a run's model from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.model import ModelConfig
from paceline.storage.models import local_model


def model_tree(model: ModelConfig) -> Mapping[str, Any]:
    """Returns the model's config.json; {} if it cannot be read, which the checks report."""
    folder = Path(local_model(model, "controller").path)
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}
