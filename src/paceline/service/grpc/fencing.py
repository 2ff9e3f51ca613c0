"""Fencing: members refuse calls from an earlier start of the run's controller.

Every start of a controller has a term, one more than the last in the journal. A member notes the highest that
it has seen, at registration and on every call, and refuses lower ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.errors import ProtocolError
from paceline.service.grpc.connection import TERM_KEY


class TermFence:
    """The highest term that this process has seen."""

    def __init__(self) -> None:
        self.highest = 0

    def note(self, term: int) -> None:
        """Notes the term of a controller.

        Raises:
            ProtocolError: a controller of a later term is known.
        """
        if term < self.highest:
            raise ProtocolError(
                f"the controller's term is {term}, and this member follows the controller of term "
                f"{self.highest}: the earlier controller was replaced and must end"
            )
        self.highest = term

    def check(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Notes the term of a call's metadata; a call without one does not come from a controller.

        Raises:
            ProtocolError: as in `note`, or the term is not a number.
        """
        term = next((value for key, value in metadata or () if key == TERM_KEY), None)
        if term is None:
            return
        try:
            number = int(term)
        except ValueError:
            raise ProtocolError(f"{TERM_KEY} must be a whole number, got {term!r}") from None
        self.note(number)
