"""The wheels: the distribution's has the page's files and the examples, the SDK's works without torch."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

from paceline.cli.main import main
from paceline.core.errors import ConfigError, EnvironmentLackError
from support import source

SDK = source.ROOT / "packaging" / "sdk"
# What a reward server may not need. None in sys.modules makes an import fail.
BLOCKED = ("torch", "redis", "pydantic", "yaml", "transformers", "vllm", "pyarrow", "rich", "fsspec")
SCRIPT = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))
from paceline.sdk import RewardClient, RewardServer, ScoreItem
import asyncio, paceline.sdk
assert paceline.sdk.__file__.startswith(sys.argv[1]), paceline.sdk.__file__
def length(response: str, ground_truth: str, **extra) -> float:
    return len(response) / 10
async def main():
    async with RewardServer(length, port=0) as server:
        async with RewardClient(server.address) as client:
            item = ScoreItem(trajectory_id="a", prompt="p", response="12345", ground_truth="")
            results = await client.score([item])
            print(results[0].reward)
asyncio.run(main())
third = sorted({{name.partition(".")[0] for name in sys.modules if sys.modules[name] is not None}})
print(" ".join(third))
"""


def build(root: Path, out: Path) -> zipfile.ZipFile:
    (path,) = WheelBuilder(str(root)).build(directory=str(out), versions=["standard"])
    return zipfile.ZipFile(path)


def requirements(wheel: zipfile.ZipFile) -> set[str]:
    """Of the base installation, by name."""
    (metadata,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    lines = wheel.read(metadata).decode().splitlines()
    named = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    return {re.split(r"[<>=; ]", line.removeprefix("Requires-Dist: "))[0] for line in named}


def has_licence(wheel: zipfile.ZipFile) -> bool:
    """Whether the metadata name the licence, and LICENSE and NOTICE are there as the repository has them."""
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    lines = wheel.read(f"{info}/METADATA").decode().splitlines()
    named = {"License-Expression: Apache-2.0", "License-File: LICENSE", "License-File: NOTICE"} <= set(lines)
    texts = (source.ROOT / "LICENSE", source.ROOT / "NOTICE")
    return named and all(wheel.read(f"{info}/licenses/{text.name}") == text.read_bytes() for text in texts)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(source.ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_distribution_has_the_pages_files_and_no_tests(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert has_licence(wheel)
    front = source.ROOT / "src" / "paceline" / "show" / "report" / "front"
    for file in front.iterdir():
        assert f"paceline/show/report/front/{file.name}" in names
    for package in ("controller", "rollout", "learner", "reward"):
        assert f"paceline/{package}/__main__.py" in names
    modules = {str(path.relative_to(source.ROOT / "src")) for path in (source.ROOT / "src").rglob("*.py")}
    assert modules - set(names) == set(), "not in the wheel: is the folder's name in .gitignore?"
    assert not [name for name in names if "/tests/" in name or name.startswith("tests/")]


def tracked(*folders: str) -> set[str]:
    command = ["git", "ls-files", *folders]
    done = subprocess.run(command, cwd=source.ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (source.ROOT / name).exists()}


def test_the_distribution_has_the_examples_and_none_of_what_they_write(wheel: zipfile.ZipFile) -> None:
    shipped = "paceline/shipped/"
    names = {name.removeprefix(shipped) for name in wheel.namelist() if name.startswith(shipped)}
    assert {"examples/arithmetic/prepare.py", "examples/arithmetic/ppo.yaml", "requirements/cpu.txt"} <= names
    assert names == tracked("docs", "examples", "proto", "requirements")


def command_of(site: Path) -> ModuleType:
    """The command `paceline examples` of a wheel that was installed there."""
    path = site / "paceline" / "cli" / "commands" / "prepare" / "examples.py"
    spec = importlib.util.spec_from_file_location("examples_of_the_wheel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stranger_with_the_wheel_alone_gets_to_a_run(
    wheel: zipfile.ZipFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wheel.extractall(tmp_path / "site")
    (tmp_path / "site/paceline/shipped/examples/arithmetic/__pycache__").mkdir()  # as pip makes it
    command = command_of(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert command.run(argparse.Namespace(folder=Path())) == 0
    said = capsys.readouterr().out
    written = {str(path) for path in Path().rglob("*") if path.is_file() or path.name == "__pycache__"}
    assert written == tracked("docs", "examples", "proto", "requirements")
    with pytest.raises(ConfigError, match="docs exists; name an empty folder: paceline examples FOLDER"):
        command.run(argparse.Namespace(folder=Path()))

    linked = [
        (str(page), target)
        for page in (*Path("docs").rglob("*.md"), *Path("examples").rglob("*.md"))
        for target in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page.read_text())
    ]
    assert len(linked) > 100
    assert [link for link in linked if not (Path(link[0]).parent / link[1]).exists()] == []
    assert "Both ways were run in clean containers" in Path("docs/start.md").read_text()

    printed = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    page = (source.ROOT / "docs" / "start.md").read_text().splitlines()
    assert [line for line in printed if line not in page and "cuda" not in line] == []
    files = [
        word for line in printed for word in line.split() if word.startswith(("examples/", "requirements/"))
    ]
    assert len(files) == 5
    assert [file for file in files if not Path(file).is_file()] == []

    assert main(["check", "--quick", "examples/arithmetic/ppo.yaml"]) == 2
    faults = capsys.readouterr().out
    assert "`python examples/arithmetic/prepare.py` makes it" in faults
    assert "`paceline sft examples/arithmetic/sft.yaml` makes it" in faults
    make_inputs(Path("examples/arithmetic"))
    assert main(["check", "--quick", "examples/arithmetic/ppo.yaml"]) == 0, capsys.readouterr().out


def make_inputs(example: Path) -> None:
    """What prepare.py and the warm-up make, without torch: data, a tokenizer, a model without weights."""
    prepare = runpy.run_path(str(example / "prepare.py"))
    sizes = {"num_train": 64, "num_val": 8, "num_sft": 8, "hasty_share": 0.5}
    prepare["write_data"](example / "data", seed=0, **sizes)
    prepare["build_tokenizer"]().save_pretrained(example / "start")
    shape = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "vocab_size": 384,
        "eos_token_id": 1,
    }
    (example / "start" / "config.json").write_text(json.dumps(shape))
    (example / "start" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def test_examples_go_into_a_folder_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_of(source.ROOT / "src")
    with pytest.raises(EnvironmentLackError, match="was not installed from a wheel"):
        command.run(argparse.Namespace(folder=tmp_path))
    (tmp_path / "shipped" / "examples").mkdir(parents=True)
    monkeypatch.setattr(command, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped" / "requirements").mkdir()
    (tmp_path / "shipped" / "requirements" / "cpu.txt").write_text("a==1\ntorch==9.1+cpu\ntorchx==3\n")
    assert command.run(argparse.Namespace(folder=tmp_path / "a" / "b")) == 0
    assert (tmp_path / "a" / "b" / "examples").is_dir()
    assert f"\n  cd {tmp_path}/a/b\n  pip install --no-deps torch==9.1+cpu --index" in capsys.readouterr().out


def test_a_reward_server_runs_from_the_sdks_wheel_alone(tmp_path: Path) -> None:
    wheel = build(SDK, tmp_path)
    assert has_licence(wheel)
    wheel.extractall(tmp_path / "site")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "site")],
        capture_output=True, text=True, timeout=120, env=environ, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]
    reward, modules = done.stdout.splitlines()
    assert float(reward) == 0.5
    assert not {"paceline.config", "paceline.broker"} & set(modules.split())
    third = {
        "grpc": "grpcio",
        "google": "protobuf",
        "msgpack": "msgpack",
        "numpy": "numpy",
        "psutil": "psutil",
    }
    needed = {name for module, name in third.items() if module in modules.split()}
    assert needed <= requirements(wheel)
    assert not requirements(wheel) & {"torch", "redis", "pydantic", "fsspec", "rich"}


@pytest.mark.parametrize("key", ["version", "requires-python", "license", "license-files"])
def test_both_are_of_one_version(key: str) -> None:
    projects = [
        tomllib.loads((root / "pyproject.toml").read_text())["project"] for root in (source.ROOT, SDK)
    ]
    assert projects[0][key] == projects[1][key]


def test_what_names_the_version_names_this_one() -> None:
    version = tomllib.loads((source.ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((source.ROOT / "deploy/helm/paceline/Chart.yaml").read_text())
    citation = yaml.safe_load((source.ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+) \((\S+)\)$", (source.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert {chart["version"], citation["version"], newest[1]} == {version}
    assert newest[2] in {str(citation["date-released"]), "unreleased"}
