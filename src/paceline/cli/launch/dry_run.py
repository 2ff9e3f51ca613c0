"""`paceline train --dry-run`: what every service would be started with and would read."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

from paceline.broker.address import redact
from paceline.cli.launch import plan
from paceline.cli.launch.plan import Machine, ProcessSpec
from paceline.config.run import RunConfig
from paceline.service.process import BROKER_URL, DIE_WITH_PARENT, TOKEN

_SECRET = "(made at start)"


def describe(config: RunConfig, resources: Machine | None = None) -> str:
    """All services with command, environment and the sections that they read; secrets are left out."""
    run_dir = Path(config.trainer.run_dir or "runs/RUN_ID")
    specs = [
        plan.controller(config, run_dir, run_dir / "controller.address"),
        *plan.members(
            config,
            resources or Machine.here(),
            controller_address=plan.CONTROLLER_PLACE,
            master_port=0,
        ),
    ]
    tree = config.model_dump(mode="json")
    parts = [_broker(config)]
    told: set[str] = set()
    for spec in specs:
        parts.append(_process(spec))
        role = spec.role.value
        if role not in told:
            told.add(role)
            sections = {name: tree[name] for name in plan.SECTIONS[role]}
            parts.append(_indent(redact(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True))))
        else:
            parts.append(f"  (configuration as {role} above)\n")
    return "\n".join(parts)


def _broker(config: RunConfig) -> str:
    if config.broker.url:
        return "== redis: a running server, broker.url\n"
    return "== redis: a server of the run's own on 127.0.0.1, any free port, password made at start\n"


def _process(spec: ProcessSpec) -> str:
    secrets: Mapping[str, str] = {TOKEN: _SECRET} | (
        {BROKER_URL: _SECRET} if spec.role is plan.Role.CONTROLLER else {}
    )
    env = {**spec.env, DIE_WITH_PARENT: "1", **secrets}
    words = " ".join(
        f"{key}={shlex.quote(value) if value != _SECRET else value}" for key, value in env.items()
    )
    return f"== {spec.name}\n  command: {shlex.join(spec.command)}\n  environment: {words}"


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
