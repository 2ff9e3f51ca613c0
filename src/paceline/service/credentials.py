"""What a process proves to its peers and whom it trusts: the run's token and its TLS files.

PACELINE_TOKEN holds the token, or PACELINE_TOKEN_FILE names a file with it. PACELINE_TLS_DIR names a
folder with `ca.pem`, `cert.pem` and `key.pem`, as `paceline certs issue` writes it; the files are read again
when they change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import grpc

from paceline.core.errors import ConfigError, EnvironmentLackError

TOKEN = "PACELINE_TOKEN"
REWARD_TOKEN = "PACELINE_REWARD_TOKEN"
TLS_DIR = "PACELINE_TLS_DIR"
INSECURE = "PACELINE_INSECURE"
FILE_SUFFIX = "_FILE"

CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"
_SERVER_DOMAIN = "paceline"

Stamp = tuple[tuple[int, int, int], ...]
"""Says whether files have changed: inode, size and time of each."""


def server_name(role: str) -> str:
    """The name in the certificate of every server of a role: clients ask for it, wherever the server runs."""
    return f"{role}.{_SERVER_DOMAIN}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The TLS files of a process."""

    folder: Path

    def stamp(self) -> Stamp:
        """Differs as soon as a file is another.

        Raises:
            EnvironmentLackError: a file is missing.
        """
        stamps = []
        for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
            try:
                status = (self.folder / name).stat()
            except OSError as error:
                raise self._unreadable(name, error) from error
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(stamps)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client, from the files as they are now.

        Raises:
            EnvironmentLackError: a file cannot be read.
        """
        return grpc.ssl_channel_credentials(
            self._read(CA_FILE), self._read(KEY_FILE), self._read(CERTIFICATE_FILE)
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that asks every client for a certificate; each new connection gets the files of then.

        Raises:
            EnvironmentLackError: a file cannot be read.
        """
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            _Reload(self, self.stamp()),  # type: ignore[arg-type]  # the stub does not know None for "no change"
            require_client_authentication=True,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = self._read(KEY_FILE), self._read(CERTIFICATE_FILE)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=self._read(CA_FILE))

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: OSError) -> EnvironmentLackError:
        return EnvironmentLackError(
            f"{TLS_DIR}={self.folder}: {name} cannot be read ({error.strerror}); write the three files with "
            "`paceline certs issue`, readable for the user of this process"
        )


class _Reload:
    """Called by gRPC, in a thread of its own, before each handshake: the new files, or None for no change."""

    def __init__(self, files: TlsFiles, stamp: Stamp) -> None:
        self._files, self._stamp = files, stamp

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return None
            configuration = self._files._configuration()
        except EnvironmentLackError:
            return None  # amid a replacement: the old files serve until the new ones are complete
        self._stamp = stamp
        return configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """What a process proves and trusts; without token and TLS it may talk on loopback only.

    Attributes:
        token: what every call carries and must carry.
        tls: the files for TLS, with which every client needs a certificate too.
        insecure: whether plain text beyond loopback is wanted, as `service.insecure` says.
    """

    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None
    insecure: bool = False

    @classmethod
    def from_env(cls, token: str = TOKEN, *, environ: Mapping[str, str] | None = None) -> Self:
        """Reads this process's credentials; `token` names the variable with the token.

        Raises:
            ConfigError: a file that a variable names cannot be read or is empty.
        """
        environ = os.environ if environ is None else environ
        folder = environ.get(TLS_DIR)
        return cls(
            token=secret(token, environ),
            tls=TlsFiles(Path(folder)) if folder else None,
            insecure=environ.get(INSECURE) == "1",
        )

    def with_token(self, token: str) -> Self:
        """The same with another token."""
        return replace(self, token=token)


def secret(variable: str, environ: Mapping[str, str]) -> str:
    """A secret from a variable, or from the file that VARIABLE_FILE names; "" without either.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    value, path = environ.get(variable, ""), environ.get(variable + FILE_SUFFIX, "")
    if value or not path:
        return value
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{variable}{FILE_SUFFIX}={path} cannot be read: {error}") from error
    if not value:
        raise ConfigError(f"{variable}{FILE_SUFFIX}={path} is empty: write the secret into it")
    return value
