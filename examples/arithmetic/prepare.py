"""Writes the arithmetic example's inputs: prompts in parquet, a tokenizer, a small random Qwen2 model.

The task is to add two or three two-digit numbers; the question asks for the sum in words. The warm-up answers
in `sft.parquet` come from two simulated pupils. The hasty pupil writes the sum at once and forgets the carry.
The careful pupil first writes the sum of the units and is right. Most answers are the hasty pupil's, so the
warmed-up model is wrong whenever there is a carry. Reinforcement learning sees correct sums only through the
reward, and must discover that intermediate steps pay off.

`pairs.parquet` has a right and a wrong answer to each question, for a reward model; `verdicts.parquet` has
many kinds of answers with an examiner's verdict on each, for a judge.

The seed determines everything: the same arguments write the same rows and the same weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.reward.builtin import gsm8k

HERE = Path(__file__).resolve().parent

# The first is padding; the second ends an answer; each of the others opens a message of its role.
SPECIAL_TOKENS = (PAD, END, *ROLES) = ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Smallest and largest operand for each number of operands; small enough to learn in a minute on two cores.
OPERAND_RANGE = {2: (10, 49), 3: (10, 29)}
THREE_OPERAND_SHARE = 0.35
CARRY_SHARE = 0.68
MAX_DRAWS = 10_000

CAREFUL_ANSWER = "units {units}: {total}"
# Probability of a misspelt answer, right or wrong: a policy samples such answers, too.
SLIP_SHARE = 0.3
VERDICTS_PER_QUESTION = 4

VOCAB_MULTIPLE = 64
MAX_POSITIONS = 64
BYTE_LEVEL_BLANK = "\u0120"  # a space in byte-level BPE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """One way to ask for a sum: `opening`, the operands separated by `between` and `last`, `closing`."""

    opening: str
    between: str
    last: str
    closing: str

    def render(self, operands: Sequence[int]) -> str:
        """Returns the question for `operands` (two or more), for example 'Add 17, 25 and 30.'"""
        head, tail = self.between.join(str(x) for x in operands[:-1]), str(operands[-1])
        return f"{self.opening}{head}{self.last}{tail}{self.closing}"


WORDINGS = (
    Wording(opening="What is ", between=" + ", last=" + ", closing="?"),
    Wording(opening="Add ", between=", ", last=" and ", closing="."),
    Wording(opening="Find the sum of ", between=", ", last=" and ", closing="."),
    Wording(opening="", between=" plus ", last=" plus ", closing=" ="),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A sum to compute: operands in the question's order, and the index of the question's wording."""

    operands: tuple[int, ...]
    wording: int

    @property
    def key(self) -> tuple[int, ...]:
        """Operands as a multiset: for the split, 17 + 25 and 25 + 17 are the same problem."""
        return tuple(sorted(self.operands))

    @property
    def question(self) -> str:
        """The text of the user's message."""
        return WORDINGS[self.wording].render(self.operands)

    @property
    def answer(self) -> str:
        """The true sum."""
        return str(sum(self.operands))


def carry(operands: Sequence[int]) -> int:
    """Returns the carry from the units to the tens."""
    return sum(x % 10 for x in operands) // 10


def add_without_carry(operands: Sequence[int]) -> int:
    """Returns the sum of two-digit numbers without the carry of the units: 57 + 68 gives 115."""
    return sum(x // 10 for x in operands) * 10 + sum(x % 10 for x in operands) % 10


def draw_problem(rng: np.random.Generator) -> Problem:
    """Draws the number of operands and a carry of 0 or 1, then uniform operands with this carry.

    Raises:
        ValueError: no operands in the range have this carry.
    """
    count = 3 if rng.random() < THREE_OPERAND_SHARE else 2
    target_carry = int(rng.random() < CARRY_SHARE)
    low, high = OPERAND_RANGE[count]
    for _ in range(MAX_DRAWS):
        operands = tuple(rng.integers(low, high + 1, size=count).tolist())
        if carry(operands) == target_carry:
            return Problem(operands=operands, wording=int(rng.integers(len(WORDINGS))))
    raise ValueError(f"no {count} numbers from {low} to {high} carry {target_carry}: widen OPERAND_RANGE")


def draw_problems(
    rng: np.random.Generator, num: int, *, avoid: set[tuple[int, ...]], distinct: bool
) -> list[Problem]:
    """Draws `num` problems whose multisets are not in `avoid`; with `distinct`, no multiset occurs twice.

    Raises:
        ValueError: there are not enough distinct problems.
    """
    problems: list[Problem] = []
    seen = set(avoid)
    for _ in range(20 * num):
        if len(problems) == num:
            break
        problem = draw_problem(rng)
        if problem.key in seen:
            continue
        if distinct:
            seen.add(problem.key)
        problems.append(problem)
    if len(problems) < num:
        raise ValueError(f"found {len(problems)} distinct problems, {num} were asked for: ask for fewer rows")
    return problems


def careful_answer(operands: Sequence[int]) -> str:
    """Returns the sum of the units, then the true sum: 'units 12: 52' for 17 + 35."""
    return CAREFUL_ANSWER.format(units=sum(x % 10 for x in operands), total=sum(operands))


def warm_up_answer(problem: Problem, rng: np.random.Generator, hasty_share: float) -> str:
    """Returns the hasty pupil's answer with probability `hasty_share`, else the careful pupil's."""
    is_hasty = bool(rng.random() < hasty_share)
    return str(add_without_carry(problem.operands)) if is_hasty else careful_answer(problem.operands)


def wrong_answer(problem: Problem, rng: np.random.Generator) -> str:
    """Returns an answer with a wrong sum; it may have an intermediate step, which may itself be wrong."""
    operands, total = problem.operands, sum(problem.operands)
    units = sum(x % 10 for x in operands)
    off = int(rng.choice([-10, -2, -1, 1, 2, 10]))
    wrong = add_without_carry(operands) if carry(operands) and rng.random() < 0.5 else total + off
    kind = int(rng.integers(3))
    if kind == 0:
        return str(wrong)
    if kind == 1:
        return CAREFUL_ANSWER.format(units=units, total=wrong)
    return CAREFUL_ANSWER.format(units=max(0, units + off), total=wrong)


def slip(answer: str, rng: np.random.Generator) -> str:
    """Returns the answer with a character omitted, doubled, or replaced by another answer character."""
    place = int(rng.integers(len(answer)))
    other = str(rng.choice(list("0123456789: units")))
    written = ("", answer[place] * 2, other)[int(rng.integers(3))]
    return answer[:place] + written + answer[place + 1 :]


def pupils_answer(problem: Problem, rng: np.random.Generator) -> str:
    """Returns an answer for an examiner: careful, short, or wrong in one of many ways, some misspelt."""
    kind = int(rng.integers(4))
    if kind == 0:
        answer = careful_answer(problem.operands)
    elif kind == 1:
        answer = problem.answer
    else:
        answer = wrong_answer(problem, rng)
    return slip(answer, rng) if rng.random() < SLIP_SHARE else answer


def examiners_answer(problem: Problem, answer: str) -> str:
    """Returns the examiner's sum, the answer's last number, and the grade: 'units 12: 52 42 no'."""
    is_right = gsm8k(answer, problem.answer, method="flexible") == 1.0
    last = re.findall(r"\d+", answer)[-1:]
    return " ".join([careful_answer(problem.operands), *last, "yes" if is_right else "no"])


def to_verdicts(problems: Sequence[Problem], rng: np.random.Generator) -> pa.Table:
    """Returns a table of `prompt` (question and answer in `judge.txt`'s form) and the examiner's `answer`.

    The columns `question`, `response` and `ground_truth` hold the parts.
    """
    responses = [pupils_answer(problem, rng) for problem in problems]
    rows = list(zip(problems, responses, strict=True))
    return pa.table(
        {
            "prompt": [
                [{"role": "user", "content": f"{problem.question} {response}"}] for problem, response in rows
            ],
            "answer": [examiners_answer(problem, response) for problem, response in rows],
            "question": [problem.question for problem in problems],
            "response": responses,
            "ground_truth": [problem.answer for problem in problems],
        }
    )


def to_pairs(problems: Sequence[Problem], rng: np.random.Generator) -> pa.Table:
    """Returns a table of `prompt` (chat messages), `chosen` and `rejected`."""
    return pa.table(
        {
            "prompt": [[{"role": "user", "content": problem.question}] for problem in problems],
            "chosen": [careful_answer(problem.operands) for problem in problems],
            "rejected": [wrong_answer(problem, rng) for problem in problems],
        }
    )


def to_grades(problems: Sequence[Problem], rng: np.random.Generator) -> pa.Table:
    """Returns a table of `prompt` (a question with an answer) and grade: 1 if the answer is right, else 0."""
    is_right = rng.random(len(problems)) < 0.5
    answers = [
        careful_answer(problem.operands) if right else wrong_answer(problem, rng)
        for problem, right in zip(problems, is_right, strict=True)
    ]
    shown = [f"{problem.question} {answer}" for problem, answer in zip(problems, answers, strict=True)]
    return pa.table(
        {
            "prompt": [[{"role": "user", "content": text}] for text in shown],
            "answer": [str(int(right)) for right in is_right],
        }
    )


def to_table(problems: Sequence[Problem], answers: Sequence[str] | None = None) -> pa.Table:
    """Returns a table of `prompt` (chat messages), `ground_truth`, `data_source`, and `answer` if given."""
    columns: dict[str, Any] = {
        "prompt": [[{"role": "user", "content": problem.question}] for problem in problems],
        "ground_truth": [problem.answer for problem in problems],
        "data_source": ["arithmetic"] * len(problems),
    }
    if answers is not None:
        columns["answer"] = list(answers)
    return pa.table(columns)


def write_data(
    out: Path,
    *,
    seed: int,
    num_train: int,
    num_val: int,
    num_sft: int,
    hasty_share: float,
    num_pairs: int = 0,
) -> None:
    """Writes `train`, `val`, `sft`, `pairs`, `pairs_val`, `grades`, `verdicts` and `verdicts_val.parquet`.

    `pairs_val` and `verdicts_val` have the problems of `val`; the other files share no multiset with them.
    """
    out.mkdir(parents=True, exist_ok=True)
    val_rng, train_rng, sft_rng, pair_rng, verdict_rng = (
        np.random.default_rng([seed, stream]) for stream in range(5)
    )
    val = draw_problems(val_rng, num_val, avoid=set(), distinct=True)
    held_out = {problem.key for problem in val}
    train = draw_problems(train_rng, num_train, avoid=held_out, distinct=False)
    sft = draw_problems(sft_rng, num_sft, avoid=held_out, distinct=False)
    answers = [warm_up_answer(problem, sft_rng, hasty_share) for problem in sft]
    pq.write_table(to_table(train), out / "train.parquet")
    pq.write_table(to_table(val), out / "val.parquet")
    pq.write_table(to_table(sft, answers), out / "sft.parquet")
    pairs = draw_problems(pair_rng, num_pairs, avoid=held_out, distinct=False)
    pq.write_table(to_pairs(pairs, pair_rng), out / "pairs.parquet")
    pq.write_table(to_pairs(val, pair_rng), out / "pairs_val.parquet")
    pq.write_table(to_grades(pairs, pair_rng), out / "grades.parquet")
    pq.write_table(to_verdicts(pairs, verdict_rng), out / "verdicts.parquet")
    pq.write_table(to_verdicts(val * VERDICTS_PER_QUESTION, verdict_rng), out / "verdicts_val.parquet")


def word_pieces() -> list[str]:
    """Returns the words of questions and answers as Qwen2 splits them, with the space before each."""
    questions = [wording.render([0] * count) for wording, count in itertools.product(WORDINGS, (2, 3))]
    texts = [*questions, CAREFUL_ANSWER.format(units=0, total=0)]
    return list(dict.fromkeys(piece for text in texts for piece in re.findall(r" ?[A-Za-z+=]+", text)))


def bpe_tables() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns vocabulary and merges of a byte-level BPE: special tokens, all bytes, one token per word.

    A word of n bytes takes n - 1 merges, each of which extends its prefix by one byte. A prefix that two
    words share is merged once.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in word_pieces():
        piece = word.replace(" ", BYTE_LEVEL_BLANK)
        merges += [
            merge for end in range(1, len(piece)) if (merge := (piece[:end], piece[end])) not in merges
        ]
    tokens += dict.fromkeys(left + right for left, right in merges)
    return {token: index for index, token in enumerate(tokens)}, merges


def build_tokenizer() -> Any:
    """Returns a `Qwen2Tokenizer` with one token per digit and per word; other text becomes bytes.

    `AutoTokenizer` loads every `qwen2` model folder as this class, which has its own way to split text, so
    another kind of tokenizer would not survive saving and loading.
    """
    from transformers import Qwen2Tokenizer

    vocab, merges = bpe_tables()
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_model(out: Path, *, seed: int, tokenizer: Any = None) -> int:
    """Writes the tokenizer and a randomly initialised float32 Qwen2 model; returns the number of parameters.

    The default tokenizer is that of `build_tokenizer`. Two key-value heads, head size 32 and widths
    divisible by 64 allow tensor parallelism over two ranks.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = tokenizer or build_tokenizer()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=True)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def parser_of(
    example: str, folder: Path, *, num_val: int, num_sft: int, hasty_share: float, hasty: str
) -> argparse.ArgumentParser:
    """Returns the argument parser of an example with two simulated pupils, with the example's defaults."""
    parser = argparse.ArgumentParser(description=f"Prepare the {example} example's data and starting model.")
    parser.add_argument("--out", type=Path, default=folder / "data", help="folder for the parquet files")
    parser.add_argument("--model-out", type=Path, default=folder / "model", help="folder for the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows and of the weights")
    parser.add_argument("--num-train", type=int, default=2048)
    parser.add_argument("--num-val", type=int, default=num_val)
    parser.add_argument("--num-sft", type=int, default=num_sft)
    parser.add_argument("--hasty-share", type=float, default=hasty_share, help=f"share of {hasty}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the data and the model, and prints a summary as a line of JSON."""
    hasty = "warm-up answers without the carry"
    parser = parser_of("arithmetic", HERE, num_val=256, num_sft=38400, hasty_share=0.6, hasty=hasty)
    parser.add_argument("--num-pairs", type=int, default=38400)
    args = parser.parse_args(argv)
    if not 0.0 <= args.hasty_share <= 1.0:
        print(f"--hasty-share is {args.hasty_share}: write a share between 0 and 1", file=sys.stderr)
        return 2
    write_data(
        args.out,
        seed=args.seed,
        num_train=args.num_train,
        num_val=args.num_val,
        num_sft=args.num_sft,
        num_pairs=args.num_pairs,
        hasty_share=args.hasty_share,
    )
    num_parameters = write_model(args.model_out, seed=args.seed)
    summary = {
        "data": str(args.out),
        "model": str(args.model_out),
        "num_parameters": num_parameters,
        "seed": args.seed,
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
