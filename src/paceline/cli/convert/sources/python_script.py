"""Reads the settings of a Python script that trains with TRL, from its syntax tree, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.cli.convert.sources.settings import ScriptSettings
from paceline.cli.convert.trl.data import ANSWER, COLUMNS, MESSAGES
from paceline.core.errors import ConfigError

_NOT_COLUMNS = frozenset(
    ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
)
_ANSWERS = ("ground_truth", "solution", "answer", "label", "target")
_ADAPTERS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "task_type": "lora_task_type",
}
_CHANGES_ROWS = ("map", "filter", "select", "shuffle", "train_test_split", "rename_column", "take", "skip")


def read_script(path: Path, text: str) -> ScriptSettings:
    """Returns the settings of `GRPOConfig(...)` and `GRPOTrainer(...)`.

    Args:
        path: path of the script; reward functions that it imports are searched in its folder.

    Raises:
        ConfigError: the script is not Python, or has neither call.
    """
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path} is not Python: line {error.lineno}: {error.msg}") from None
    reader = _Reader(module, path)
    if not reader.read():
        raise ConfigError(
            f"{path} has neither GRPOConfig(...) nor GRPOTrainer(...): only TRL's GRPO scripts are read"
        )
    return reader.script


class _Reader:
    def __init__(self, module: ast.Module, path: Path) -> None:
        self._module, self._path = module, path
        self._values: dict[str, list[ast.expr]] = {}
        for name, value in _assignments(module):
            self._values.setdefault(name, []).append(value)
        self._functions = _functions(module)
        self._imports = dict(_imports(module))
        self.script = ScriptSettings()

    def read(self) -> bool:
        """Returns whether there was anything to read."""
        calls = [(node, _called(node)) for node in ast.walk(self._module) if isinstance(node, ast.Call)]
        configs = [node for node, name in calls if name == "GRPOConfig"]
        trainers = [node for node, name in calls if name == "GRPOTrainer"]
        for call in configs:
            if call.args:
                self._set("output_dir", call.args[0])
            for keyword in call.keywords:
                self._set(keyword.arg or "**", keyword.value)
        for call in trainers:
            self._trainer(call)
        return bool(configs or trainers)

    def _trainer(self, call: ast.Call) -> None:
        names = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
        given = dict(zip(names, call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        for name, node in given.items():
            if name == "model":
                self._set("model_name_or_path", node)
            elif name == "reward_funcs":
                self._rewards(node)
            elif name in ("train_dataset", "eval_dataset"):
                self._data(name, node)
            elif name == "peft_config":
                self._adapters(node)
            elif name not in ("args", "processing_class", "reward_processing_classes"):
                self._set(name, node)

    def _set(self, key: str, node: ast.expr) -> None:
        try:
            self.script.settings[key] = self._literal(node)
        except ValueError:
            self.script.refused[f"{key}: {ast.unparse(node)}"] = (
                "is not a plain value, and the script is not run; write it"
            )

    def _literal(self, node: ast.expr, passed: dict[str, int] | None = None) -> Any:
        """Returns a plain value, with the script's own constants; raises ValueError."""
        passed = {} if passed is None else passed
        followed = self._followed(node, passed)
        if isinstance(followed, ast.List | ast.Tuple):
            return [self._literal(element, dict(passed)) for element in followed.elts]
        return ast.literal_eval(followed)

    def _followed(self, node: ast.expr, passed: dict[str, int] | None = None) -> ast.expr:
        """Returns what a name was last set to, skipping the number of its last assignments in `passed`."""
        passed = {} if passed is None else passed
        while isinstance(node, ast.Name):
            values = self._values.get(node.id, [])
            place = len(values) - 1 - passed.get(node.id, 0)
            if place < 0:
                break
            passed[node.id] = passed.get(node.id, 0) + 1
            node = values[place]
        return node

    def _rewards(self, node: ast.expr) -> None:
        node = self._followed(node)
        functions = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        names = []
        for function in functions:
            if isinstance(function, ast.Constant):
                names.append(function.value)
            elif isinstance(function, ast.Name) and function.id in self._functions:
                names.append(self._own(function.id))
            elif isinstance(function, ast.Name) and function.id in self._imports:
                names.append(self._imported(self._imports[function.id]))
            else:
                self.script.refused[f"reward_funcs: {ast.unparse(function)}"] = (
                    "write the function in a separate file and name it FILE.py:FUNCTION"
                )
        self.script.settings["reward_funcs"] = names

    def _own(self, name: str) -> str:
        """Returns a function of the script itself, which cannot be imported without training."""
        self._inspect(self._functions[name])
        self.script.changed[f"reward_funcs: {name}"] = (
            f"move the function from {self._path.name} to rewards.py: a reward process imports the file, and "
            f"{self._path.name} would train there"
        )
        return f"rewards.py:{name}"

    def _imported(self, reference: str) -> str:
        """Returns a function of a module, which may be in the script's folder."""
        module, _, name = reference.partition(":")
        file = self._path.parent.joinpath(*module.split(".")).with_suffix(".py")
        if name and file.is_file():
            try:
                function = _functions(ast.parse(file.read_text(encoding="utf-8"))).get(name)
            except (SyntaxError, UnicodeDecodeError):
                function = None
            if function is not None:
                self._inspect(function)
        return reference

    def _inspect(self, function: ast.FunctionDef) -> None:
        """Notes the columns that a reward function names, and whether it reads messages."""
        arguments, settings = function.args, self.script.settings
        columns = [
            argument.arg
            for argument in (*arguments.args, *arguments.kwonlyargs)
            if argument.arg not in _NOT_COLUMNS
        ]
        answer = next((name for name in _ANSWERS if name in columns), columns[0] if columns else None)
        if answer is not None:
            settings.setdefault(ANSWER, answer)
        known = settings.get(COLUMNS, [])
        if extra := [name for name in columns if name != "ground_truth" and name not in known]:
            settings[COLUMNS] = [*known, *extra]
        if any(isinstance(node, ast.Constant) and node.value == "content" for node in ast.walk(function)):
            settings[MESSAGES] = True

    def _adapters(self, node: ast.expr) -> None:
        node = self._followed(node)
        if not isinstance(node, ast.Call) or _called(node) != "LoraConfig":
            if not (isinstance(node, ast.Constant) and node.value is None):
                self.script.refused[f"peft_config: {ast.unparse(node)}"] = "only LoraConfig(...) is read"
            return
        # LoraConfig's own defaults; the arguments of TRL's GRPO script have other ones.
        self.script.settings |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
        for keyword in node.keywords:
            self._set(_ADAPTERS.get(keyword.arg or "", f"peft_config.{keyword.arg}"), keyword.value)

    def _data(self, name: str, node: ast.expr) -> None:
        steps: list[str] = []
        split = None
        passed: dict[str, int] = {}
        node = self._followed(node, passed)
        while True:
            if isinstance(node, ast.Subscript):
                split = split or node.slice
                node = self._followed(node.value, passed)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                steps.append(node.func.attr)
                node = self._followed(node.func.value, passed)
            else:
                break
        if not isinstance(node, ast.Call) or _called(node) != "load_dataset":
            self.script.refused[f"{name}: {ast.unparse(node)}"] = (
                "write the rows to a parquet or JSONL file and name it under data.train_files"
            )
            return
        if changes := [step for step in steps if step in _CHANGES_ROWS]:
            self.script.changed[f"{name}: {', '.join(reversed(changes))}"] = (
                "the rows are read unchanged; if that matters, write the changed ones to a file"
            )
        self._loaded(name, node, split)

    def _loaded(self, name: str, call: ast.Call, split: ast.expr | None) -> None:
        given: dict[str, Any] = {}
        for key, value in (
            *zip(("path", "name"), call.args, strict=False),
            *((keyword.arg or "**", keyword.value) for keyword in call.keywords),
            *((("split", split),) if split is not None else ()),
        ):
            try:
                given[key] = self._literal(value)
            except ValueError:
                self.script.refused[f"{name}: {ast.unparse(value)}"] = "is not a plain value; write it"
        settings, part = self.script.settings, "train" if name == "train_dataset" else "test"
        if given.get("path") in ("parquet", "json") and "data_files" in given:
            files = given["data_files"]
            files = files.get(given.get("split", part), files) if isinstance(files, dict) else files
            settings["dataset_name" if part == "train" else "eval_dataset"] = files
        elif part == "train":
            settings["dataset_name"] = given.get("path")
            settings |= {"dataset_config": given["name"]} if given.get("name") else {}
            settings |= {"dataset_train_split": given["split"]} if "split" in given else {}
        else:
            config = given.get("name") or ""
            settings["eval_dataset"] = f"{given.get('path')}:{config}:{given.get('split', 'test')}"


def _functions(module: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _imports(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the script's imports with their dotted paths; for TRL's own rewards, with the name alone."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                is_trl = node.module.split(".")[0] == "trl"
                yield alias.asname or alias.name, alias.name if is_trl else f"{node.module}:{alias.name}"
