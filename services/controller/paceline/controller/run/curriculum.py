"""Lets the user's function choose the weights of the training sets (`data.curriculum`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.text import one_line
from paceline.core.user_functions.user_function import find_function
from paceline.data.mixture import PromptMixture

Choose = Callable[[int, Mapping[str, float], Mapping[str, float]], Mapping[str, float]]
"""`choose(step, weights, metrics)`: weights for `step`, given those of the step before and its metrics."""


class Curriculum:
    """Calls the function once after each step; the mixture's state holds the weights that it returned.

    Therefore a resumed run has the weights without another call.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, config: RunConfig, mixture: PromptMixture) -> None:
        self._mixture, self._choose, self._subject = mixture, cast(Choose | None, None), ""
        if isinstance(config.data.curriculum, str):
            self._subject = f"data.curriculum={config.data.curriculum}"
            self._choose = cast(Choose, find_function(config.data.curriculum, "curriculum"))

    def after(self, step: int, metrics: Mapping[str, float]) -> None:
        """Calls the function for the weights of the next step.

        Raises:
            ConfigError: the function fails, or its result is not a set of weights.
        """
        if self._choose is None:
            return
        names = self._mixture.names
        weights = dict(zip(names, self._mixture.weights(step), strict=True))
        try:
            chosen = self._choose(step + 1, weights, dict(metrics))
        except Exception as error:
            message = f"{self._subject} raised {type(error).__name__} after step {step}: {error}"
            raise ConfigError(one_line(message)) from error
        self._mixture.choose(self._checked(chosen, step))

    def _checked(self, chosen: Any, step: int) -> list[float]:
        names = self._mixture.names
        are_weights = isinstance(chosen, Mapping) and set(chosen) <= set(names)
        if are_weights:
            weights = [chosen.get(name, 0.0) for name in names]
            are_weights = all(isinstance(w, int | float) and math.isfinite(w) and w >= 0 for w in weights)
            if are_weights and any(weights):
                return [float(weight) for weight in weights]
        raise ConfigError(
            f"{self._subject} returned {chosen!r} after step {step}; return a weight of 0 or more for each "
            f"of {', '.join(names)}, one of them above 0"
        )
