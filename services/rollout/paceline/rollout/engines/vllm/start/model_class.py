"""Imports vLLM's class of a model here, before vLLM asks what the class can do.

vLLM would ask a new interpreter, to keep CUDA out of this process. That interpreter imports torch and vLLM
again, which takes ten seconds of CPU time if vLLM's cache in the home folder is empty, as in every new
container. The classes of vLLM's models do not start CUDA on import.
"""

from __future__ import annotations

import logging
from pathlib import Path

from paceline.models.facts import config_tree

log = logging.getLogger(__name__)


def load(folder: Path) -> None:
    """Loads the classes that config.json names; leaves classes that fail to vLLM, which says why."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in config_tree(folder).get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is None:
            continue
        try:
            ModelRegistry.register_model(architecture, known.load_model_cls())
        except Exception:  # an import may raise anything
            log.debug("vLLM's %s is not loaded ahead", architecture, exc_info=True)
