"""Reads and writes folders of checkpoints and models by path or fsspec URL.

A file in an object store appears with all of its bytes or not at all, and cannot be renamed. A set of files
is complete when the file that is written last exists.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.service.process import write_atomically

Place = str | Path
"""A path, or a URL that fsspec knows."""

_CHUNK_BYTES = 1 << 22
_FILE_SCHEME = "file://"


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, which need not exist.

    Methods raise OSError instead of the storage library's own errors.

    Attributes:
        address: an absolute path, or a URL.
    """

    address: str

    @classmethod
    def at(cls, place: Place) -> Folder:
        """Returns the folder of a path or URL.

        Raises:
            ConfigError: fsspec does not know the URL's scheme, or the package for it is not installed.
        """
        text = str(place).removeprefix(_FILE_SCHEME)
        if not is_url(text):
            return cls(os.path.abspath(text))
        folder = cls(text.rstrip("/"))
        folder._check_kind()
        return folder

    @property
    def is_local(self) -> bool:
        """Whether the address is a path."""
        return not is_url(self.address)

    @property
    def path(self) -> Path:
        """The path of a local folder."""
        assert self.is_local, self.address
        return Path(self.address)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.rpartition("/")[2]

    def child(self, name: str) -> Folder:
        """Returns a folder inside this folder."""
        return Folder(f"{self.address.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.address

    # --- files

    def has(self, name: str) -> bool:
        """Returns whether there is a file of this name."""
        with _storage_errors():
            return bool(self._fs.isfile(self._path(name)))

    def size(self, name: str) -> int:
        """Returns the size of a file in bytes."""
        with _storage_errors():
            return int(self._fs.size(self._path(name)))

    def read(self, name: str) -> bytes:
        """Reads a small file completely."""
        with _storage_errors():
            return bytes(self._fs.cat_file(self._path(name)))

    def chunks(self, name: str, start: int = 0) -> Iterator[bytes]:
        """Yields a file's bytes from `start` on."""
        with _storage_errors(), self._fs.open(self._path(name), "rb") as file:
            file.seek(start)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def digest(self, name: str) -> str:
        """Returns the 16-byte BLAKE2b digest of a file, in hexadecimal."""
        digest = hashlib.blake2b(digest_size=16)
        for chunk in self.chunks(name):
            digest.update(chunk)
        return digest.hexdigest()

    def write(self, name: str, text: str) -> None:
        """Writes a small file; readers never see part of it."""
        if self.is_local:
            write_atomically(self.path / name, text)
            return
        with _storage_errors():
            self._fs.pipe_file(self._path(name), text.encode())

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with _storage_errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    # --- the folder

    def names(self) -> list[str]:
        """Returns the names of its files, sorted; none if the folder does not exist."""
        return self._list("file")

    def folders(self) -> list[str]:
        """Returns the names of its subfolders, sorted; none if the folder does not exist."""
        return self._list("directory")

    def tree(self) -> dict[str, int]:
        """Returns the sizes of all files in the folder and its subfolders, by relative path."""
        with _storage_errors():
            fs, root = _open(self.address)
            entries = fs.find(root, detail=True)
            return {path[len(root) + 1 :]: int(entry["size"]) for path, entry in entries.items()}

    def fingerprint(self, name: str) -> str:
        """Returns a string that changes with the file if possible: its ETag or modification time."""
        with _storage_errors():
            return str(self._fs.ukey(self._path(name)))

    def make(self) -> None:
        """Makes the folder, if the storage has folders."""
        with _storage_errors():
            if self.is_local:
                self._fs.makedirs(self.address, exist_ok=True)

    def delete(self) -> None:
        """Removes the folder with its contents, if it exists."""
        with _storage_errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path("").rstrip("/"), recursive=True)

    def rename(self, name: str) -> None:
        """Renames a local folder; replaces a folder of that name."""
        target = Folder(str(self.path.with_name(name)))
        target.delete()
        self.path.rename(target.path)

    def _list(self, kind: str) -> list[str]:
        with _storage_errors():
            try:
                entries = self._fs.ls(self._path("").rstrip("/"), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = (
            str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == kind
        )
        return sorted(names)

    def _path(self, name: str) -> str:
        return f"{self.address}/{name}"

    @property
    def _fs(self) -> Any:
        return _open(self.address)[0]

    def _check_kind(self) -> None:
        try:
            _ = self._fs
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{self.address} cannot be opened: {error}. Give a path, or a URL whose fsspec package is "
                "installed (s3:// needs s3fs)"
            ) from error


def is_url(place: Place) -> bool:
    """Returns whether a place is a URL, not a path."""
    return "://" in str(place)


def reason(error: OSError) -> str:
    """Describes an error; errors of object stores have no strerror."""
    return error.strerror or str(error)


def _open(address: str) -> tuple[Any, str]:
    """Returns the file system of an address, which fsspec caches, and the path there."""
    from fsspec.core import url_to_fs

    # No cached listings, because other hosts write there, too.
    fs, path = url_to_fs(address, use_listings_cache=False)
    return fs, str(path).rstrip("/")


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Turns errors of the storage's library into OSError."""
    try:
        yield
    except (OSError, GeneratorExit):
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
