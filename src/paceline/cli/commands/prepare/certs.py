"""`paceline certs`: the certificates of a run's services, and tokens for callers from outside."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path

from paceline.broker.address import REDIS_PASSWORD
from paceline.broker.redis.redis_acl import acl_line
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.service.identity.credentials import TLS_DIR, TOKEN, Credentials, secret
from paceline.service.identity.tokens import Scope, mint

_DAY_S = 86_400
_DAYS = {"init": 365.0, "issue": 30.0, "renew": 30.0, "token": 7.0, "acl": 7.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "action",
        choices=tuple(_DAYS),
        help="init: make a certificate authority in DIR, or keep the one that is there; issue: write a "
        f"certificate for NAME into DIR/NAME, for {TLS_DIR}; renew: replace what is missing or past half "
        f"of its lifetime (the authority; certificates of all services, of Redis and of each NAME; Redis' "
        f"users.acl); token: print a token for a caller from outside, signed with {TOKEN}; acl: print the "
        f"line for the run's user in Redis' ACL file, with the hash of {REDIS_PASSWORD}",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="folder of the certificate authority"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="name of a service, such as rollout-0")
    parser.add_argument("--role", help="issue: role of the service (default: what NAME begins with)")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="issue: a further name or address of the server, for clients other than Paceline's; renew: the "
        "name or address at which clients reach Redis",
    )
    parser.add_argument(
        "--scope", choices=[scope.value for scope in Scope], help="token: what the caller may do"
    )
    parser.add_argument(
        "--days", type=float, help="days of validity (default: 30; 7 for a token; 365 for the authority)"
    )


def run(args: argparse.Namespace) -> int:
    """Carries out the action that the arguments name."""
    days = _DAYS[args.action] if args.days is None else args.days
    if importlib.util.find_spec("cryptography") is None:
        raise EnvironmentLackError("paceline certs needs cryptography: pip install cryptography")
    if days <= 0:
        raise ConfigError(f"--days must be above 0, got {days:g}")
    if args.action == "acl":
        print(_acl())
        return 0
    if args.action == "token":
        print(_token(args, days))
        return 0
    if args.folder is None:
        raise ConfigError(f"paceline certs {args.action} needs DIR, the folder of the authority")
    if args.action == "init":
        return _init(args.folder, days)
    return _renew(args, days) if args.action == "renew" else _issue(args, days)


def _token(args: argparse.Namespace, days: float) -> str:
    signing_key = Credentials.from_env().token
    if not signing_key or args.scope is None:
        raise ConfigError(
            f"paceline certs token needs --scope, and the token of the services that will accept it in "
            f"{TOKEN} or {TOKEN}_FILE"
        )
    return mint(signing_key, Scope(args.scope), expires_at=time.time() + days * _DAY_S)


def _acl() -> str:
    password = secret(REDIS_PASSWORD, os.environ)
    if not password:
        raise ConfigError(f"paceline certs acl needs {REDIS_PASSWORD}_FILE, a file with the user's password")
    return acl_line("paceline", password)


def _init(folder: Path, days: float) -> int:
    from paceline.cli import certificates

    if (folder / certificates.CA_KEY_FILE).exists():
        authority = certificates.Authority.load(folder)
        print(
            f"{folder} keeps its authority, valid until {authority.certificate.not_valid_after_utc:%F %R} UTC"
        )
        return 0
    authority = certificates.Authority.create(folder, days=days)
    print(
        f"{folder}: authority, valid until {authority.certificate.not_valid_after_utc:%F %R} UTC; store "
        f"{certificates.CA_KEY_FILE} on a machine that runs no service"
    )
    return 0


def _issue(args: argparse.Namespace, days: float) -> int:
    from paceline.cli import certificates

    name = args.names[0] if len(args.names) == 1 else " ".join(args.names)
    if not name or os.sep in name or name.startswith(".") or " " in name:
        raise ConfigError(f"paceline certs issue DIR NAME needs a plain name, got {name!r}")
    role = args.role or certificates.role_of(name)
    if role not in certificates.ROLES:
        raise ConfigError(f"--role {role} is none of {', '.join(certificates.ROLES)}")
    authority = certificates.Authority.load(args.folder)
    folder = args.folder / name
    issued = authority.issue(folder, name, role=role, hosts=args.host, days=days)
    print(f"{TLS_DIR}={folder}: {role}, valid until {issued.not_valid_after_utc:%F %R} UTC")
    return 0


def _renew(args: argparse.Namespace, days: float) -> int:
    from paceline.cli import certificates

    _init(args.folder, _DAYS["init"])
    names = (*certificates.OF_A_RUN, *args.names)
    for line in certificates.renew(args.folder, names, redis_hosts=args.host, days=days):
        print(line)
    certificates.write_users(args.folder / "redis", _acl())
    return 0
