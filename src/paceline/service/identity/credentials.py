"""A process's credentials and trust: the run's token and its TLS files.

PACELINE_TOKEN holds the token, or PACELINE_TOKEN_FILE names a file with it. PACELINE_TLS_DIR names a
folder with `ca.pem`, `cert.pem` and `key.pem`, as `paceline certs issue` writes it; the files are read again
when they change. A caller from outside that has only a token needs only `ca.pem` there.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import grpc

from paceline.core.errors import ConfigError, EnvironmentLackError

TOKEN = "PACELINE_TOKEN"
REWARD_TOKEN = "PACELINE_REWARD_TOKEN"
ENVIRONMENT_TOKEN = "PACELINE_ENVIRONMENT_TOKEN"
TLS_DIR = "PACELINE_TLS_DIR"
INSECURE = "PACELINE_INSECURE"
FILE_SUFFIX = "_FILE"

CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"
_TRUST_ALONE = (CA_FILE,)
_SERVER_DOMAIN = "paceline"
# The role of a certificate that all services of a machine share, as under `paceline train`.
HOST_ROLE = "host"

Stamp = tuple[tuple[int, int, int], ...]
"""Says whether files have changed: inode, size and time of each."""


def server_name(role: str) -> str:
    """Returns the name that clients require in the certificate of every server of a role, on any host."""
    return f"{role}.{_SERVER_DOMAIN}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The folder with a process's TLS files."""

    folder: Path

    def stamp(self) -> Stamp:
        """Returns a value that changes as soon as a file is replaced.

        Raises:
            EnvironmentLackError: a file is missing.
        """
        stamps = []
        for name in self._names():
            try:
                status = (self.folder / name).stat()
            except OSError as error:
                raise self._unusable(name, error) from error
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(stamps)

    def read(self) -> TlsIdentity:
        """Returns the current content of the files.

        Raises:
            EnvironmentLackError: a file cannot be read, or the key does not belong to the certificate.
        """
        contents, names = [], self._names()
        for name in names:
            try:
                contents.append((self.folder / name).read_bytes())
            except OSError as error:
                raise self._unusable(name, error) from error
        if names == _TRUST_ALONE:
            return TlsIdentity(*contents)
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_cert_chain(self.folder / CERTIFICATE_FILE, self.folder / KEY_FILE)
        except (OSError, ValueError) as error:
            raise self._unusable(f"{CERTIFICATE_FILE} with {KEY_FILE}", error) from error
        return TlsIdentity(*contents)

    def _names(self) -> tuple[str, ...]:
        proves = any((self.folder / name).exists() for name in (CERTIFICATE_FILE, KEY_FILE))
        return (CA_FILE, CERTIFICATE_FILE, KEY_FILE) if proves else _TRUST_ALONE

    def _unusable(self, name: str, error: Exception) -> EnvironmentLackError:
        return EnvironmentLackError(
            f"{TLS_DIR}={self.folder}: {name} cannot be used ({error}); write the three files with "
            "`paceline certs issue`, readable for the user of this process"
        )


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The contents of TLS files in PEM: the trusted authority, and a certificate with its key, if any."""

    ca: bytes
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    def for_channel(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a client's channel."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        """Returns the certificates that a server presents and trusts.

        Raises:
            EnvironmentLackError: there is no certificate.
        """
        if self.certificate is None or self.key is None:
            raise EnvironmentLackError(
                f"{TLS_DIR} has {CA_FILE} alone, which is for callers: a server needs the {CERTIFICATE_FILE} "
                f"and {KEY_FILE} that `paceline certs issue` writes"
            )
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.ca)


class LatestTls:
    """Reads TLS files again when they have changed.

    Raises:
        EnvironmentLackError: the files cannot be used at first.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files, self._stamp = files, files.stamp()
        self.identity = files.read()

    def changed(self) -> bool:
        """Reloads `identity` if the files have changed; returns whether it did. Ignores partial changes."""
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return False
            identity = self._files.read()
            if self._files.stamp() != stamp:
                return False
        except EnvironmentLackError:
            return False
        self._stamp, self.identity = stamp, identity
        return True


def server_credentials(files: TlsFiles, *, asks_callers: bool) -> grpc.ServerCredentials:
    """Returns credentials for a server; each new connection uses the current files.

    `asks_callers`: every caller must have a certificate of the same authority.

    Raises:
        EnvironmentLackError: the files cannot be used.
    """
    latest = LatestTls(files)

    def reload() -> grpc.ServerCertificateConfiguration | None:
        return latest.identity.for_server() if latest.changed() else None

    return grpc.dynamic_ssl_server_credentials(
        latest.identity.for_server(),
        reload,  # type: ignore[arg-type]  # the stub does not know None, which means no change
        require_client_authentication=asks_callers,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """What a process trusts and how it proves its identity; without token and TLS, only loopback is allowed.

    Attributes:
        token: the token that outgoing calls carry and incoming calls must carry.
        tls: the files for TLS, with which every client needs a certificate too.
        insecure: whether plain text beyond loopback is allowed (`service.insecure`).
        asks_callers: whether a server over TLS asks every caller for a certificate.
    """

    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None
    insecure: bool = False
    asks_callers: bool = True

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

    def for_outside_callers(self) -> Self:
        """Returns the credentials of a reward service: its callers present a token, no certificate."""
        return replace(self, asks_callers=False)

    def for_own_machine(self) -> Self:
        """Returns credentials for calls to an address of this machine, which do not leave it."""
        return replace(self, insecure=True)

    def with_token(self, token: str | None) -> Self:
        """Returns the same credentials with another token; unchanged with None."""
        return self if token is None else replace(self, token=token)

    def with_token_file(self, path: str | None, *, setting: str, place: str) -> Self:
        """Returns the same credentials with the token in a file; unchanged without a file.

        Args:
            setting: names the file's setting in the error.
            place: where the file has to be, for the error.

        Raises:
            ConfigError: the file cannot be read.
        """
        if path is None:
            return self
        try:
            return self.with_token(Path(path).read_text(encoding="utf-8").strip())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting} cannot be read ({error}); it must be {place}") from error


def secret(variable: str, environ: Mapping[str, str]) -> str:
    """Returns a secret from a variable, or from the file that VARIABLE_FILE names; "" without either.

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
