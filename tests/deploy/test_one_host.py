"""`paceline train` on one host: what can be reached from outside while it runs, and the same run over TLS."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.core.scoring import ScoreItem
from paceline.sdk import RewardClient
from paceline.service.identity.credentials import TLS_DIR, TlsFiles, server_name
from support.joining import join_and_leave
from support.small_run import METRICS_PORT, LocalRun
from support.training_run import (
    PACELINE,
    Row,
    TrainingRun,
    assert_same_metrics,
    assert_sound,
    tiny_config,
    training,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.torch,
    pytest.mark.redis,
    pytest.mark.timeout(600),
]

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def test_no_port_of_a_run_answers_beyond_loopback(local_run: LocalRun) -> None:
    """torch's stores and gloo listened on every interface, or on that of the machine's name."""
    ports = local_run.listening
    # Redis, four services, five metrics endpoints, two stores, gloo on three ranks, the engine's own.
    assert len(ports) >= 15, ports
    assert {METRICS_PORT + number for number in range(5)} <= {port for _, _, port in ports}
    assert [each for each in ports if each[1] not in LOOPBACK] == []
    assert [row["step"] for row in local_run.metrics] == [0, 1, 2, 3]


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the authority; the run gets a certificate of this host."""
    folder = tmp_path / "certs"
    for words in (["init", str(folder)], ["issue", str(folder), "host-1"], ["issue", str(folder), "client"]):
        subprocess.run([str(PACELINE), "certs", *words], check=True, timeout=60, capture_output=True)
    monkeypatch.setenv(TLS_DIR, str(folder / "host-1"))
    return folder


def test_a_run_over_tls_trains_what_the_plain_run_trains(
    small_inputs: Path,
    small_run: dict[str, Any],
    undisturbed: list[Row],
    certificates: Path,
    tmp_path: Path,
) -> None:
    with training(tiny_config(small_inputs, **small_run), tmp_path / "run") as run:
        assert run.finish(timeout_s=400) == 0
    assert_same_metrics(run.metrics, undisturbed)
    assert_sound(run)


def test_whom_a_run_over_tls_answers(small_inputs: Path, certificates: Path, tmp_path: Path) -> None:
    """Members join by the printed commands alone."""
    config = tiny_config(
        small_inputs, trainer={"total_steps": 1000, "save_freq": 0}, learner={"world_size": 1}
    )
    with training(config, tmp_path / "run", "--open", "trainer.val_before_train=false") as run:
        run.wait_for(lambda event: event["event"] == "commit")
        controller = (run.run_dir / "controller.address").read_text().strip()
        assert answers(controller, certificates, certificate="client")
        assert not answers(controller, certificates, certificate="")
        assert "rollout-0" in status(run, certificates / "client").stdout
        assert status(run, None).returncode != 0
        assert score_from_outside(run, certificates) == [1.0, 0.0]
        join_and_leave(run, tmp_path)
        run.process.terminate()
        assert run.finish() == 143
    assert_sound(run)


def answers(address: str, certificates: Path, *, certificate: str) -> bool:
    """Whether the controller lets a caller connect; one without a certificate knows the authority."""
    ca = TlsFiles(certificates / "client").read().ca
    proof = grpc.ssl_channel_credentials(ca)
    if certificate:
        proof = TlsFiles(certificates / certificate).read().for_channel()
    options = [("grpc.ssl_target_name_override", server_name("controller"))]
    with grpc.secure_channel(address, proof, options=options) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=5)
        except grpc.FutureTimeoutError:
            return False
    return True


def score_from_outside(run: TrainingRun, certificates: Path) -> list[float | None]:
    """What the run's reward service answers to a caller that has `ca.pem` and a token of scope reward."""
    address = re.findall(r"reward-0 .* (\S+:\d+)", status(run, certificates / "client").stdout)[0]
    folder = certificates / "outside"
    folder.mkdir()
    (folder / "ca.pem").write_bytes((certificates / "ca.pem").read_bytes())
    command = [str(PACELINE), "certs", "token", "--scope", "reward", "--days", "1"]
    environment = os.environ | {"PACELINE_TOKEN": run.note["token"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    items = [
        ScoreItem(trajectory_id=text, prompt="", response=text, ground_truth="") for text in ("letters", "12")
    ]

    async def ask() -> list[float | None]:
        async with RewardClient(address, token=done.stdout.strip()) as client:
            return [result.reward for result in await client.score(items)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TLS_DIR, str(folder))
        return asyncio.run(ask())


def status(run: TrainingRun, certificate: Path | None) -> subprocess.CompletedProcess[str]:
    """`paceline status`, asked with this certificate or in plain text."""
    environment = {name: value for name, value in os.environ.items() if name != TLS_DIR}
    if certificate is not None:
        environment[TLS_DIR] = str(certificate)
    command = [str(PACELINE), "status", str(run.run_dir)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
