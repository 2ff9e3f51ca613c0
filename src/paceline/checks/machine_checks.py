"""Checks the machine where the run will start: packages, GPUs and their memory, trackers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from paceline.checks.engine_python import require_engine
from paceline.checks.environment import INSTALL
from paceline.checks.model_checks import model_config
from paceline.checks.preflight_check import CheckNeed, PreflightCheck, for_each_engine
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.engines.registry import engine_facts
from paceline.models.model_shape import ModelShape
from paceline.show.trackers.adapters import check_installed
from paceline.sizing.gpus import share_gpus
from paceline.sizing.machine import Machine
from paceline.sizing.memory.memory_plan import MemoryPlan

_PACKAGES = ("torch", "transformers", "safetensors", "pyarrow", "aiohttp")


def require_packages(config: RunConfig, *, engine: bool = True) -> None:
    """Checks that the packages that services import are installed, without importing them.

    Args:
        engine: also check the engine's packages, which only hosts of rollout servers have.

    Raises:
        ConfigError: there is no engine of this name.
        EnvironmentLackError: packages are missing, for example because the wheel was installed without
            extras.
    """
    if engine:
        for_each_engine(config, _require_with_engine)
    else:
        _require(_PACKAGES)


def _require_with_engine(config: RunConfig) -> None:
    facts = engine_facts(config.rollout.name)
    if config.rollout.python:
        require_engine(config.rollout.python, facts)
    _require(_PACKAGES if config.rollout.python else [*_PACKAGES, facts.package])
    if not config.rollout.python and (library := facts.lacking_library):
        raise EnvironmentLackError(
            f"{facts.title}'s build for CPUs loads {library.file}, which is not here: {library.remedy}"
        )


def _require(named: Sequence[str]) -> None:
    lacking = [name for name in named if importlib.util.find_spec(name) is None]
    if lacking:
        raise EnvironmentLackError(
            f"not installed in this environment: {', '.join(lacking)}; install all with {INSTALL}"
        )


def devices_line(config: RunConfig) -> str:
    """Says which service gets which device of this machine."""
    machine = Machine.here()
    learner, rollout = _require_gpus(config, machine)
    if not learner:
        return f"CPU, {machine.num_cores} cores"
    return f"learner on GPUs {list(learner)}, rollout on {[list(gpus) for gpus in rollout]}"


def _require_gpus(config: RunConfig, machine: Machine) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Returns the learner's and each rollout server's GPUs; raises EnvironmentLackError if any is absent."""
    learner, rollout = share_gpus(config, machine.gpus)
    wanted = {*learner, *(gpu for gpus in rollout for gpu in gpus), *config.reward.model_gpus}
    absent = sorted(wanted - set(machine.gpus))
    if absent:
        raise EnvironmentLackError(
            f"there are no GPUs {', '.join(map(str, absent))} here (found: {list(machine.gpus) or 'none'}); "
            "correct learner.devices, rollout.devices and reward.models, or set learner.device: cpu"
        )
    return learner, rollout


def _trackers_line(config: RunConfig) -> str:
    check_installed(config.trainer.loggers)
    return ", ".join(config.trainer.loggers) or "none"


def _memory_line(config: RunConfig) -> str:
    machine = Machine.here()
    try:
        learner, rollout = share_gpus(config, machine.gpus)
    except ConfigError:
        return "not planned, because the devices have a fault"
    if not learner:
        return "CPU, nothing to plan"
    engines = tuple(gpu for gpus in rollout for gpu in gpus)
    return _memory_plan(config, learner, engines, machine)


def _memory_elsewhere_line(config: RunConfig) -> str:
    """Returns only the learner's part of the plan, because nothing is known about the GPUs."""
    return "CPU, nothing to plan" if config.learner.device == "cpu" else _memory_plan(config, (), ())


def _memory_plan(
    config: RunConfig, learner: Sequence[int], engines: Sequence[int], machine: Machine | None = None
) -> str:
    shape = ModelShape.of(model_config(config))
    if shape is None:
        return "not planned: config.json does not have the model's sizes under known names"
    plan = MemoryPlan.of(
        config,
        shape,
        learner_gpus=learner,
        engine_gpus=engines,
        totals={} if machine is None else machine.gpu_bytes,
        host_bytes=0 if machine is None else machine.host_bytes,
    )
    return "\n      ".join(["the most that each phase takes (an estimate)", *plan.lines()])


CHECKS = (
    PreflightCheck(name="devices", run=devices_line, needs=CheckNeed.HERE),
    PreflightCheck(name="memory", run=_memory_line, needs=CheckNeed.HERE),
    PreflightCheck(name="memory", run=_memory_elsewhere_line, needs=CheckNeed.ELSEWHERE),
    PreflightCheck(name="trackers", run=_trackers_line, needs=CheckNeed.HERE),
)
