"""A controller that is started by itself: what `paceline train` otherwise does for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.broker.base import Broker
from paceline.config.load import dump_yaml, load
from paceline.config.run import RunConfig
from paceline.controller import app
from paceline.controller.__main__ import main
from paceline.controller.batch.inputs import Inputs
from paceline.controller.batch.mailboxes import Mailboxes
from paceline.controller.run.records.opening import open_run
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.data.mixture import PromptMixture
from support import source
from support.memory_broker import MemoryBroker
from support.sequencer_run import config, prompts

CONFIG = source.ROOT / "examples" / "arithmetic" / "ppo.yaml"


def options(file: Path, run_dir: Path, *overrides: str) -> app.Options:
    return app.Options(
        config=file,
        overrides=overrides,
        run_dir=run_dir,
        host="",
        advertise="",
        port=None,
        address_file=None,
    )


def test_the_settings_in_force_lie_in_the_run_directory(tmp_path: Path) -> None:
    words = options(CONFIG, tmp_path, "trainer.total_steps=3")
    app._keep_settings(load(RunConfig, CONFIG, words.overrides), words)
    file = tmp_path / "config.resolved.yaml"
    kept = load(RunConfig, file)
    assert (kept.trainer.total_steps, kept.trainer.run_dir) == (3, str(tmp_path))
    # Those of `paceline train` stay as they are, byte for byte.
    file.write_text("# written by the launcher\n" + file.read_text())
    before = file.read_text()
    app._keep_settings(load(RunConfig, file), options(file, tmp_path))
    assert file.read_text() == before


def test_the_settings_that_the_launcher_gives_are_kept_byte_for_byte(tmp_path: Path) -> None:
    start = tmp_path / "config.start.yaml"
    start.write_text("# of the launcher\n" + CONFIG.read_text())
    app._keep_settings(load(RunConfig, start), options(start, tmp_path))
    assert (tmp_path / "config.resolved.yaml").read_text() == start.read_text()


@pytest.mark.parametrize(
    ("num_samples", "said"),
    [(3, "begun with other settings: now rollout.n=3 instead of 2"), (2, "no broker")],
)
def test_only_a_run_that_goes_on_gets_other_settings(
    num_samples: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What `paceline train rollout.n=3` of a run with two samples leaves: `verify` and `export` read it."""

    async def connect(*_: object) -> Broker:
        raise ConfigError("no broker")

    monkeypatch.setenv("PACELINE_BROKER_URL", "redis://127.0.0.1:1/0")
    cursor = PromptMixture({"": range(7)}, batch_size=3, seed=0)
    inputs = Inputs(train=prompts(7), val=(), cursor=cursor, stop_token_ids=(0,))
    monkeypatch.setattr(app, "load_inputs", lambda config: inputs)
    monkeypatch.setattr(app, "_connect", connect)
    journal, *_ = open_run(tmp_path, config(), inputs, SystemClock())
    journal.close()
    kept, start = tmp_path / "config.resolved.yaml", tmp_path / "config.start.yaml"
    kept.write_text(dump_yaml(config()))
    start.write_text(dump_yaml(config(rollout__n=num_samples, trainer__total_steps=9)))
    assert main(["--config", str(start), "--run-dir", str(tmp_path)]) == 2
    assert said in capfd.readouterr().err
    assert load(RunConfig, kept).trainer.total_steps == (2 if num_samples == 3 else 9)


def test_epochs_are_counted_where_no_launcher_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object) -> Broker:
        raise ConfigError("no broker")

    monkeypatch.setenv("PACELINE_BROKER_URL", "redis://127.0.0.1:1/0")
    cursor = PromptMixture({"": range(7)}, batch_size=3, seed=0)
    inputs = Inputs(train=prompts(7), val=(), cursor=cursor, stop_token_ids=(0,))
    monkeypatch.setattr(app, "load_inputs", lambda config: inputs)
    monkeypatch.setattr(app, "_connect", connect)
    given = tmp_path / "given.yaml"
    given.write_text(dump_yaml(config(trainer__total_steps=None, trainer__total_epochs=1.6)))
    assert main(["--config", str(given), "--run-dir", str(tmp_path / "run")]) == 2
    assert load(RunConfig, tmp_path / "run" / "config.resolved.yaml").trainer.num_steps == 4


def test_a_password_in_the_settings_is_for_the_owner_only(tmp_path: Path) -> None:
    words = options(CONFIG, tmp_path, "broker.url=redis://:secret@redis:6379/0")
    app._keep_settings(load(RunConfig, CONFIG, words.overrides), words)
    assert (tmp_path / "config.resolved.yaml").stat().st_mode & 0o777 == 0o600


def test_an_override_is_checked_like_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_BROKER_URL", raising=False)
    assert main(["--config", str(CONFIG), "--run-dir", str(tmp_path), "trainer.total_stepz=3"]) == 2
    assert "did you mean 'total_steps'?" in capfd.readouterr().err


class AbsentBroker(MemoryBroker):
    """A broker whose server is away: its commands wait."""

    async def purge(self, prefix: str) -> int:
        """Never returns."""
        await asyncio.Event().wait()
        return 0


async def test_the_end_of_a_run_does_not_wait_for_a_broker_that_is_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_PURGE_S", 0.05)
    async with asyncio.timeout(120):
        await app._forget(Mailboxes(AbsentBroker(), "r", own_server=False))
    assert "the run's data stays in the broker: it has not answered within 0.05 s" in caplog.text


async def test_the_end_of_a_run_removes_its_data_from_the_broker() -> None:
    broker = MemoryBroker()
    mailboxes = Mailboxes(broker, "r", own_server=False)
    await mailboxes.begin_anew()
    await broker.put_blob("another:blob", b"1")
    await app._forget(mailboxes)
    assert broker._store.streams == {}
    assert broker._store.blobs == {"another:blob": b"1"}
