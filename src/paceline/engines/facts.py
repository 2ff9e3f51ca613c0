"""Facts about engines for checks, launcher, sizing, chaos and learner."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from paceline.service import packages


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemLibrary:
    """A system library: its file, and how to install it."""

    name: str
    file: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """Describes an engine without importing the engine or torch.

    An engine's functions are named as "module:function" and imported on use by a rollout server or its check
    (`paceline.rollout.engines.loading`).

    Attributes:
        gpu_build: the distribution with the build for GPUs; "" if there is none.
        cpu_build: the distribution with the build for CPUs, under the same import name; "" if there is none.
        cpu_library: a system library that the build for CPUs loads.
        start: an `async def start(config: RunConfig) -> Engine`.
        check: a `def check(config: RunConfig) -> None` that raises ConfigError for settings that the engine
            cannot run with; it must not need the engine itself, because `paceline check` also runs without
            it.
        begin: a `def begin() -> None` to call while the process has no threads; "" for none.
        score: a `def largest_difference(folder: Path, rows: Sequence[ScoredRow]) -> float` that compares the
            engine's log-probs on a CPU with given ones; "" if the engine cannot.
        compared: values of `model_type` whose log-probs were compared with transformers' on a GPU and equal
            them; None if there is no need to tell.
        process_word: word in the command line that identifies the engine's process among a server's children;
            "" if the engine runs in the server's own process.
        cache_argument: the argument of `rollout.engine_kwargs` that fixes the KV cache's bytes; "" if there
            is none, and the engine computes them from its share of the GPU.
        prefill_tokens: number of prompt tokens that the engine computes at a time on a GPU by default.
        rest_bytes: minimum GPU memory for its activations and CUDA graphs.
        asleep_bytes: GPU memory that the engine keeps while asleep, for its context and captured graphs.
        small_below: parameters of the layers (`dense_size`) below which the host limits the engine's rate on
            a GPU; a process of its own then runs the model while the engine's plans the next step.
    """

    title: str
    package: str
    gpu_build: str = ""
    cpu_build: str = ""
    cpu_library: SystemLibrary | None = None
    start: str
    check: str
    begin: str = ""
    score: str = ""
    compared: tuple[str, ...] | None = None
    process_word: str = ""
    cache_argument: str = ""
    prefill_tokens: int = 8192
    rest_bytes: int = 2 << 30
    asleep_bytes: int = 2 << 30
    small_below: int = 0

    @property
    def installed_build(self) -> str:
        """The installed distribution, preferably the one for GPUs; "" if neither is installed."""
        builds = (self.gpu_build, self.cpu_build)
        return next((build for build in builds if build and packages.version(build)), "")

    @property
    def has_cpu_build(self) -> bool:
        """Whether its build for CPUs is installed here."""
        return bool(self.cpu_build) and packages.version(self.cpu_build) is not None

    @property
    def lacking_library(self) -> SystemLibrary | None:
        """The library that the installed build loads and this machine lacks; None if there is none."""
        if self.cpu_library is None or not self.has_cpu_build:
            return None
        try:
            ctypes.CDLL(self.cpu_library.file)
        except OSError:
            return self.cpu_library
        return None
