"""torch's readers and writers of shards, for a path or for a URL."""

from __future__ import annotations

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from paceline.storage.folder import Folder


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
    return (
        FileSystemReader(folder.path)
        if folder.is_local
        else FsspecReader(folder.address, use_listings_cache=False)
    )
