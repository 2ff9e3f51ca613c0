"""`paceline init`: writes a commented configuration from a few flags, or questions on a terminal."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from paceline.checks.model_checks import has_chat_template
from paceline.cli.commands import arguments
from paceline.config.load import load
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.core.errors import ConfigError, ModelError, PacelineError
from paceline.data.hub import local_files
from paceline.data.rows import Row, count_rows, first_row, first_rows, value_at
from paceline.models.facts import config_tree
from paceline.models.model_shape import ModelShape
from paceline.storage.hub import is_named

# Names of columns in public data sets, the most specific first.
_PROMPTS = ("prompt", "question", "problem", "messages", "input", "query")
_TRUTHS = ("ground_truth", "reward_model.ground_truth", "answer", "solution", "target", "label")

_ALGORITHMS: Mapping[str, str] = {
    "grpo": """\
algorithm:
  adv_estimator: grpo          # the mean of a prompt's samples is the baseline; no critic
actor:
  use_kl_loss: true            # keeps the policy near the starting model; needs its weights once more
  kl_loss_coef: 0.001
""",
    "dapo": """\
algorithm:
  adv_estimator: grpo
  dynamic_sampling: {enable: true}   # replaces groups whose samples all have the same reward
actor:
  clip_ratio_low: 0.2
  clip_ratio_high: 0.28        # lets improbable tokens become more probable
""",
    "ppo": """\
algorithm:
  adv_estimator: gae           # with a critic, as large as the model
  use_kl_in_reward: true       # keeps the policy near the starting model
  kl_ctrl: {type: adaptive, kl_coef: 0.001, target_kl: 0.1}
critic:
  optim: {lr: CRITIC_RATE}
actor:
""",
}

_PROMPT_TOKENS, _RESPONSE_TOKENS = 512, 1024
_BATCH_SIZE = 64  # prompts; all of them if the data has fewer
_LOOKED_AT = 1000  # rows of the first file, for the length of prompts


class _Rates(NamedTuple):
    """Learning rates for models with fewer than `below` parameters, as in the examples."""

    below: float
    policy: str
    adapters: str
    critic: str


_RATES = (
    _Rates(20e6, "7.0e-5", "7.0e-4", "5.0e-4"),
    _Rates(300e6, "1.0e-5", "1.0e-4", "1.0e-4"),
    _Rates(math.inf, "1.0e-6", "1.0e-5", "1.0e-5"),
)

_NO_VAL = "  # val_files: FILE          # held-out prompts\n"
_CHAT = "prompt_format: chat          # strings go through the chat template, as one user message"
_AUTO = "prompt_format: auto          # messages go through the chat template, strings do not"


def _no_file(answer: str) -> str:
    return "" if Path(answer).is_file() or is_named(answer) else f"data file {answer} does not exist"


def _no_function(answer: str) -> str:
    from paceline.reward.functions.registry import BUILTIN_NAMES, resolve

    if answer not in BUILTIN_NAMES and not all(answer.rpartition(":")[::2]):
        return f"{answer!r} is none of {', '.join(BUILTIN_NAMES)}, nor path/to/file.py:function"
    try:
        resolve(answer)
    except ConfigError as error:
        return str(error)
    return ""


def _no_count(answer: str) -> str:
    return "" if answer.isdecimal() and int(answer) > 0 else f"{answer!r} is not a whole number from 1"


def _no_prompt(row: Mapping[str, Any], answer: str) -> str:
    value = value_at(dict(row), answer)
    if value is None:
        return f"the first row has no {answer!r}; it has {', '.join(row)}"
    if isinstance(value, str | list):
        return ""
    return f"{answer!r} holds {value!r}, and a prompt is a string or a list of messages with role and content"


def _no_truth(row: Mapping[str, Any], answer: str) -> str:
    is_there = value_at(dict(row), answer) is not None
    return "" if is_there else f"the first row has no {answer!r}; it has {', '.join(row)}"


def _no_algorithm(answer: str) -> str:
    return "" if answer in _ALGORITHMS else f"{answer!r} is none of {', '.join(_ALGORITHMS)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """A value that the file needs, named like its flag; `fault` says what is wrong with an answer."""

    name: str
    words: str
    default: str = ""
    choices: Sequence[str] = ()
    fault: Callable[[str], str] = lambda answer: ""

    @property
    def flag(self) -> str:
        """The flag that answers the question."""
        return f"--{self.name.replace('_', '-')}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("file", metavar="FILE.yaml", type=Path, help="the file to write; must not exist")
    parser.add_argument("--model", metavar="FOLDER", help="the model's folder, or its name on the hub")
    parser.add_argument(
        "--data", metavar="FILE", help="training prompts, parquet or JSONL, or a name on the hub"
    )
    parser.add_argument("--val", metavar="FILE", default="", help="held-out prompts")
    parser.add_argument("--prompt-key", metavar="COLUMN", help="column with the prompt (default: looked for)")
    parser.add_argument(
        "--ground-truth-key", metavar="COLUMN", help="column with the right answer (default: looked for)"
    )
    parser.add_argument(
        "--reward", metavar="NAME", help="exact_match, gsm8k, math_verify, or path/to/file.py:function"
    )
    parser.add_argument("--algorithm", choices=_ALGORITHMS, help="default: grpo")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: 200)")
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of this rank (default: all weights)"
    )
    arguments.add_offline(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the file; returns the exit code."""
    if args.file.exists():
        raise ConfigError(f"{args.file} exists; give another name, or remove it")
    answers = {name: str(value) for name, value in vars(args).items() if value is not None}
    ask = _ask if sys.stdin.isatty() else _default
    for question in (
        _Question(name="model", words="Model (a folder, or a name on the hub)"),
        _Question(
            name="data",
            words="Training prompts (a .parquet or .jsonl file, or a name on the hub)",
            fault=_no_file,
        ),
    ):
        _answer(question, answers, ask)
    files = local_files([answers["data"]], "train")
    row = first_row(files[0])
    for question in (
        _Question(
            name="prompt_key",
            words="Column with the prompt",
            default=_known(row, _PROMPTS),
            choices=list(row),
            fault=partial(_no_prompt, row),
        ),
        _Question(
            name="ground_truth_key",
            words="Column with the answer",
            default=_known(row, _TRUTHS),
            choices=list(row),
            fault=partial(_no_truth, row),
        ),
        _Question(name="reward", words="Reward function", default="exact_match", fault=_no_function),
        _Question(
            name="algorithm",
            words=f"Algorithm ({', '.join(_ALGORITHMS)})",
            default="grpo",
            fault=_no_algorithm,
        ),
        _Question(name="steps", words="Training steps", default="200", fault=_no_count),
    ):
        _answer(question, answers, ask)
    batch_size = count_rows(files, at_most=_BATCH_SIZE) or _BATCH_SIZE
    rows = first_rows(files[0], _LOOKED_AT)
    args.file.write_text(configuration(answers, rows, batch_size), encoding="utf-8")
    try:
        load(RunConfig, args.file)
    except ConfigError:
        args.file.unlink()
        raise
    model = answers["model"]
    if is_named(model):
        print(f"note: {model} is not a folder here, so it is fetched from the Hugging Face hub")
    elif not Path(model).is_dir() and "://" not in model:
        print(f"note: there is no folder {model} yet")
    print(f"wrote {args.file}\nnext: paceline check {args.file}\n      paceline train {args.file}")
    return 0


def configuration(answers: Mapping[str, str], rows: Sequence[Row], batch_size: int) -> str:
    """Returns the text of the file, for data with these first rows and `batch_size` prompts per step."""
    prompts = [value_at(row, answers["prompt_key"]) for row in rows]
    is_chat = isinstance(prompts[0], str) and _has_chat_template(answers["model"])
    tree = config_tree(answers["model"])
    longest = _longest(answers["model"], prompts, "chat" if is_chat else "auto")
    prompt_length, response_length = _lengths(tree, longest)
    of_prompts = f"; the longest of the first {len(prompts):,} has {longest}" if longest else ""
    steps, rates = int(answers["steps"]), _rates(tree)
    rate = rates.adapters if "lora" in answers else rates.policy
    val = f"  val_files: {_word(answers['val'])}\n" if answers.get("val") else _NO_VAL
    return f"""\
# Every key is described in docs/configuration.md. Keys left out have their defaults; GPUs are assigned
# automatically (placement: auto).
data:
  train_files: {_word(answers["data"])}
{val}\
  prompt_key: {_word(answers["prompt_key"])}
  ground_truth_key: {_word(answers["ground_truth_key"])}
  {_CHAT if is_chat else _AUTO}
  max_prompt_length: {prompt_length:<10}# tokens; longer prompts are left out{of_prompts}
  max_response_length: {response_length:<8}# tokens; longer responses are cut off
  train_batch_size: {batch_size:<11}# prompts per step
model:
  path: {_word(answers["model"])}
{_lora(answers)}\
{_ALGORITHMS[answers["algorithm"]].replace("CRITIC_RATE", rates.critic)}\
  ppo_mini_batch_size: {batch_size:<8}# prompts per optimizer step; fewer than the batch: several steps on it
  optim: {{lr: {rate}, warmup_steps_ratio: 0.05}}  # the rate rises over the first steps, then stays
rollout:
  n: 8                         # samples per prompt
reward:
  functions: [{_reward(answers["reward"])}
trainer:
  name: {_name(answers["file"])}
  total_steps: {steps}
  test_freq: {max(1, steps // 20):<18}# with val_files: steps between validations
  save_freq: {max(1, steps // 4):<18}# steps between checkpoints; Ctrl-C saves one, too
"""


def _reward(name: str) -> str:
    if name == "gsm8k":  # most prompts do not ask for the form of GSM8K's answers
        return "{name: gsm8k, kwargs: {method: flexible}}]  # the last number; strict: the one after ####"
    return f"{{name: {_word(name)}}}]"


def _has_chat_template(model: str) -> bool:
    try:
        return has_chat_template(ModelConfig(path=model))
    except ModelError:
        return False  # not available now; `paceline check` says why


def _longest(model: str, prompts: Sequence[object], prompt_format: str) -> int:
    """Returns the number of tokens of the longest prompt; 0 if the tokenizer is missing or refuses them."""
    from paceline.data.prompts import encode_prompt, load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
        return max(len(encode_prompt(tokenizer, prompt, prompt_format)) for prompt in prompts)
    except PacelineError:
        return 0  # `paceline check` says why


def _lengths(tree: Mapping[str, Any], longest: int) -> tuple[int, int]:
    """Returns the longest prompt and response in tokens; together they fit the model's positions.

    The limit of prompts is an eighth above `longest`, because later rows may be longer. If `longest` is
    unknown, it is the usual length, or a third of the positions if the model has few.
    """
    positions = tree.get("max_position_embeddings")
    if not isinstance(positions, int):
        positions = _PROMPT_TOKENS + _RESPONSE_TOKENS + longest
    if longest:
        prompt = min(8 * math.ceil((longest + longest / 8) / 8), max(longest, positions // 2))
        return prompt, max(1, min(_RESPONSE_TOKENS, positions - prompt))
    if positions >= _PROMPT_TOKENS + _RESPONSE_TOKENS:
        return _PROMPT_TOKENS, _RESPONSE_TOKENS
    return positions // 3, positions - positions // 3


def _rates(tree: Mapping[str, Any]) -> _Rates:
    """Returns the learning rates by the model's size; those of large models if the size is unknown."""
    shape = ModelShape.of(tree)
    return next((rates for rates in _RATES if shape and shape.num_parameters < rates.below), _RATES[-1])


def _lora(answers: Mapping[str, str]) -> str:
    if "lora" not in answers:
        return ""
    rank = int(answers["lora"])
    return f"  lora: {{rank: {rank}, alpha: {2 * rank}}}  # adapters learn, the model's own weights stay\n"


def _answer(question: _Question, answers: dict[str, str], ask: Callable[[_Question], str]) -> None:
    """Adds the answer to a question, unless a flag gave it; a wrong value of a flag is an error."""
    answer = answers.get(question.name)
    if answer is None:
        answers[question.name] = ask(question)
    elif fault := question.fault(answer):
        raise ConfigError(f"{fault}; correct {question.flag}")


def _default(question: _Question) -> str:
    if not question.default:
        choices = f", one of {', '.join(question.choices)}" if question.choices else ""
        raise ConfigError(f"{question.words.lower()} is missing: give {question.flag}{choices}")
    if fault := question.fault(question.default):
        raise ConfigError(f"{fault}; give {question.flag}")
    return question.default


def _ask(question: _Question) -> str:
    """Asks on the terminal until the answer has no fault."""
    shown = f" [{question.default}]" if question.default else ""
    while True:
        try:
            answer = input(f"{question.words}{shown}: ").strip() or question.default
        except EOFError:
            print()
            flag = question.flag
            raise ConfigError(
                f"no answer to {question.words!r}, so nothing was written; begin again, or give {flag}"
            ) from None
        fault = question.fault(answer) if answer else "an answer is needed"
        if not fault:
            return answer
        print(f"{fault}; Ctrl-D ends this")


def _known(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns the first of the names that is a column of the row; "" if none is."""
    return next((name for name in names if value_at(dict(row), name) is not None), "")


def _word(value: str) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def _name(file: str) -> str:
    """Derives a run's name from the name of its file."""
    return "".join(c if c.isalnum() or c in "_.-" else "-" for c in Path(file).stem)
