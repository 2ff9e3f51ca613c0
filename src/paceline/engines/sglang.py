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
    compared=(
        *("arcee", "cohere", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4"),
        *("glm4_moe", "glm4_moe_lite", "granite", "helium", "llama", "minimax_m2", "ministral3", "mistral"),
        *("mixtral", "olmo", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        *("seed_oss", "smollm3", "starcoder2"),
    ),
    process_word="sglang::scheduler",
)
