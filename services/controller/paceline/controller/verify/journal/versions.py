"""The committed versions of a run: each has one digest; a rollback has the digest of its source.

A version that is committed again after a rewind may have another digest only if its batch differs, or if it
was trained on a GPU, where the same batch need not give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.controller.verify.findings import Findings, JournalEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A committed version, and the digest of the batch that made it; "" for none."""

    entry: JournalEntry
    digest: str
    batch: str


class Versions:
    """Follows commits, rollbacks and rewinds.

    Attributes:
        newest: the last committed version; -1 if there is none.
        repeatable: whether the same batch gives the same weights to the bit.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings, self.repeatable = findings, True
        self._commits: dict[int, Commit] = {}
        self._void: dict[int, Commit] = {}
        self._went_back: dict[int, JournalEntry] = {}
        self.newest = -1

    def digest(self, version: int) -> str | None:
        """Returns the digest of a committed version; None if it was not committed, or is void."""
        commit = self._commits.get(version)
        return None if commit is None else commit.digest

    def check_policy(
        self, policy: str, what: str, entry: JournalEntry, *, of_step: int | None = None
    ) -> None:
        """Notes a breach if `policy` is not the committed one, or that of the weights after `of_step`."""
        version, role = (self.newest, "committed") if of_step is None else (of_step, "the step's policy")
        commit = self._commits.get(version)
        committed = "nothing" if commit is None else f"v{version}@{commit.digest}"
        if policy != committed:
            self._findings.i1(
                f"{what} {policy}, but {committed} is {role}",
                commit.entry if commit is not None else None,
                entry,
            )

    def check_newcomers(self, entry: JournalEntry) -> None:
        """Checks a push to servers that came in mid-step."""
        if entry["version"] != self.newest:
            self._findings.i4(
                f"newcomers got version {entry['version']}, but {self.newest} is committed", entry
            )

    def restart(self) -> None:
        """Notes a restart of the controller, which decides again on a rollback in progress."""
        self._went_back = {v: entry for v, entry in self._went_back.items() if v <= self.newest}

    def roll_back(self, entry: JournalEntry) -> None:
        """Notes a rollback, whose version is committed later."""
        self._went_back[int(entry["step"])] = entry

    def rewind(self, to_step: int) -> None:
        """Makes the versions of later steps void."""
        self._void |= {v: commit for v, commit in self._commits.items() if v > to_step}
        self._commits = {v: commit for v, commit in self._commits.items() if v <= to_step}
        self._went_back = {v: entry for v, entry in self._went_back.items() if v <= to_step}
        self.newest = max(self._commits, default=-1)

    def commit(self, entry: JournalEntry, *, batch: str, due: int) -> None:
        """Checks the commit of a version.

        Args:
            batch: digest of the batch that the version was trained on.
            due: the version that a first commit must have if none was committed yet.
        """
        version, digest = int(entry["version"]), str(entry["digest"])
        earlier, void = self._commits.get(version), self._void.get(version)
        expected = self.newest + 1 if self._commits else due
        if earlier is None and version != expected:
            self._findings.i4(f"version {version} was committed where {expected} is due", entry)
        if earlier is not None and earlier.digest != digest:
            self._findings.i4(
                f"version {version} was committed as {earlier.digest} and as {digest}", earlier.entry, entry
            )
        self._check_rollback(version, digest, entry)
        if void is not None and self.repeatable and void.batch == batch and void.digest != digest:
            self._findings.i4(
                f"version {version} was committed as {void.digest} before a rewind and as {digest} after it, "
                "from the same batch",
                void.entry,
                entry,
            )
        if earlier is None:
            # A long run has many versions, so the names of their servers are left out.
            short = {name: entry.get(name) for name in ("n", "event", "version", "digest")}
            kept = JournalEntry(line=entry.line, event=short)
            self._commits[version] = Commit(entry=kept, digest=digest, batch=batch)
            self.newest = max(self.newest, version)

    def _check_rollback(self, version: int, digest: str, entry: JournalEntry) -> None:
        rollback = self._went_back.get(version)
        source = self._commits.get(int(rollback["to_step"])) if rollback is not None else None
        if rollback is not None and source is not None and source.digest != digest:
            self._findings.i4(
                f"version {version} is a rollback to {rollback['to_step']}, which was committed as "
                f"{source.digest}, but has {digest}",
                rollback,
                entry,
            )
