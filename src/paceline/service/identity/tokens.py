"""Scoped tokens, which permit an outside caller some methods for some days.

    p1.SCOPE.EXPIRY.MAC, with EXPIRY in seconds since 1970 and MAC = HMAC-SHA256(secret, "p1.SCOPE.EXPIRY")

The secret is the run's token, so every service can check a scoped token. If the run gets a new token, all
scoped tokens become invalid.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import time

PACKAGE = "/paceline.rpc.v1."

_FORM = "p1"
_PARTS = 4


class Scope(enum.Enum):
    """What a scoped token is for."""

    REWARD = "reward"
    ATTACH = "attach"
    ENVIRONMENT = "environment"
    STATUS = "status"


# The prefixes of the methods that a scope permits.
_METHODS = {
    Scope.REWARD: ("/paceline.rpc.v1.RewardService/",),
    Scope.ATTACH: ("/paceline.rpc.v1.RewardGateway/", "/paceline.rpc.v1.EnvironmentGateway/"),
    Scope.ENVIRONMENT: ("/paceline.rpc.v1.EnvironmentService/",),
    Scope.STATUS: (
        "/paceline.rpc.v1.ControllerService/GetStatus",
        "/paceline.rpc.v1.ControllerService/Watch",
    ),
}


def mint(secret: str, scope: Scope, *, expires_at: float) -> str:
    """Returns a token for `scope` until `expires_at`, in seconds since 1970."""
    body = f"{_FORM}.{scope.value}.{int(expires_at)}"
    return f"{body}.{_mac(secret, body)}"


def admits(secret: str, given: str, method: str) -> bool:
    """Returns whether `given` is the secret, or an unexpired token for this method that the secret signed.

    Takes the same time wherever `given` differs from the secret.
    """
    if hmac.compare_digest(given.encode(errors="replace"), secret.encode()):
        return True
    parts = given.split(".")
    if len(parts) != _PARTS or parts[0] != _FORM:
        return False
    _, scope, expiry, mac = parts
    if not hmac.compare_digest(mac.encode(errors="replace"), _mac(secret, given.rpartition(".")[0]).encode()):
        return False
    # Signed by the run, so scope and expiry are well formed, unless a later version of Paceline wrote them.
    return _is_open(scope, method) and expiry.isdecimal() and time.time() < int(expiry)


def _is_open(scope: str, method: str) -> bool:
    return any(scope == known.value and method.startswith(prefixes) for known, prefixes in _METHODS.items())


def _mac(secret: str, body: str) -> str:
    digest = hmac.new(secret.encode(), body.encode(errors="replace"), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
