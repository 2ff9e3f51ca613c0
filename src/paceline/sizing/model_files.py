"""Reads the sizes of a run's model from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config.model import ModelConfig
from paceline.models.facts import config_tree
from paceline.storage.models import local_model


def model_tree(model: ModelConfig) -> Mapping[str, Any]:
    """Returns the model's config.json; {} if it cannot be read, which the checks report."""
    return config_tree(local_model(model, "controller").path)
