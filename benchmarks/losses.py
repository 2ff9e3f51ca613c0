"""Measures time and memory of log-probs, entropy and policy loss, with chunked and with full logits.

    python benchmarks/losses.py                                   # a GPU: 16,384 tokens, Qwen2.5-7B's head
    python benchmarks/losses.py --hidden 896 --vocab 151936       # Qwen2.5-0.5B's head
    python benchmarks/losses.py --device cpu --tokens 512 --vocab 8192 --hidden 256 --repeats 3

Prints one line per form. `plain` makes all logits at once, casts them to float32 and leaves the rest to
autograd; `chunked` is the learner's form (`paceline.learner.logits.log_probs`) and has a few rows of logits
in memory at a time. `forward` computes log-probs without a graph, as for old log-probs. `update` computes
log-probs and entropy, the clipped loss with an entropy bonus, and its gradients with respect to hidden states
and head. Times are medians in milliseconds; `extra` is the peak memory beyond inputs and gradients. `share of
matrix products` is the share of the update's time that the head's matrix products take: three products in the
plain form and four in chunks, timed in the same run. Errors are differences from a float64 computation of
some rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.algorithms.aggregation import aggregate
from paceline.algorithms.policy_losses import LossInputs, ppo_clip
from paceline.learner.logits.log_probs import chunked_log_probs, token_log_probs

ENTROPY_COEFF = 0.01
CHECKED_ROWS = 64

Form = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Inputs: hidden (N, H) and head (V, H) of one type; targets, old log-probs and advantages (N,)."""

    hidden: Tensor
    head: Tensor
    targets: Tensor
    old_log_probs: Tensor
    advantages: Tensor

    @classmethod
    def random(cls, tokens: int, hidden: int, vocab: int, device: torch.device) -> Batch:
        """Draws a batch whose logits have a spread of about 3, like a trained model's."""
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        states, head = draw(tokens, hidden).to(kind), (draw(vocab, hidden) * 3 / hidden**0.5).to(kind)
        targets = torch.randint(vocab, (tokens,), generator=generator, device=device)
        old, _, _ = chunked_log_probs(states, head, targets, 1.0, 512)
        return cls(
            hidden=states.requires_grad_(),
            head=head.requires_grad_(),
            targets=targets,
            old_log_probs=old + 0.1 * draw(tokens),
            advantages=draw(tokens),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all forms and prints the table."""
    args = parse_args(argv)
    device = torch.device(args.device)
    batch = Batch.random(args.tokens, args.hidden, args.vocab, device)
    forms: dict[str, Form] = {f"chunked, {rows} rows": chunked(rows) for rows in args.chunks}
    forms["plain"] = plain
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = (
        f"{args.tokens} tokens, vocabulary {args.vocab}, hidden {args.hidden}, {batch.hidden.dtype}, {name}, "
        f"torch {torch.__version__}"
    )
    table = Table(title=title)
    for column in ("form", "forward ms", "extra GiB", "update ms", "extra GiB", "share of matrix products"):
        table.add_column(column, justify="right")
    product_ms = median_ms(lambda: product(batch), device, args.repeats)
    worst = 0.0
    for form_name, form in forms.items():
        forward_ms, forward_gib = measure(lambda form=form: forward(form, batch), batch, args.repeats)
        update_ms, update_gib = measure(lambda form=form: update(form, batch), batch, args.repeats)
        products = (3 if form is plain else 4) * product_ms
        table.add_row(
            form_name,
            f"{forward_ms:.1f}",
            f"{forward_gib:.2f}",
            f"{update_ms:.1f}",
            f"{update_gib:.2f}",
            f"{products / update_ms:.2f}",
        )
        worst = max(worst, error(form, batch))
    console = Console(width=120)
    console.print(table)
    console.print(f"one product of the head: {product_ms:.1f} ms; largest error of a log-prob: {worst:.2g}")
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--chunks",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[441, 882, 1765, 3531],
        help="rows of logits at a time",
    )
    return parser.parse_args(argv)


def chunked(rows: int) -> Form:
    """Returns the learner's form."""

    def form(
        hidden: Tensor, head: Tensor, targets: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return chunked_log_probs(hidden, head, targets, 1.0, rows, with_entropy)[:2]

    return form


def plain(hidden: Tensor, head: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Computes log-probs and entropy from all logits at once."""
    return token_log_probs(hidden @ head.t(), targets, 1.0, with_entropy)


def forward(form: Form, batch: Batch) -> None:
    """Computes log-probs without a graph."""
    with torch.no_grad():
        form(batch.hidden, batch.head, batch.targets, False)


def update(form: Form, batch: Batch) -> None:
    """Computes loss and gradients."""
    log_probs, entropy = form(batch.hidden, batch.head, batch.targets, True)
    assert entropy is not None
    mask = torch.ones_like(batch.targets, dtype=torch.bool).unsqueeze(0)
    inputs = LossInputs(
        log_probs=log_probs.unsqueeze(0),
        log_probs_of={"old": batch.old_log_probs.unsqueeze(0)},
        advantages=batch.advantages.unsqueeze(0),
        mask=mask,
    )
    loss, _ = ppo_clip(inputs, 0.2, 0.28)
    total = aggregate(loss, mask, "token-mean") - ENTROPY_COEFF * aggregate(
        entropy.unsqueeze(0), mask, "token-mean"
    )
    batch.hidden.grad = batch.head.grad = None
    torch.autograd.backward(total)


def product(batch: Batch) -> None:
    """Computes the head's product in parts, to limit the memory of the result."""
    with torch.no_grad():
        for part in batch.hidden.split(4096):
            part @ batch.head.t()


def measure(work: Callable[[], None], batch: Batch, repeats: int) -> tuple[float, float]:
    """Returns median milliseconds, and peak GiB beyond inputs and gradients (0 on a CPU)."""
    device = batch.hidden.device
    milliseconds = median_ms(work, device, repeats)
    if device.type != "cuda":
        return milliseconds, 0.0
    batch.hidden.grad = batch.head.grad = None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    grads = sum(x.grad.nbytes for x in (batch.hidden, batch.head) if x.grad is not None)
    return milliseconds, (torch.cuda.max_memory_allocated() - before - grads) / 2**30


def median_ms(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Returns median milliseconds, after two warm-up calls."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for number in range(repeats + 2):
        wait()
        began = time.perf_counter()
        work()
        wait()
        if number >= 2:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


@torch.no_grad()
def error(form: Form, batch: Batch) -> float:
    """Returns the largest difference from float64 in the first rows."""
    rows = slice(0, CHECKED_ROWS)
    log_probs, _ = form(batch.hidden[rows], batch.head, batch.targets[rows], True)
    z = batch.hidden[rows].double() @ batch.head.double().t()
    true = z.log_softmax(-1).gather(-1, batch.targets[rows].unsqueeze(-1)).squeeze(-1)
    return float((log_probs.double() - true).abs().max())


if __name__ == "__main__":
    sys.exit(main())
