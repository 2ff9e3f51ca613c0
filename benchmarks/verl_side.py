"""The side of verl in against_verl.py: its data, settings and environment, and the steps in its output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import step
from pyarrow import parquet

VERSION = "0.9.1"
MODULES = Path(__file__).resolve().parent / "verl_modules"
MICRO_BATCH_TOKENS = 24576
STEP_LINE = re.compile(r"\bstep:(\d+) - (\S.*)")
NUMPY_NUMBER = re.compile(r"np\.\w+\((.*)\)")
PLAIN_VALUE = re.compile(r"[\w./-]+")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
REWARD = """

def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return even_words(solution_str, ground_truth)
"""

Steps = list[dict[str, float]]


def write_inputs(work: Path, vocab_size: int) -> None:
    """Writes tokenizer, rows and reward, from what `step.write_inputs` wrote."""
    write_tokenizer(work / "model", work / "verl_tokenizer", vocab_size)
    write_rows(work / "prompts.jsonl", work / "prompts.parquet")
    (work / "verl_reward.py").write_text(step.REWARD + REWARD)


def write_tokenizer(model: Path, folder: Path, vocab_size: int) -> None:
    """Writes the model's tokenizer in the form that verl needs for a Qwen model.

    verl's chats need a template and the tokens of ChatML, and its engine samples no token that the tokenizer
    lacks. The folder is another one because AutoTokenizer prefers the tokenizer of the model's type, where
    there is a config.json.
    """
    folder.mkdir(exist_ok=True)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    added = ("\n", "<|im_end|>")
    names = [f"w{number}" for number in range(step.NUM_WORDS, step.NUM_WORDS + vocab_size)]
    for name in [*names[: vocab_size - len(vocabulary) - len(added)], *added]:
        vocabulary[name] = len(vocabulary)
    switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [{"id": vocabulary[name], "content": name, **switches} for name in added]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))


def write_rows(prompts: Path, path: Path) -> None:
    """Writes Paceline's prompts as rows of verl."""
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    rows = [
        {
            "data_source": "even_words",
            "prompt": [{"role": "user", "content": line["prompt"]}],
            "ability": "words",
            "reward_model": {"style": "rule", "ground_truth": line["answer"]},
            "extra_info": {"split": "train", "index": index},
        }
        for index, line in enumerate(lines)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def settings_of(ours: Mapping[str, Any], work: Path, num_gpus: int) -> dict[str, Any]:
    """Returns verl's settings; batch, lengths, steps, learning rate and type are those of Paceline's run.

    Args:
        ours: Paceline's configuration.
        work: the folder with the inputs.
    """
    data, actor, rollout = ours["data"], ours["actor"], ours["rollout"]
    model, trainer = "actor_rollout_ref.model", "trainer"
    learner, engine = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "data.train_files": str(work / "prompts.parquet"),
        "data.val_files": str(work / "prompts.parquet"),
        "data.train_batch_size": data["train_batch_size"],
        "data.max_prompt_length": data["max_prompt_length"],
        "data.max_response_length": data["max_response_length"],
        "data.shuffle": False,
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        f"{model}.path": str(work / "model"),
        f"{model}.tokenizer_path": str(work / "verl_tokenizer"),
        f"{model}.use_remove_padding": True,
        f"{model}.enable_gradient_checkpointing": True,
        f"{learner}.strategy": "fsdp2",
        f"{learner}.fsdp_config.model_dtype": "fp32",
        f"{learner}.fsdp_config.dtype": ours["model"]["dtype"],
        f"{learner}.fsdp_config.param_offload": False,
        f"{learner}.fsdp_config.optimizer_offload": False,
        f"{learner}.optim.lr": actor["optim"]["lr"],
        f"{learner}.ppo_mini_batch_size": actor["ppo_mini_batch_size"],
        f"{learner}.use_dynamic_bsz": True,
        f"{learner}.ppo_max_token_len_per_gpu": MICRO_BATCH_TOKENS,
        f"{learner}.use_kl_loss": False,
        f"{learner}.entropy_coeff": 0,
        f"{engine}.name": "vllm",
        f"{engine}.n": rollout["n"],
        f"{engine}.dtype": ours["model"]["dtype"],
        f"{engine}.tensor_model_parallel_size": 1,
        f"{engine}.gpu_memory_utilization": 0.6,
        f"{engine}.enforce_eager": False,
        f"{engine}.ignore_eos": True,
        "reward.custom_reward_function.path": str(work / "verl_reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        f"{trainer}.n_gpus_per_node": num_gpus,
        f"{trainer}.nnodes": 1,
        f"{trainer}.total_epochs": 1,
        f"{trainer}.total_training_steps": ours["trainer"]["total_steps"],
        f"{trainer}.logger": ["console"],
        f"{trainer}.val_before_train": False,
        f"{trainer}.test_freq": -1,
        f"{trainer}.save_freq": -1,
        f"{trainer}.resume_mode": "disable",
        f"{trainer}.default_local_dir": str(work / "verl_run"),
    }


def hydra_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings in the grammar of Hydra's command line."""
    return [f"{key}={_hydra_value(value)}" for key, value in settings.items()]


def _hydra_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(_hydra_value(item) for item in value)}]"
    if isinstance(value, str) and not PLAIN_VALUE.fullmatch(value):
        return "'" + value.replace("'", "\\'") + "'"
    return json.dumps(value) if isinstance(value, bool) else str(value)


def read_steps(text: str) -> Steps:
    """Reads the steps in the output of verl's console logger, without an incomplete last line.

    A step is `step:1 - actor/loss:0.1 - ...`, behind the name of Ray's process; `pprint` writes the numbers,
    so some are `np.float64(0.1)`. Lines without the seconds of a step belong to validation.
    """
    steps = []
    for line in text.rpartition("\n")[0].splitlines():
        match = STEP_LINE.search(line)
        if match is None:
            continue
        metrics = {"step": float(match[1])}
        for item in match[2].split(" - "):
            name, _, value = item.strip().partition(":")
            number = NUMPY_NUMBER.fullmatch(value)
            try:
                metrics[name] = float(number[1] if number else value)
            except ValueError:
                continue  # a text between two lines of Ray's
        if "timing_s/step" in metrics:
            steps.append(metrics)
    return steps


def environment_of(environment: Mapping[str, str], settings: Sequence[str] = ()) -> dict[str, str]:
    """Returns the environment of verl's run, without the paths of Paceline's packages.

    Args:
        settings: of its command line; with flash-attn-4, its processes load `verl_flash4`.
    """
    theirs = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    theirs |= {"HYDRA_FULL_ERROR": "1", "RAY_DEDUP_LOGS": "0"}
    if any(setting.endswith("=flash_attention_4") for setting in settings):
        theirs |= {"PYTHONPATH": str(MODULES), "VERL_USE_EXTERNAL_MODULES": "verl_flash4"}
    return theirs
