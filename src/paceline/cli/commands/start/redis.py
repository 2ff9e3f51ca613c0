"""`paceline redis`: serves Redis over TLS, with a user for the run, to services on several hosts."""

from __future__ import annotations

import argparse
import secrets
import signal
import subprocess
from pathlib import Path

import redis

from paceline.broker.address import REDIS_PASSWORD
from paceline.broker.redis.redis_acl import acl_line, renewer_line
from paceline.broker.redis.redis_server import dying_with_parent, find_tls_server
from paceline.cli import certificates
from paceline.core.errors import ConfigError, PacelineError
from paceline.service.addresses import is_wildcard, join, to_bind
from paceline.service.identity.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from paceline.service.process import write_atomically

_PASSWORD_FILE = "redis_password"
_RENEWER = "renewer"
# Short compared with half of a certificate's lifetime.
_LOOKS_EVERY_S = 3600.0
_ANSWERS_WITHIN_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder of the certificate authority; missing files (authority, password, data) are created "
        "there",
    )
    parser.add_argument(
        "--host", required=True, help="address at which services reach this machine, or its network interface"
    )
    parser.add_argument("--port", type=int, default=6380, help="port to listen on (default: 6380)")
    parser.add_argument(
        "--max-memory",
        default="4gb",
        help="memory for the step in progress (default: 4gb); writers wait when it is full",
    )
    parser.add_argument(
        "--blob-store",
        action="store_true",
        help="keep nothing on disk, and only hold the trajectories of servers on this host; DIR is a copy of "
        "the broker's",
    )


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it; returns the server's exit code."""
    address = to_bind(args.host)
    if is_wildcard(address):
        raise ConfigError(f"--host {args.host}: give one address; clients check it against the certificate")
    binary, folder = find_tls_server(), args.folder.absolute()
    if not (folder / certificates.CA_KEY_FILE).exists():
        certificates.Authority.create(folder, days=certificates.AUTHORITY_DAYS)
    password_file = folder / _PASSWORD_FILE
    if not password_file.exists():
        write_atomically(password_file, secrets.token_urlsafe(32), mode=0o600)
    certificates.renew(folder, ["redis"], redis_hosts=[address])
    renewer = secrets.token_urlsafe(32)
    password = password_file.read_text(encoding="utf-8").strip()
    users = acl_line("paceline", password), renewer_line(_RENEWER, renewer)
    certificates.write_users(folder / "redis", *users)
    (folder / "redis-data").mkdir(exist_ok=True)
    is_durable = not args.blob_store
    command = [str(binary), *_options(folder, address, args.port, args.max_memory, is_durable=is_durable)]
    server = subprocess.Popen(dying_with_parent(command))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.terminate())
    print(f"{REDIS_PASSWORD}_FILE={password_file}", flush=True)
    url = f"rediss://paceline@{join(address, args.port)}/0"
    print(f"broker.url={url}" if is_durable else f"broker.blob_stores=[{url}]", flush=True)
    try:
        return _tend(server, folder, address, args.port, renewer)
    finally:
        server.terminate()


def _options(folder: Path, address: str, port: int, max_memory: str, *, is_durable: bool) -> list[str]:
    files = folder / "redis"
    kept = ["--appendonly", "yes", "--appendfsync", "everysec"] if is_durable else ["--appendonly", "no"]
    return [
        "--bind", address, "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "yes",
        "--tls-ca-cert-file", str(files / CA_FILE), "--tls-cert-file", str(files / CERTIFICATE_FILE),
        "--tls-key-file", str(files / KEY_FILE), "--aclfile", str(files / "users.acl"),
        "--dir", str(folder / "redis-data"), *kept, "--save", "",
        "--maxmemory", max_memory, "--maxmemory-policy", "noeviction",
    ]  # fmt: skip


def _tend(server: subprocess.Popen[bytes], folder: Path, address: str, port: int, password: str) -> int:
    """Renews the server's certificate whenever half of its lifetime is over, until the server ends.

    A failure is printed and retried at the next check, because the run has no other server.
    """
    files = [folder / "redis" / name for name in (CERTIFICATE_FILE, CA_FILE)]
    served: list[int] = []
    while True:
        try:
            code = server.wait(_LOOKS_EVERY_S)
        except subprocess.TimeoutExpired:
            try:
                served = served or [file.stat().st_mtime_ns for file in files]
                certificates.renew(folder, ["redis"], redis_hosts=[address])
                issued = [file.stat().st_mtime_ns for file in files]
                if issued != served:
                    _reload(folder, address, port, password)
                    served = issued
            except (OSError, PacelineError, redis.RedisError) as error:
                print(f"Redis keeps its old certificate until the next try: {error}", flush=True)
        else:
            return 128 - code if code < 0 else code


def _reload(folder: Path, address: str, port: int, password: str) -> None:
    """Makes the server read its files again; connections stay open."""
    files = folder / "redis"
    with redis.Redis(
        host=address.strip("[]"),
        port=port,
        username=_RENEWER,
        password=password,
        ssl=True,
        ssl_ca_certs=str(files / CA_FILE),
        ssl_certfile=str(files / CERTIFICATE_FILE),
        ssl_keyfile=str(files / KEY_FILE),
        socket_connect_timeout=_ANSWERS_WITHIN_S,
        socket_timeout=_ANSWERS_WITHIN_S,
    ) as client:
        client.config_set("tls-cert-file", str(files / CERTIFICATE_FILE))
