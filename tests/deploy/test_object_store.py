"""Checkpoints in an object store: a run that is killed goes on from moto's S3 server."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.sizing.machine import free_port
from support.s3_server import use_s3_server
from support.training_run import (
    TRANSPORT,
    Row,
    assert_same_metrics,
    assert_sound,
    only,
    tiny_config,
    training,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.torch,
    pytest.mark.redis,
    pytest.mark.timeout(1800),
    # First, so that the undisturbed run is not made for a test that is skipped.
    pytest.mark.usefixtures("moto"),
]

LEARN = ("phase", "learn", 3)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an S3 server with an empty bucket."""
    program = os.environ.get("MOTO_SERVER") or shutil.which("moto_server")
    # A version manager may have a name on the PATH behind which nothing is.
    if program is None or subprocess.run([program, "--help"], capture_output=True, check=False).returncode:
        pytest.skip("needs moto_server: pip install 'moto[server]', anywhere, and name it in MOTO_SERVER")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path_factory.mktemp("moto") / "log").open("wb") as log:
        process = subprocess.Popen([program, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    try:
        _make_bucket(url)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _make_bucket(url: str) -> None:
    """Makes it as soon as the server answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=10).close()
            return
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture
def store(moto: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The object store, which the run finds through the environment."""
    return use_s3_server(moto, monkeypatch)


def test_a_killed_run_goes_on_from_its_checkpoint_in_the_object_store(
    store: Any, small_inputs: Path, small_run: dict[str, Any], undisturbed: list[Row], tmp_path: Path
) -> None:
    """Killed in its third step, with everything that belongs to it."""
    sections = small_run | {"trainer": small_run["trainer"] | {"checkpoint_url": "s3://bucket/checkpoints"}}
    config = tiny_config(small_inputs, **sections)
    with training(config, tmp_path / "run") as run:
        run.wait_for(lambda e: (e["event"], e.get("to"), e.get("step")) == LEARN, timeout_s=800)
        run.look()
        run.process.kill()
        run.process.wait(10)
        run.wait_until_nothing_is_left(timeout_s=60)
    (folder,) = store.ls("bucket/checkpoints")
    assert store.exists(f"{folder}/step_000002/manifest.json")
    with training(config, tmp_path / "run") as run:
        assert run.finish(timeout_s=800) == 0
        first, second = only(run.events, "run")
        assert first["run_id"] == second["run_id"]
        assert_sound(run)
    # The first two steps were not trained again.
    assert [event["step"] for event in only(run.events, "trained") if event["step"] < 3] == [1, 2]
    assert_same_metrics(run.metrics, undisturbed, without=TRANSPORT)
    assert not (tmp_path / "run/checkpoints").exists()
