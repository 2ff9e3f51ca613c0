"""Traces how SGLang would load a model that it builds without weights; see `weights/trace.py`."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from paceline.rollout.engines.weights.checkpoint import learner_shapes
from paceline.rollout.engines.weights.trace import traced
from paceline.weights.corrections import use_factor_parameters


def install() -> None:
    """Wraps SGLang's loader for models without weights.

    Tracing is possible only between creating the parameters and converting them to kernel format. SGLang has
    no hook there, but calls one function between the two.
    """
    from sglang.srt.model_loader import loader

    load, between = loader.DummyModelLoader.load_model, loader._post_load_weights

    @functools.wraps(load)
    def load_traced(self: Any, *, model_config: Any, device_config: Any) -> Any:
        config = model_config.hf_config
        with contextlib.ExitStack() as conversion:

            def begin(model: Any) -> None:
                between(model)
                use_factor_parameters(model)
                shapes = learner_shapes(config)
                conversion.enter_context(traced(model, shapes, model_type=config.model_type))

            loader._post_load_weights = begin
            try:
                return load(self, model_config=model_config, device_config=device_config)
            finally:
                loader._post_load_weights = between

    loader.DummyModelLoader.load_model = load_traced
