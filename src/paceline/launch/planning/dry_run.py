"""Describes a run without starting it: the command, environment and configuration of every service."""

from __future__ import annotations

import shlex
import textwrap

import yaml

from paceline.broker.address import redact
from paceline.config.run import RunConfig
from paceline.launch.planning import plan
from paceline.launch.planning.plan import ProcessSpec
from paceline.runs.run_dir import folder_of
from paceline.service.process import BLOB_STORES, BROKER_URL, DIE_WITH_PARENT
from paceline.sizing.machine import Machine

_SECRET = "(made at start)"


def describe(config: RunConfig, machine: Machine | None = None) -> str:
    """Returns all services with command, environment and the sections that they read, without secrets."""
    run_dir = folder_of(config)
    specs = [
        plan.controller(config, run_dir, run_dir / "controller.address"),
        *plan.members(
            config, machine or Machine.here(), controller_address=plan.CONTROLLER_PLACE, master_port=0
        ),
    ]
    tree = config.model_dump(mode="json")
    parts = [_broker(config)]
    described: set[str] = set()
    for spec in specs:
        parts.append(_process(spec, has_stores=config.num_own_stores > 0))
        role = spec.role.value
        if role not in described:
            described.add(role)
            sections = {name: tree[name] for name in plan.SECTIONS[role]}
            parts.append(
                textwrap.indent(redact(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)), "    ")
            )
        else:
            parts.append(f"  (configuration as {role} above)\n")
    return "\n".join(parts)


def _broker(config: RunConfig) -> str:
    if config.broker.url:
        stores = f"; {len(config.broker.store_urls)} blob stores" if config.broker.store_urls else ""
        return f"== redis: a running server, broker.url{stores}\n"
    stores = f", and {config.num_own_stores} of its blob stores," if config.num_own_stores else ""
    return f"== redis: the run's own server{stores} on a free port of 127.0.0.1, password made at start\n"


def _process(spec: ProcessSpec, *, has_stores: bool) -> str:
    names = [spec.token_variable]
    if spec.role is plan.Role.CONTROLLER:
        names += [BROKER_URL, *([BLOB_STORES] if has_stores else [])]
    secrets = dict.fromkeys(names, _SECRET)
    env = {**spec.env, DIE_WITH_PARENT: "1", **secrets}
    words = " ".join(
        f"{key}={shlex.quote(value) if value != _SECRET else value}" for key, value in env.items()
    )
    return f"== {spec.name}\n  command: {shlex.join(spec.command)}\n  environment: {words}"
