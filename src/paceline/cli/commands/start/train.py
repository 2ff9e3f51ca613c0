"""`paceline train`: trains in local processes, shows the progress and writes a report."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from paceline.checks.preflight import notes, quick_check
from paceline.cli.commands import arguments
from paceline.cli.commands.arguments import Form
from paceline.config.run import RunConfig
from paceline.core.errors import EXIT_FAILED, PacelineError
from paceline.data.reading.epochs import tokenize_ahead, with_epochs_counted
from paceline.launch.launcher import ProcessPlanner, launch
from paceline.launch.planning import dry_run
from paceline.runs import run_dir as run_dirs
from paceline.service.grpc.server import check_port
from paceline.service.observability.logs import LineHandler
from paceline.service.process import die_with_parent
from paceline.show.live.table import LiveView
from paceline.show.live.view import JsonView, PlainView, View
from paceline.show.live.wrapping_views import ExpectingView
from paceline.show.report.summary import closing_lines
from paceline.show.trackers.sink import Sink, TrackingView
from paceline.show.ui.serve import Listen, add_listen, serving
from paceline.sizing.expectation import Expectation
from paceline.sizing.machine import Machine
from paceline.sizing.placement import settle

log = logging.getLogger(__name__)

_UI = "--ui-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_config(parser, description="configuration of the run")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the command and resolved configuration of every service; start nothing",
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="let others join: keep the run's token in RUN_DIR/token, and print the commands that start "
        "further rollout servers and reward services",
    )
    parser.add_argument(
        "--ui", action="store_true", help="serve the run as a page, as `paceline ui` does, while it trains"
    )
    add_listen(parser, _UI)
    arguments.add_form(parser)


def run(args: argparse.Namespace) -> int:
    """Trains and returns the exit code."""
    die_with_parent()
    config = arguments.load_config(RunConfig, args.config, args.overrides)
    settled = settle(config, Machine.here())
    config = settled.config
    if args.dry_run:
        print(dry_run.describe(config))
        return 0
    quick_check(config)
    remarks = [*settled.remarks, *notes(config)]
    page = Listen.of(args, _UI) if args.ui else None
    return train(config, form=args.form, is_open=args.open, remarks=remarks, page=page)


def train(
    config: RunConfig,
    *,
    form: Form = Form.AUTO,
    is_open: bool = False,
    planner: ProcessPlanner | None = None,
    remarks: Sequence[str] = (),
    page: Listen | None = None,
) -> int:
    """Runs a training run to its end; returns the exit code.

    Args:
        is_open: whether others may join.
        remarks: lines to print before the run starts.
        page: where the run is served to browsers, if anywhere.
    """
    check_port(config.service.host, config.service.controller_port, "service.controller_port")
    with asyncio.Runner() as runner, ExitStack() as stack:
        if page is not None:
            folder = run_dirs.folder_of(config).resolve()
            remarks = [*remarks, stack.enter_context(serving(folder, page, runner.get_loop()))]
        return _train(runner, config, form=form, is_open=is_open, planner=planner, remarks=remarks)


def _train(
    runner: asyncio.Runner,
    config: RunConfig,
    *,
    form: Form,
    is_open: bool,
    planner: ProcessPlanner | None,
    remarks: Sequence[str],
) -> int:
    config, counted = with_epochs_counted(config, lambda sentence: print(sentence, file=sys.stderr))
    remarks = [*remarks, *counted]
    prepared = run_dirs.prepare(config)
    config, run_dir = prepared.config, prepared.run_dir
    log_to(run_dir / "logs" / "launcher.log")
    view = make_view(config, run_dir, form=form, remarks=[*remarks, *prepared.remarks])
    sink = Sink(config.trainer.loggers, run_dir, say=view.notice)
    try:
        if planner is None:  # Otherwise the controller may be on another host.
            _tokenize(prepared, view)
        shown: View = TrackingView(view, sink)
        if expectation := Expectation.of(config, Machine.here()):
            shown = ExpectingView(shown, expectation)
        outcome = runner.run(launch(config, run_dir, shown, planner=planner, is_open=is_open))
        sink.end(ok=outcome.ok)
    finally:
        view.close()
    if not outcome.began and outcome.exit_code != EXIT_FAILED:
        # The run was refused or stopped before it began: the message says everything.
        prepared.undo()
        print(f"paceline train: {outcome.message}", file=sys.stderr)
        return outcome.exit_code
    lines = [outcome.message] if outcome.ok else []
    if outcome.ok and config.trainer.export_model:
        lines.append(export_model(config, run_dir))
    lines += closing_lines(run_dir)
    if isinstance(view, JsonView):
        view.end(ok=outcome.ok, message=outcome.message, run_dir=str(run_dir))
    else:
        print("\n".join(lines))
    if not outcome.ok:
        print(f"paceline train: {outcome.message}", file=sys.stderr)
        step = run_dirs.newest_checkpoint(config, run_dir)
        if step is not None:
            print(
                f"the same command goes on after step {step}, whose checkpoint is the newest", file=sys.stderr
            )
    return outcome.exit_code


def _tokenize(prepared: run_dirs.Prepared, view: View) -> None:
    try:
        tokenize_ahead(prepared.config, view.notice)
    except PacelineError:
        prepared.undo()
        raise


def make_view(config: RunConfig, run_dir: Path, *, form: Form, remarks: Sequence[str] = ()) -> View:
    """Returns a live table on a terminal, else plain lines; prints the remarks first."""
    total_steps = config.trainer.num_steps
    if form is Form.JSON:
        view = JsonView(total_steps)
        for remark in remarks:
            view.notice(remark)
        return view
    for remark in remarks:
        print(remark)
    if form is Form.PLAIN or not sys.stdout.isatty():
        print(f"run directory: {run_dir}", flush=True)
        return PlainView(total_steps)
    return LiveView(f"paceline  {config.model.path}  {run_dir}", total_steps)


def export_model(config: RunConfig, run_dir: Path) -> str:
    """Writes the newest checkpoint as RUN_DIR/model; returns a line that says so, or why not."""
    step, folder = run_dirs.newest_checkpoint(config, run_dir), run_dir / "model"
    if step is None:
        return "model: not exported, there is no checkpoint"
    shutil.rmtree(folder, ignore_errors=True)  # left by this run before it was continued
    command = [sys.executable, "-m", "paceline.learner.export", str(run_dir), str(step), str(folder)]
    limit_s = config.learner.command_timeout_s
    again = f"`paceline export {run_dir} {step} OUT` tries again"
    try:
        with run_dirs.exporting(run_dir):
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"model: not exported within learner.command_timeout_s={limit_s:g}; {again}"
    if done.returncode:
        log.error("the export failed:\n%s", done.stderr)
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"model: not exported ({last}); {again}"
    return f"model: {folder}"


def log_to(file: Path) -> None:
    """Sends the launcher's log to a file, because the view uses the screen."""
    handler = LineHandler("launcher", file.open("a", encoding="utf-8"))
    logging.basicConfig(handlers=[handler], force=True, level="WARNING")
    logging.getLogger("paceline").setLevel("INFO")
