"""`paceline plan`: lists the layouts that a run may have on GPUs, with their estimated step times."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from paceline.cli.commands import arguments
from paceline.config.run import RunConfig
from paceline.core.cards import read_gpus
from paceline.core.errors import EXIT_GIVEN, ConfigError
from paceline.sizing.layouts import Layout, choose_layout, faster_with_bound, layouts
from paceline.sizing.machine import Machine
from paceline.sizing.placement import settle_model

_SHOWN = 3
_REFUSED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    arguments.add_config(parser, description="configuration of a run")
    parser.add_argument("--gpus", help="plan for these GPUs, such as 4xH100, instead of this machine's GPUs")
    parser.add_argument(
        "--response-tokens",
        type=int,
        help="mean length of an answer in tokens (default: data.max_response_length)",
    )
    parser.add_argument("--prompt-tokens", type=int, help="mean length of a prompt in tokens")
    parser.add_argument("--all", action="store_true", help="show every layout, not the best three")


def run(args: argparse.Namespace) -> int:
    """Prints the table and the layout that a run would take; returns 2 if no layout fits."""
    machine = Machine.imagined(*read_gpus(args.gpus)) if args.gpus else Machine.here()
    config = arguments.load_config(RunConfig, args.config, args.overrides)
    if not machine.gpus:
        raise ConfigError(
            "this machine has no GPU that Paceline can use; name the GPUs to plan for: --gpus 2xH100"
        )
    model, _ = settle_model(config.model, on_gpus=True)
    config = config.model_copy(update={"model": model})
    tokens = {"prompt_tokens": args.prompt_tokens, "response_tokens": args.response_tokens}
    compared = layouts(config, machine, **tokens)
    fitting = [layout for layout in compared if not layout.refusal]
    refused = [layout for layout in compared if layout.refusal]
    if any(layout.time is None for layout in compared):
        print("no estimate: the card is unknown, or config.json of the model lacks sizes")
    if fitting:
        shown = fitting if args.all else fitting[:_SHOWN]
        Console(highlight=False, markup=False).print(_table(shown))
        if len(shown) < len(fitting):
            print(f"{len(fitting) - len(shown)} more fit (--all)")
    for layout in refused if args.all else refused[:_REFUSED]:
        print(f"does not fit: {layout.words}: {layout.refusal}")
    if not fitting:
        return EXIT_GIVEN
    chosen = choose_layout(config, machine)
    taken = next((layout for layout in compared if layout.config == chosen), fitting[0])
    print(f"`paceline train` takes: {taken.words}; {_update(taken)}")
    if taken.time is not None:
        faster = faster_with_bound(config, machine, taken.time, **tokens)
        if faster is not None and faster.time is not None:
            print(
                "barrier.mode=bounded with barrier.max_staleness=1, where samples may come from weights one "
                f"version older: {faster.words}, {faster.time.seconds:.1f} s instead of "
                f"{taken.time.seconds:.1f} (estimated; no such step was timed)"
            )
    if machine.card is not None and not machine.card.is_measured:
        print(
            f"no step was ever timed on {machine.card.name}s: the estimate scales the published rates of "
            "the card"
        )
    return 0


def _table(shown: list[Layout]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layout")
    for header in ("step s", "generation", "log-probs", "update", "weights", "tokens/s per GPU"):
        table.add_column(header, justify="right")
    for layout in shown:
        time = layout.time
        cells = [""] * 6
        if time is not None:
            phases = (time.seconds, time.generation, time.scoring, time.update, time.weights)
            cells = [*(f"{seconds:.1f}" for seconds in phases), f"{time.tokens_per_s:,.0f}"]
        table.add_row(layout.words, *cells)
    return table


def _update(layout: Layout) -> str:
    actor = layout.settled.actor
    memory = actor.memory.model_dump(exclude_none=True)
    kept = ", ".join(f"{name}={str(value).lower()}" for name, value in memory.items())
    learner = layout.settled.learner
    context, experts = learner.num_context_ranks, learner.num_expert_ranks
    matrices = " and the matrices of each layer" if learner.tensor_parallel > 1 else ""
    shared = f"the tokens of each row{matrices} on {context} ranks, " if context > 1 else ""
    divided = f"the experts of each layer on {experts} ranks, " if experts > 1 else ""
    return f"{shared}{divided}micro-batches of {actor.ppo_max_token_len_per_gpu:,} tokens, {kept}"
