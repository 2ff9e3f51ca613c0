"""A checkpoint's files: torch's readers and writers, and sizes and digests.

These are measured when a file is written, and checked before it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from paceline.core.errors import CheckpointError
from paceline.storage.folder import Folder, reason


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file as it was written; `digest` is BLAKE2b with 16 bytes, in hexadecimal."""

    size: int
    digest: str

    def to_plain(self) -> dict[str, Any]:
        """Returns the record as the manifest holds it."""
        return {"size": self.size, "blake2b": self.digest}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> FileRecord:
        """Reads the record that `to_plain` wrote."""
        return cls(size=int(plain["size"]), digest=str(plain["blake2b"]))


def writer(folder: Folder) -> FileSystemWriter:
    """Writes one file per rank, and the metadata.

    Listings are not cached: other hosts write, too.
    """
    if folder.is_local:
        return FileSystemWriter(folder.path)
    # An object store has nothing to sync: a file is there when it is closed.
    return FsspecWriter(folder.address, sync_files=False, use_listings_cache=False)


def reader(folder: Folder) -> FileSystemReader:
    """Reads the parts of files that a rank needs."""
    if folder.is_local:
        return FileSystemReader(folder.path)
    return FsspecReader(folder.address, use_listings_cache=False)


def measure(folder: Folder, name: str) -> FileRecord:
    """Reads the file; raises OSError if it cannot be read."""
    return FileRecord(size=folder.size(name), digest=folder.digest(name))


def check(folder: Folder, files: Mapping[str, FileRecord], names: Iterable[str]) -> None:
    """Compares files with their records.

    Raises:
        CheckpointError: a file is missing or has changed; the message names the first.
    """
    for name in names:
        path, record = f"{folder}/{name}", files[name]
        try:
            # The cheap test first: a torn file need not be read.
            size = folder.size(name)
            measured = measure(folder, name) if size == record.size else FileRecord(size=size, digest="")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
        if size != record.size:
            raise CheckpointError(f"{path} has {size} bytes, {record.size} were written")
        if measured != record:
            raise CheckpointError(
                f"{path} has changed: its digest is {measured.digest}, {record.digest} was written"
            )


def share(files: Mapping[str, FileRecord], rank: int, world_size: int) -> list[str]:
    """Returns the files that a rank checks: together the ranks check all, each about as many bytes."""
    loads, names = [0] * world_size, list[str]()
    for name, record in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += record.size
        if lightest == rank:
            names.append(name)
    return names
