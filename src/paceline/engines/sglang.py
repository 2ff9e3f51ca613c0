"""Describes SGLang to the rest of the program; `paceline.rollout.engines.sglang` runs it."""

from __future__ import annotations

from typing import Final

from paceline.engines.facts import EngineFacts

SGLANG: Final = EngineFacts(
    title="SGLang",
    package="sglang",
    gpu_build="sglang",
    start="paceline.rollout.engines.sglang.engine:SglangEngine.start",
    check="paceline.rollout.engines.sglang.refusals:check",
    process_word="sglang::scheduler",
)
