"""How many blob stores a run has, where they are, and who is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.controller.app import _broker_urls
from paceline.core.errors import ConfigError
from paceline.launch.planning import dry_run
from paceline.learner.group import RankRegistration
from paceline.runs import run_dir as run_dirs
from paceline.sizing.machine import Machine
from support.cli_configs import config

URL, FAR, NEAR = "redis://:pw@10.0.0.1:6379/0", "redis://:pw@10.0.0.2:6380/0", "redis://127.0.0.1:7000/0"


@pytest.mark.parametrize(
    ("response", "broker", "number"),
    [
        (8192 - 512, {}, 0),
        (8192 - 511, {}, 1),
        (32768, {"url": URL}, 0),
        (32768, {"blob_stores": 0}, 0),
        (16, {"blob_stores": 3}, 3),
        (16, {"blob_stores": [FAR], "url": URL}, 0),
    ],
)
def test_a_run_starts_stores_for_long_rows_or_as_told(
    response: int, broker: dict[str, Any], number: int
) -> None:
    data = {"train_files": ["t.parquet"], "max_prompt_length": 512, "max_response_length": response}
    cfg = config(data=data, broker=broker)
    assert cfg.num_own_stores == number
    text = dry_run.describe(cfg, Machine(num_cores=2, gpus=()))
    assert ("PACELINE_BLOB_STORES=(made at start)" in text) is (number > 0)
    assert (f"{number} of its blob stores" in text) is (number > 0)


@pytest.mark.parametrize(
    ("broker", "sentence"),
    [
        ({"blob_stores": 1, "url": URL}, "list the addresses of running servers"),
        ({"blob_stores": [FAR]}, "set broker.url, or write a number"),
        ({"blob_stores": [FAR, NEAR, FAR], "url": URL}, "names an address twice"),
        ({"blob_stores": -1}, "blob_stores"),
        ({"blob_stores": "many"}, "blob_stores"),
    ],
)
def test_settings_that_make_no_sense(broker: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(broker=broker)


def test_the_controller_has_all_addresses_with_their_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret")
    monkeypatch.setenv("PACELINE_REDIS_PASSWORD_FILE", str(secret))
    monkeypatch.delenv("PACELINE_BROKER_URL", raising=False)
    listed = config(broker={"url": "redis://10.0.0.1/0", "blob_stores": ["redis://10.0.0.2/0", NEAR]})
    assert _broker_urls(listed) == [
        "redis://:s3cret@10.0.0.1/0",
        "redis://:s3cret@10.0.0.2/0",
        "redis://:s3cret@127.0.0.1:7000/0",
    ]
    monkeypatch.setenv("PACELINE_BROKER_URL", "redis://:own@127.0.0.1:1/0")
    monkeypatch.setenv("PACELINE_BLOB_STORES", "redis://:own@127.0.0.1:2/0 redis://:own@127.0.0.1:3/0")
    assert _broker_urls(config()) == [f"redis://:own@127.0.0.1:{port}/0" for port in (1, 2, 3)]


def test_a_store_elsewhere_needs_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_BROKER_URL", raising=False)
    monkeypatch.delenv("PACELINE_BLOB_STORES", raising=False)
    with pytest.raises(
        ConfigError, match=r"broker\.blob_stores 'redis://10\.0\.0\.2/0' is on another machine"
    ):
        _broker_urls(config(broker={"url": URL, "blob_stores": ["redis://10.0.0.2/0"]}))
    with pytest.raises(ConfigError, match=r"broker\.blob_stores 'http:"):
        _broker_urls(config(broker={"url": URL, "blob_stores": ["http://10.0.0.2"]}))


def test_a_file_with_a_stores_password_is_for_its_user_only(tmp_path: Path) -> None:
    data = {"train_files": ["t.parquet"]}
    broker = {"url": "redis://127.0.0.1/0", "blob_stores": [FAR]}
    cfg = config(data=data, broker=broker, trainer={"total_steps": 2, "run_dir": str(tmp_path / "run")})
    run_dir = run_dirs.prepare(cfg).run_dir
    assert (run_dir / run_dirs.START).stat().st_mode & 0o077 == 0


def test_every_learner_rank_is_told_of_the_stores() -> None:
    fields = ("broker_url", "checkpoint_root", "checkpoint_marker", "run_dir", "host", "advertise")
    told = RankRegistration(
        config=config(), checkpoints=("a",), blob_stores=(FAR, NEAR), **dict.fromkeys(fields, "x")
    )
    assert RankRegistration.from_bytes(told.to_bytes()) == told
