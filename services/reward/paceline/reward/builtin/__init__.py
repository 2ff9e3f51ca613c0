"""The reward functions that ship with Paceline; importing them loads no torch, no grpc and no sympy.

`__all__` is their registry. Every child process imports them all, so a library that takes seconds to import
is imported inside the function that needs it.
"""

from __future__ import annotations

from paceline.reward.builtin.grade_school import gsm8k
from paceline.reward.builtin.matching import exact_match
from paceline.reward.builtin.mathematics import math_verify

__all__ = ["exact_match", "gsm8k", "math_verify"]
