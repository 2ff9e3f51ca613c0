"""What shared prompts save: an update with one copy of each prompt, beside one copy per sample, in one run.

    python benchmarks/shared_prompts.py                            # a GPU: 4 layers of Qwen2.5-7B
    python benchmarks/shared_prompts.py --shape 0.5B --layers 24
    python benchmarks/shared_prompts.py --device cpu --shape tiny --response 128

Groups of 8 samples, random weights. One line per prompt length. `update` is log-probs with entropy, a sum
over them, and its gradients; `scoring` is log-probs without a graph. Both forms run by turns; times are
medians in milliseconds, `gain` is their ratio, `by arithmetic` what the counted operations promise.
`difference` is the mean one of the log-probs, and of the gradient as a share of its norm.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paceline.learner.batch.pack import pack
from paceline.learner.batch.planning.arithmetic import RowLength
from paceline.learner.batch.types import MicroBatch, PackedRow
from paceline.learner.distributed.ranks import RankEnvironment, Ranks, form_group, leave_group, open_store
from paceline.learner.model.flops import arithmetic_of
from paceline.learner.model.loading import Precision, as_fsdp, load_policy
from paceline.learner.model.networks import PolicyNetwork
from paceline.learner.train.state.shared_prompts import compare

SAMPLES = 8
# hidden, intermediate, heads, key and value heads, vocabulary
SHAPES = {
    "tiny": (128, 352, 4, 2, 512),
    "0.5B": (896, 4864, 14, 2, 151_936),
    "7B": (3584, 18_944, 28, 4, 152_064),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each prompt length and prints the table."""
    args = parse_args(argv)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    ranks = form_group(RankEnvironment.read(), open_store(RankEnvironment.read(), 60), device, 60)
    try:
        with tempfile.TemporaryDirectory() as folder:
            network = build(Path(folder), args, ranks)
            name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
            table = Table(
                title=f"{args.shape}, {args.layers} layers, {args.groups} groups of {SAMPLES}, responses of "
                f"{args.response} tokens, {name}, torch {torch.__version__}"
            )
            for heading in (
                "prompt",
                "update",
                "shared",
                "gain",
                "scoring",
                "shared",
                "gain",
                "by arithmetic",
            ):
                table.add_column(heading, justify="right")
            table.add_column("difference", justify="right")
            for prompt in args.prompts:
                table.add_row(*measure(network, prompt, args, ranks))
    finally:
        leave_group()
    Console(width=130).print(table)
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="7B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--prompts", type=lambda text: [int(word) for word in text.split(",")], default=[64, 512, 4096]
    )
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--groups", type=int, default=1, help="groups in the micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def build(folder: Path, args: argparse.Namespace, ranks: Ranks) -> PolicyNetwork:
    """A policy of the shape with random weights; bfloat16 on a GPU."""
    from transformers import Qwen2Config

    hidden, intermediate, heads, kv_heads, vocab = SHAPES[args.shape]
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max(args.prompts) + args.response,
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    compute = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    return load_policy(folder, ranks, Precision(compute=compute), random_seed=0)


def measure(network: PolicyNetwork, prompt: int, args: argparse.Namespace, ranks: Ranks) -> list[str]:
    """A line of the table."""
    rows = draw_rows(prompt, args, SHAPES[args.shape][-1])
    forms = [pack(rows, ranks.device, share_prompts=share_prompts) for share_prompts in (False, True)]

    def update(batch: MicroBatch) -> None:
        log_probs, entropy = network(batch, 1.0, True)
        torch.autograd.backward(log_probs.sum() + 0.01 * entropy.sum())
        network.zero_grad(set_to_none=True)

    def scoring(batch: MicroBatch) -> None:
        with torch.no_grad():
            network(batch)
        as_fsdp(network).reshard()

    cells = [f"{prompt:,}"]
    for act in (update, scoring):
        plain, shared = by_turns(act, forms, args.repeats, ranks.device)
        cells += [f"{plain * 1e3:,.0f}", f"{shared * 1e3:,.0f}", f"{plain / shared:.2f}"]
    lengths = [
        RowLength(prompt_id=number // SAMPLES, num_prompt_tokens=prompt, num_response_tokens=args.response)
        for number in range(len(rows))
    ]
    arithmetic = arithmetic_of(network)
    promised = arithmetic.of_rows(lengths) / arithmetic.of_rows(lengths, share_prompts=True)
    difference = compare(network, rows, ranks)
    return [*cells, f"{promised:.2f}", f"{difference.log_probs:.1e}, {difference.gradient:.1e}"]


def draw_rows(prompt: int, args: argparse.Namespace, vocab: int) -> list[PackedRow]:
    """Groups of samples with random tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, prompt).astype(np.int32) for _ in range(args.groups)]
    return [
        PackedRow(
            index=number,
            prompt_token_ids=prompts[number // SAMPLES],
            response_token_ids=rng.integers(0, vocab, args.response).astype(np.int32),
            response_mask=np.ones(args.response, np.uint8),
            response_log_probs=np.zeros(args.response, np.float32),
        )
        for number in range(args.groups * SAMPLES)
    ]


def by_turns(
    act: Callable[[MicroBatch], None], forms: Sequence[MicroBatch], repeats: int, device: torch.device
) -> list[float]:
    """Median seconds of each form; the first turn warms up."""
    seconds: list[list[float]] = [[] for _ in forms]
    for turn in range(repeats + 1):
        for form, taken in zip(forms, seconds, strict=True):
            began = time.perf_counter()
            act(form)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in seconds]


if __name__ == "__main__":
    sys.exit(main())
