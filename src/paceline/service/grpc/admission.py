"""Who may call what: the run's token or a scoped one, and the roles of a client's certificate."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.service.grpc.connection import TOKEN_KEY, bearer
from paceline.service.identity import tokens
from paceline.service.identity.credentials import HOST_ROLE, server_name

# Orchestrators probe health without a token; the answer says only up or down.
OPEN_METHOD = "/grpc.health.v1.Health/Check"

_MEMBERS = frozenset({"rollout", "learner", "reward"})
_MEMBERS_METHODS = frozenset(
    {"ControllerService/Register", "ControllerService/Heartbeat", "ControllerService/Leave"}
)
_CALLERS: dict[str, frozenset[str] | None] = {
    "ControllerService": frozenset({"client", "controller"}),
    "RolloutService": frozenset({"controller"}),
    "LearnerService": frozenset({"controller"}),
    # Callers of a reward service come from outside, with a token and without a certificate.
    "RewardService": None,
    "RewardGateway": None,
    # A user's own server also asks only for a token.
    "EnvironmentService": None,
    "EnvironmentGateway": None,
}


def token_admits(secret: str, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Returns whether a call's metadata carry a token for the method; an empty secret admits every call."""
    if not secret or method == OPEN_METHOD:
        return True
    given = next((value for key, value in metadata or () if key == TOKEN_KEY), "")
    text = given if isinstance(given, str) else given.decode(errors="replace")
    scheme = bearer("")
    return text.startswith(scheme) and tokens.admits(secret, text.removeprefix(scheme), method)


def callers(method: str) -> frozenset[str] | None:
    """Returns the roles whose certificates permit a method; None if certificates are not checked."""
    if not method.startswith(tokens.PACKAGE):
        return None
    name = method.removeprefix(tokens.PACKAGE)
    if name in _MEMBERS_METHODS:
        return _MEMBERS
    return _CALLERS.get(name.partition("/")[0], frozenset())


def certificate_admits(method: str, names: Iterable[bytes]) -> bool:
    """Returns whether a certificate with these names permits the method; a host's certificate permits all."""
    roles = callers(method)
    if roles is None:
        return True
    return not {server_name(role).encode() for role in (*roles, HOST_ROLE)}.isdisjoint(names)
