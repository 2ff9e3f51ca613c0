"""`paceline up`: trains on several hosts, through ssh or another remote shell."""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path

from paceline.checks.host_check import check_hosts
from paceline.checks.preflight import notes, quick_check
from paceline.cli.commands import arguments
from paceline.cli.commands.start.train import train
from paceline.config.load import load
from paceline.config.run import RunConfig
from paceline.launch.launcher import ProcessPlanner
from paceline.launch.planning import hosts as several
from paceline.service.identity.credentials import TLS_DIR
from paceline.sizing.colocation import settle_elsewhere
from paceline.sizing.memory_choice import LEAST
from paceline.sizing.placement import settle_model
from paceline.sizing.update import settle_context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("hosts", metavar="HOSTS.yaml", help="file with the hosts and what runs on each")
    arguments.add_overrides(parser, of="the run's configuration")
    arguments.add_form(parser)


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    hosts = arguments.load_config(several.Hosts, args.hosts, [])
    config = load(RunConfig, Path(args.hosts).parent / hosts.config, args.overrides)
    config = several.with_hosts(config, hosts)
    on_gpus = config.learner.device != "cpu" and any(host.gpus for host in hosts.hosts)
    model, words = settle_model(config.model, on_gpus=on_gpus)
    config, remarks = settle_context(config.model_copy(update={"model": model}))
    remarks = [words, *remarks] if words else remarks
    if config.placement == "colocated":
        config = settle_elsewhere(config, on_gpus=on_gpus)
    if on_gpus:
        config = config.changed(actor={"memory": config.actor.memory.with_rest_of(LEAST)})
        config, copies = several.with_copies(config, hosts)
        remarks += copies
    quick_check(config, here=False)
    service = config.service
    check_hosts(hosts, tls_dir=os.environ.get(TLS_DIR), insecure=service.insecure, ports=service.ports)
    planner = ProcessPlanner(members=functools.partial(several.members, hosts))
    return train(config, form=args.form, planner=planner, remarks=[*remarks, *notes(config)])
