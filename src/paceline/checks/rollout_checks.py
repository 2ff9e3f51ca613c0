"""Checks the parts that sample: the engine, episodes and their environment."""

from __future__ import annotations

from pathlib import Path

from paceline.checks.preflight_check import CheckNeed, PreflightCheck, for_each_engine, reach
from paceline.checks.service_checks import engine_log_probs
from paceline.config.run import RunConfig

# An environment that was started at the same time as the run imports its packages first.
_PATIENCE_S = 10.0


def engine_line(config: RunConfig) -> str:
    """Has each engine check the configuration; returns their names."""
    from paceline.rollout.engines.loading import check_engine

    for_each_engine(config, check_engine)
    return ", ".join(config.rollout.engine_names)


def _episodes_line(config: RunConfig) -> str:
    from paceline.rollout.episodes.check import check_episodes

    return check_episodes(config)


def environment_line(config: RunConfig) -> str:
    """Checks that an environment with this protocol answers at the configured address."""
    service = config.rollout.environment
    if service is None:
        return "none"
    if service.address is None:
        return f"{service.attached}, which attaches to the rollout servers of the run"
    remedy = "start it (serve_environment)"
    key = "rollout.environment.address"
    reach(key, service.address, "the environment", remedy, patience_s=_PATIENCE_S)
    from paceline.rollout.episodes.check import check_environment

    return check_environment(config)


def _environment_line(config: RunConfig) -> str:
    """Returns the line of `environment_line`, and the outcome of one episode."""
    from paceline.rollout.episodes.check import check_episode

    line, service = environment_line(config), config.rollout.environment
    if service is None or service.address is None:
        return line
    return f"{line}\n      an episode: {check_episode(config)}"


def _log_probs_line(config: RunConfig, kept: Path) -> str:
    return "\n      ".join(for_each_engine(config, lambda own: engine_log_probs(own, kept)))


CHECKS = (
    PreflightCheck(name="episodes", run=_episodes_line),
    PreflightCheck(name="engine", run=engine_line),
    PreflightCheck(name="environment", run=_environment_line, needs=CheckNeed.HERE),
    PreflightCheck(
        name="engine's log-probs",
        run=_log_probs_line,
        needs=CheckNeed.ENGINE,
        wait="the engine scores the same rows, some 15 s",
    ),
)
