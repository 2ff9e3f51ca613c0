"""Finds, in the trace of a model's loading, the slices of the learner's tensors that it needs."""

from __future__ import annotations

import logging

from torch import nn

from paceline.core.errors import ModelError
from paceline.rollout.engines.weights.trace import Places, parameter_places, recall
from paceline.weights.geometry.layout import ITEM_SIZES, RankLayout

logger = logging.getLogger(__name__)


def describe_model(model: nn.Module) -> RankLayout:
    """Returns which slices of the learner's tensors this rank's model needs, and where they land.

    Args:
        model: the engine's model, whose loading was traced when it was built.

    Returns:
        The layout; without slices and with `full_tensors` set if some parameter cannot be pushed in place.

    Raises:
        ModelError: the parameters have several types besides float32, or one that cannot be sent (quantized
            weights).
    """
    dtype = _sent_dtype(model)
    trace = recall(model)
    reasons = {"": "its loading was not traced"} if trace is None else dict(trace.reasons)
    if trace is not None:
        reasons |= _moved(trace.places, parameter_places(model))
    if trace is None or reasons:
        name, reason = next(iter(reasons.items()))
        logger.warning(
            "weights take the general path (full tensors through the engine's loader) because of %s: %s (%d "
            "in all)",
            name or type(model).__name__,
            reason,
            len(reasons),
        )
        return RankLayout(dtype=dtype, slices=(), full_tensors=True)
    return RankLayout(dtype=dtype, slices=trace.slices)


def _moved(before: Places, now: Places) -> dict[str, str]:
    """Returns the parameters that an engine has repacked since it was built, with reasons."""
    return {
        name: "it was moved after it was loaded"
        for name in before.keys() | now.keys()
        if before.get(name) != now.get(name)
    }


def _sent_dtype(model: nn.Module) -> str:
    """Returns the type in which weights are sent: the model's shortest.

    In a bfloat16 model an engine may keep the gates of some routers in float32. The learner rounds gates to
    bfloat16, so float32 holds them exactly.
    """
    examples = {str(param.dtype).removeprefix("torch."): name for name, param in model.named_parameters()}
    short = [dtype for dtype in examples if dtype != "float32"] or list(examples)
    if len(short) == 1 and short[0] in ITEM_SIZES:
        return short[0]
    raise ModelError(
        f"the engine keeps parameters of types {examples} (type: an example); weights are pushed only "
        f"into a model whose parameters have one type out of {', '.join(ITEM_SIZES)}, "
        "or one of these and float32: choose it with `dtype`, without quantization"
    )
