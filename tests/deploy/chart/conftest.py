"""The chart's manifests with different values."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from support.chart import (
    EVERY,
    FOLDER,
    MANY,
    MODELS,
    VALUES,
    VERSIONS,
    Manifest,
    render,
    write,
)


@pytest.fixture(scope="module", params=sorted(VALUES))
def values(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of values."""
    wanted = VALUES[request.param]
    return wanted if isinstance(wanted, Path) else write(wanted, tmp_path_factory.mktemp("values"))


@pytest.fixture(scope="module")
def manifests(values: Path) -> dict[tuple[str, str], Manifest]:
    return render(values)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Manifest]:
    return render(write(EVERY, tmp_path_factory.mktemp("every")))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Manifest]:
    return render(write(MANY, tmp_path_factory.mktemp("many")))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Manifest]:
    return render(write(MODELS, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What deploy/helm/secrets.sh prints: files by the names of Secrets."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline.cli.main "$@"\n')
    (folder / "paceline").chmod(0o755)
    env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = ["sh", str(FOLDER / "secrets.sh"), str(folder / "run"), "run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    made = [each for each in yaml.safe_load_all(done.stdout) if each]
    for secret in made:
        kubernetes_validate.validate(secret, VERSIONS[-1], strict=True)
    return {
        secret["metadata"]["name"]: {
            name: base64.b64decode(text, validate=True) for name, text in secret["data"].items()
        }
        for secret in made
    }
