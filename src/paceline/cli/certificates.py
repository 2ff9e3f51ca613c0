"""A run's own certificate authority, which issues short-lived certificates to services and people.

DIR/ca.pem, DIR/ca.key               the authority; the key signs, and no service needs it
DIR/next.key                         the next authority's key, while the old one still signs (ca.pem has both)
DIR/NAME/{ca,cert,key}.pem           files of the service NAME; its PACELINE_TLS_DIR points here

An authority is replaced while the run goes on. After half of its lifetime everybody also trusts a second one.
After three quarters the second one signs; by then everybody knows it. The first is dropped when it has
expired.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.service.identity.credentials import CA_FILE, CERTIFICATE_FILE, HOST_ROLE, KEY_FILE, server_name
from paceline.service.process import write_atomically

_SERVICES = ("controller", "rollout", "learner", "reward")
ROLES = (*_SERVICES, HOST_ROLE, "client", "redis")
CA_KEY_FILE, NEXT_KEY_FILE = "ca.key", "next.key"
ISSUED_DAYS = 30.0
AUTHORITY_DAYS = 365.0
OF_A_RUN = (*_SERVICES, "client", "redis")
"""Names for which certificates are issued: the services of a run and their callers."""

# Nobody can log in as `default`. But Redis loads its append-only file with that user's permissions, and drops
# each transaction that they do not allow.
_DEFAULT_USER = "user default off resetpass allkeys allchannels +@all"

_SECRET_MODE = 0o600
# Clocks of other machines may be behind.
_CLOCK_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates with `key`, which belongs to `certificate`; everyone trusts that certificate."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    trusted: tuple[x509.Certificate, ...]

    @classmethod
    def create(cls, folder: Path, *, days: float) -> Authority:
        """Makes an authority and writes its two files.

        Raises:
            ConfigError: the folder has one already, or cannot be written.
        """
        if (folder / CA_KEY_FILE).exists():
            raise ConfigError(
                f"{folder} has a certificate authority already: give another folder, or delete its {CA_FILE} "
                f"and {CA_KEY_FILE}, after which every certificate has to be issued again"
            )
        (folder / NEXT_KEY_FILE).unlink(missing_ok=True)
        key, certificate = _new_authority(datetime.timedelta(days=days))
        _write(folder / CA_KEY_FILE, _key_pem(key), secret=True)
        _write(folder / CA_FILE, _pem(certificate))
        return cls(certificate, key, (certificate,))

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Reads a certificate authority from its folder.

        Raises:
            EnvironmentLackError: there is none in the folder, or its files are damaged.
        """
        try:
            trusted = tuple(x509.load_pem_x509_certificates((folder / CA_FILE).read_bytes()))
            key = serialization.load_pem_private_key((folder / CA_KEY_FILE).read_bytes(), password=None)
        except (OSError, ValueError) as error:
            raise EnvironmentLackError(
                f"{folder} has no certificate authority ({error}): run `paceline certs init {folder}` first"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise EnvironmentLackError(
                f"{folder / CA_KEY_FILE} is not an elliptic-curve key: make a new authority"
            )
        certificate = _of_key(key, trusted)
        if certificate is None:
            raise EnvironmentLackError(
                f"{folder / CA_KEY_FILE} is not the key of a certificate in {CA_FILE}: delete it, and run "
                f"`paceline certs init {folder}`, after which every certificate has to be issued again"
            )
        return cls(certificate, key, trusted)

    @classmethod
    def of_today(cls, folder: Path) -> Authority:
        """Reads the authority, and creates its successor or switches to it when the time has come.

        Raises:
            ConfigError, EnvironmentLackError: as in `load`, or the folder cannot be written.
        """
        authority = cls.load(folder)
        begun, end, now = authority.certificate.not_valid_before_utc, authority.end, _now()
        days, trusted = end - begun, [each for each in authority.trusted if each.not_valid_after_utc > now]
        if now < begun + days / 2:
            return authority._trusting(folder, trusted)
        successor = _of_key(_key_in(folder / NEXT_KEY_FILE), trusted)
        if successor is None:
            key, successor = _new_authority(days - _CLOCK_SKEW)
            _write(folder / NEXT_KEY_FILE, _key_pem(key), secret=True)
            trusted.append(successor)
        authority = authority._trusting(folder, trusted)
        # If the successor was made late, certificates signed by the old authority may end before the quarter
        # is over.
        if now < min(successor.not_valid_before_utc + _CLOCK_SKEW + days / 4, end - days / 8):
            return authority
        (folder / NEXT_KEY_FILE).replace(folder / CA_KEY_FILE)
        return cls.load(folder)

    @property
    def end(self) -> datetime.datetime:
        """When the authority's certificate expires."""
        return self.certificate.not_valid_after_utc

    def _trusting(self, folder: Path, trusted: Sequence[x509.Certificate]) -> Authority:
        """Returns the same authority with these certificates in its file."""
        if tuple(trusted) != self.trusted:
            _write(folder / CA_FILE, "".join(map(_pem, trusted)))
        return replace(self, trusted=tuple(trusted))

    def issue(
        self, folder: Path, name: str, *, role: str, hosts: Sequence[str] = (), days: float = ISSUED_DAYS
    ) -> x509.Certificate:
        """Writes ca.pem, cert.pem and key.pem for a process into `folder`, each replaced at once.

        Args:
            folder: folder of the process; only this user can read the key.
            role: checked by Paceline's clients, so that a server may run anywhere. A host has all roles.
            hosts: further names and addresses, for clients that check those (Redis clients, for example).
            days: how long the certificate is valid, at most as long as the authority.

        Raises:
            ConfigError: a host is not a valid name or address, or a folder cannot be written.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, name),
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            ]
        )
        roles = (*_SERVICES, HOST_ROLE) if role == HOST_ROLE else (role,)
        names = [*(x509.DNSName(server_name(each)) for each in roles), *map(_general_name, hosts)]
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role != "client":
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = _builder(
            subject, self.certificate.subject, key.public_key(), datetime.timedelta(days=days), self.end
        )
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .sign(self.key, hashes.SHA256())
        )
        _write(folder / KEY_FILE, _key_pem(key), secret=True)
        _write(folder / CERTIFICATE_FILE, _pem(certificate))
        _write(folder / CA_FILE, "".join(map(_pem, self.trusted)))
        return certificate


def is_fresh(authority: Authority, folder: Path, hosts: Sequence[str]) -> bool:
    """Returns whether a folder has a certificate for these hosts with over half of its lifetime left."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes())
        if not any(_has_signed(issuer, certificate) for issuer in authority.trusted):
            return False
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        key_is_there = (folder / KEY_FILE).exists() and (folder / CA_FILE).exists()
    except (OSError, ValueError):
        return False
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    half_is_over = _now() > start + (end - start) / 2
    return key_is_there and not half_is_over and set(map(_general_name, hosts)) <= set(names)


def renew(
    folder: Path, names: Sequence[str], *, redis_hosts: Sequence[str] = (), days: float = ISSUED_DAYS
) -> list[str]:
    """Issues certificates into folder/NAME for names that have none, or one past half of its lifetime.

    When a new authority is about to follow, the CA file in every folder is updated.

    Returns:
        A sentence for each name.

    Raises:
        ConfigError, EnvironmentLackError: as in `role_of` and `Authority.issue`.
    """
    authority, said = Authority.of_today(folder), []
    if len(authority.trusted) > 1:
        last = max(each.not_valid_after_utc for each in authority.trusted)
        said.append(f"{folder}: the next authority is trusted besides this one, until {last:%F %R} UTC")
    for name in dict.fromkeys(names):
        hosts = redis_hosts if name == "redis" else ()
        if is_fresh(authority, folder / name, hosts):
            said.append(f"{name} keeps its certificate")
            continue
        issued = authority.issue(folder / name, name, role=role_of(name), hosts=hosts, days=days)
        said.append(f"{name}: valid until {issued.not_valid_after_utc:%F %R} UTC")
    bundle = "".join(map(_pem, authority.trusted))
    for path in folder.glob(f"*/{CA_FILE}"):
        if path.read_text(encoding="ascii") != bundle:
            _write(path, bundle)
    return said


def write_users(folder: Path, *lines: str) -> None:
    """Writes users.acl, Redis' file of users: `lines` and the user `default`, which is disabled.

    A Redis server that does not run as the file's owner must be in its group.
    """
    write_atomically(folder / "users.acl", "\n".join((_DEFAULT_USER, *lines, "")), mode=0o640)


def role_of(name: str) -> str:
    """Returns the role that a name begins with: rollout-0 is a rollout server.

    Raises:
        ConfigError: the name begins with no role.
    """
    role = name.partition("-")[0]
    if role not in ROLES:
        raise ConfigError(f"{name!r} does not begin with a role: give --role, one of {', '.join(ROLES)}")
    return role


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if host.endswith(f".{server_name('')[1:]}"):
        raise ConfigError(f"--host {host} is the name of a role, which only --role gives")
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"--host {host!r} is neither an address nor a name: {error}") from error


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _new_authority(days: datetime.timedelta) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Paceline run authority")])
    builder = _builder(name, name, key.public_key(), days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    return key, builder.add_extension(_usage(signs=True), critical=True).sign(key, hashes.SHA256())


def _key_in(path: Path) -> ec.EllipticCurvePrivateKey | None:
    """Returns the key in a file; None if there is none."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _of_key(
    key: ec.EllipticCurvePrivateKey | None, certificates: Sequence[x509.Certificate]
) -> x509.Certificate | None:
    public = key and key.public_key()
    return next((each for each in certificates if each.public_key() == public), None)


def _has_signed(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: datetime.timedelta,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = _now()
    end = now + days
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _CLOCK_SKEW)
        .not_valid_after(min(end, latest) if latest else end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def _write(path: Path, text: str, *, secret: bool = False) -> None:
    try:
        write_atomically(path, text, mode=_SECRET_MODE if secret else 0o644)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another folder") from error
