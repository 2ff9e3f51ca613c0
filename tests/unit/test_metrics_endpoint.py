"""A Prometheus endpoint beyond loopback: whom it refuses, as docs/security.md says, and new files."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.certificates import Authority
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.service.identity.credentials import CA_FILE, TLS_DIR, TlsFiles
from paceline.service.observability import prometheus, telemetry
from paceline.service.observability.prometheus import PLAIN
from paceline.sizing.machine import free_port

pytest.importorskip("prometheus_client", reason="pip install opentelemetry-exporter-prometheus")

DOCS = Path(__file__).parents[2] / "docs" / "security.md"
EVERYWHERE = "0.0.0.0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Authority.create(tmp_path, days=1)
    issue(tmp_path, "controller")
    return tmp_path


def issue(folder: Path, name: str, *, role: str = "", days: float = 1.0) -> Path:
    Authority.load(folder).issue(folder / name, name, role=role or name, days=days)
    return folder / name


@pytest.fixture
def port(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of an endpoint on every address, over TLS."""
    monkeypatch.setenv(prometheus.HOST, EVERYWHERE)
    monkeypatch.setenv(TLS_DIR, str(folder / "controller"))
    chosen = free_port()
    telemetry.setup("controller", run_dir=None, prometheus_port=chosen)
    yield chosen
    telemetry.shutdown()


def scrape(port: int, context: ssl.SSLContext | None) -> str:
    """The metrics, over TLS if a context is given."""
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=120, context=context)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def trusting(folder: Path, certificate: str = "") -> ssl.SSLContext:
    """A caller's context: its certificate names a role, not an address."""
    context = ssl.create_default_context(cafile=str(folder / CA_FILE))
    context.check_hostname = False
    if certificate:
        files = TlsFiles(folder / certificate)
        context.load_cert_chain(files.folder / "cert.pem", files.folder / "key.pem")
    return context


KINDS = ("plain text", "no certificate", "expired certificate", "certificate of another authority")


@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_is_refused(
    kind: str, port: int, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    issue(folder, "expired", role="client", days=-1.0)
    stranger = tmp_path_factory.mktemp("stranger")
    Authority.create(stranger, days=1)
    context = trusting(folder, "expired" if kind == "expired certificate" else "")
    if kind == "certificate of another authority":
        files = issue(stranger, "client")
        context.load_cert_chain(files / "cert.pem", files / "key.pem")
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        scrape(port, None if kind == "plain text" else context)
    issue(folder, "client")
    assert "paceline_process" in scrape(port, trusting(folder, "client"))


def test_without_files_it_refuses_to_listen_and_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prometheus.HOST, EVERYWHERE)
    with pytest.raises(
        ConfigError, match=f"refusing to serve metrics on {EVERYWHERE} in plain text: set {TLS_DIR}"
    ):
        telemetry.setup("controller", run_dir=None, prometheus_port=free_port())
    monkeypatch.setenv(PLAIN, "1")
    chosen = free_port()
    telemetry.setup("controller", run_dir=None, prometheus_port=chosen)
    assert "paceline_process" in scrape(chosen, None)
    telemetry.shutdown()


def test_files_that_cannot_be_used_end_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(prometheus.HOST, EVERYWHERE)
    monkeypatch.setenv(TLS_DIR, str(tmp_path))
    with pytest.raises(EnvironmentLackError, match="ca.pem cannot be used"):
        telemetry.setup("controller", run_dir=None, prometheus_port=free_port())


def test_a_new_certificate_is_shown_without_a_restart(port: int, folder: Path) -> None:
    issue(folder, "client")

    def shown() -> bytes:
        plain = socket.create_connection(("127.0.0.1", port), timeout=120)
        with trusting(folder, "client").wrap_socket(plain) as secured:
            return secured.getpeercert(binary_form=True) or b""

    first = shown()
    assert shown() == first
    issue(folder, "controller")
    assert shown() != first


def test_callers_who_say_nothing_do_not_keep_others_out(
    port: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few at a time are answered; where all places are taken, who has been there longest goes."""
    monkeypatch.setattr("paceline.service.observability.http_server._REQUEST_S", 300.0)
    issue(folder, "client")
    idle = [socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(40)]
    began = time.monotonic()
    assert "paceline_process" in scrape(port, trusting(folder, "client"))
    assert time.monotonic() - began < 200
    for caller in idle:
        caller.close()


def test_the_document_has_every_refusal() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## The metrics endpoint\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", section, flags=re.MULTILINE)
    assert set(rows) == {"caller", *KINDS}


def test_the_metrics_say_how_much_of_the_certificates_days_is_left(folder: Path, port: int) -> None:
    def left() -> dict[str, float]:
        text = scrape(port, trusting(folder, "prometheus"))
        series = re.findall(r"^paceline_certificate_life_left_ratio\{(.*)\} (\S+)$", text, re.M)
        return {re.findall(r'file="([^"]+)"', labels)[0]: float(value) for labels, value in series}

    issue(folder, "prometheus", role="client")
    assert left() == {"cert.pem": pytest.approx(1.0, abs=0.1), "ca.pem": pytest.approx(1.0, abs=0.1)}
    # It began five minutes ago, and has one to go.
    issue(folder, "controller", days=1 / 1440)
    assert left() == {"cert.pem": pytest.approx(1 / 12, abs=1 / 12), "ca.pem": pytest.approx(1.0, abs=0.1)}
