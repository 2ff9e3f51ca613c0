"""Folders by path and URL: the operations, the marker, local copies: complete, resumed, bounded."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.config.model import ModelConfig
from paceline.core.errors import ConfigError, ModelError
from paceline.storage import cache, places
from paceline.storage.cache import Fetch, cache_dir, fetch
from paceline.storage.folder import Folder
from paceline.storage.models import local_model
from paceline.storage.places import checkpoints_of, mark, require_marker
from support.s3_server import S3Server, s3_server
from support.sequencer_run import config as run_config


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["path", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> Folder:
    name = f"{tmp_path.name}-{request.param}"
    places = {"path": str(tmp_path / "f"), "memory": f"memory://{name}/f", "s3": f"s3://bucket/{name}/f"}
    return Folder.at(places[request.param])


def test_a_folder_does_the_same_by_path_and_by_url(folder: Folder) -> None:
    assert (folder.names(), folder.folders(), folder.has("a")) == ([], [], False)
    folder.make()
    folder.write("b.json", "two")
    folder.write("a", "one")
    folder.child("step_000002").write("x", "four!")
    folder.child("step_000001").write("x", "three")
    assert folder.names() == ["a", "b.json"]
    assert folder.folders() == ["step_000001", "step_000002"]
    assert folder.tree() == {"a": 3, "b.json": 3, "step_000001/x": 5, "step_000002/x": 5}
    assert (folder.has("a"), folder.has("c"), folder.has("step_000001")) == (True, False, False)
    assert (folder.size("b.json"), folder.read("b.json")) == (3, b"two")
    assert b"".join(folder.chunks("b.json", 1)) == b"wo"
    assert folder.digest("a") == hashlib.blake2b(b"one", digest_size=16).hexdigest()
    folder.write("a", "new")
    assert folder.read("a") == b"new"
    folder.remove("a")
    folder.remove("a")
    folder.child("step_000001").delete()
    folder.child("step_000001").delete()
    assert (folder.names(), folder.folders()) == (["b.json"], ["step_000002"])
    with pytest.raises(FileNotFoundError):
        folder.read("a")


def test_an_unknown_kind_of_url_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"nowhere://x cannot be opened: .*fsspec package is installed"):
        Folder.at("nowhere://x")


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    assert Folder.at(f"file://{tmp_path}").path == tmp_path


def test_the_storages_own_errors_are_oserrors_in_words(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "refuse", "locked/")
    with pytest.raises(ConfigError, match=r"s3://bucket/locked cannot be written .*refused.*checkpoint_url"):
        mark(Folder.at("s3://bucket/locked"))


# --- the marker


def test_a_process_that_sees_the_folder_finds_the_marker(folder: Folder) -> None:
    require_marker(folder, mark(folder), who="learner rank 0")
    assert len(folder.names()) == 1  # the probe of the write is gone


def test_a_rank_that_starts_while_the_controller_is_restarted_finds_the_marker_it_was_told(
    folder: Folder,
) -> None:
    told = mark(folder)
    assert mark(folder) == told
    require_marker(folder, told, who="learner rank 0")


def test_a_process_with_a_folder_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_PATIENCE_S", 0.0)
    text = mark(Folder.at(tmp_path / "controller"))
    own = Folder.at(tmp_path / "own")
    with pytest.raises(ConfigError, match=r"learner rank 3 on \S+ does not find .*own: No such file"):
        require_marker(own, text, who="learner rank 3")
    mark(own)  # of an earlier start
    with pytest.raises(ConfigError, match=r"there is another marker.*set trainer.checkpoint_url to a URL"):
        require_marker(own, text, who="learner rank 3")


def test_a_marker_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    folder = Folder.at(tmp_path / "f")
    timer = threading.Timer(0.3, lambda: folder.write(places._MARKER, "m"))
    began = time.monotonic()
    timer.start()
    require_marker(folder, "m", who="learner rank 1")
    assert time.monotonic() - began >= 0.3
    timer.join()


# --- local copies


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    yield
    for descriptor in cache._in_use.values():
        os.close(descriptor)
    cache._in_use.clear()


@pytest.fixture
def remote(s3: S3Server, tmp_path: Path) -> Folder:
    folder = Folder.at(f"s3://models/{tmp_path.name}")
    folder.write("config.json", "{}")
    folder.write("tokenizer.json", "words")
    folder.write("sub/model.safetensors", "weights" * 100)
    return folder


ROOMY = Fetch(max_bytes=1 << 30)


def test_a_url_is_copied_once(remote: Folder, s3: S3Server) -> None:
    told = list[str]()
    path = fetch(remote, Fetch(max_bytes=1 << 30, tell=told.append))
    assert path.parent == cache_dir()
    assert (path / "sub/model.safetensors").read_text() == "weights" * 100
    assert told == [
        f"copying {remote} to this machine: 0.0 MiB",
        f"{remote} is here: 0.0 MiB",
    ]
    before = s3.gets("model.safetensors")
    assert fetch(remote, ROOMY) == path
    assert s3.gets("model.safetensors") == before


def test_a_model_that_changed_is_copied_anew(remote: Folder) -> None:
    first = fetch(remote, ROOMY)
    remote.write("config.json", "[]")  # of the same size
    second = fetch(remote, ROOMY)
    assert first != second
    assert (second / "config.json").read_text() == "[]"


def test_a_damaged_copy_is_made_again(remote: Folder) -> None:
    path = fetch(remote, ROOMY)
    (path / "config.json").write_text("")
    _forget()
    assert (fetch(remote, ROOMY) / "config.json").read_text() == "{}"


def test_a_copy_that_was_broken_off_goes_on_where_it_was(remote: Folder, s3: S3Server) -> None:
    with pytest.raises(InterruptedError):
        fetch(remote, Fetch(max_bytes=1 << 30, stopped=_after(2)))
    (partial,) = cache_dir().glob("*.partial")
    (partial / "sub").mkdir(exist_ok=True)
    (partial / "sub/model.safetensors").write_text("weights" * 40)
    configs = s3.gets("config.json")
    path = fetch(remote, ROOMY)
    assert (path / "sub/model.safetensors").read_text() == "weights" * 100
    assert s3.gets("config.json") == configs
    assert not partial.exists()


def test_a_copy_is_compared_with_sha256sums(remote: Folder) -> None:
    right = hashlib.sha256(b"words").hexdigest()
    remote.write("SHA256SUMS", f"{right}  tokenizer.json\n{'0' * 64} *config.json\n")
    with pytest.raises(ModelError, match="config.json has the SHA-256 .*, its SHA256SUMS says 0000"):
        fetch(remote, ROOMY)
    remote.write("SHA256SUMS", f"{right}  tokenizer.json\n")
    assert (fetch(remote, ROOMY) / "tokenizer.json").read_text() == "words"


def test_old_copies_make_room_but_not_those_in_use(remote: Folder) -> None:
    bound = Fetch(max_bytes=1500)
    first = fetch(remote, bound)
    remote.write("config.json", "[1]")
    second = fetch(remote, bound)
    remote.write("config.json", "[22]")
    with pytest.raises(ModelError, match=r"has 0.0 MiB, .* has room for 0.0 MiB: .*raise model.cache_gib"):
        fetch(remote, bound)
    _forget()
    os.utime(second / ".complete", (1, 1))
    assert fetch(remote, bound).exists()
    assert (first.exists(), second.exists()) == (True, False)


def test_services_have_paths_of_their_own_and_only_the_learner_copies_weights(
    remote: Folder, tmp_path: Path
) -> None:
    model = ModelConfig.model_validate(
        {"path": str(remote), "tokenizer_path": "/t", "paths": {"reward": "/srv/tokenizer"}}
    )
    rollout, learner = local_model(model, "rollout"), local_model(model, "learner")
    assert sorted(p.name for p in Path(rollout.path).rglob("*.*") if p.is_file()) == [
        ".complete",
        "config.json",
        "tokenizer.json",
    ]
    assert (Path(learner.path) / "sub/model.safetensors").is_file()
    assert (learner.tokenizer_path, rollout.tokenizer_path) == ("/t", "/t")
    reward = local_model(model, "reward")
    assert (reward.path, reward.tokenizer_path) == ("/srv/tokenizer", None)


def test_an_empty_url_names_the_key(s3: S3Server) -> None:
    with pytest.raises(ModelError, match=r"s3://models/none holds no files; correct model.path"):
        fetch(Folder.at("s3://models/none"), ROOMY)


def _forget() -> None:
    """As if the process had ended: its locks are gone."""
    for descriptor in cache._in_use.values():
        os.close(descriptor)
    cache._in_use.clear()


def _after(count: int) -> Callable[[], bool]:
    calls = iter(range(1000))
    return lambda: next(calls) >= count - 1


def test_a_waiting_process_says_what_it_waits_for(remote: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_TELL_EVERY_S", 0.0)
    path = fetch(remote, ROOMY)
    _forget()
    (path / "config.json").unlink()
    told, waited = list[str](), threading.Event()

    def tell(sentence: str) -> None:
        told.append(sentence)
        waited.set()

    with cache._lock(path, cache.fcntl.LOCK_EX):
        thread = threading.Thread(target=lambda: fetch(remote, Fetch(max_bytes=1 << 30, tell=tell)))
        thread.start()
        assert waited.wait(120)
    thread.join(120)
    assert told[0] == f"another process copies {remote} to this machine"
    assert (path / "config.json").is_file()


def test_checkpoints_lie_in_the_run_directory_or_below_the_url(tmp_path: Path) -> None:
    config = run_config()
    assert checkpoints_of(config, tmp_path, "r-1").path == tmp_path / "checkpoints"
    trainer = config.trainer.model_copy(update={"checkpoint_url": "s3://bucket/c/"})
    elsewhere = config.model_copy(update={"trainer": trainer})
    assert str(checkpoints_of(elsewhere, tmp_path, "r-1")) == "s3://bucket/c/r-1"
    (tmp_path / "run.id").write_text("r-2\n")
    assert str(checkpoints_of(elsewhere, tmp_path)) == "s3://bucket/c/r-2"
