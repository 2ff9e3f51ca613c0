"""Copies remote folders to this machine, each version once, within a limit of disk space.

CACHE/KEY/            a complete copy; KEY is the digest of the files' names, sizes and fingerprints
CACHE/KEY/.complete   written last: the files' sizes
CACHE/KEY.partial/    an unfinished copy, which the next process continues
CACHE/KEY.lock        locked exclusively while copying, shared while the copy is used
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ModelError
from paceline.service.process import write_atomically
from paceline.storage.folder import Folder, reason

log = logging.getLogger(__name__)

CACHE_DIR = "PACELINE_CACHE_DIR"
KERNEL_CACHE = "TORCHINDUCTOR_CACHE_DIR"
ATTENTION_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
SUMS = "SHA256SUMS"
"""A file in a model folder, in sha256sum's format, against which copied files are checked."""

_COMPLETE = ".complete"
_TELL_EVERY_S = 10.0
_PAUSE_S = 0.2

# Descriptors of shared locks on the copies that this process uses; they are closed when it ends.
_in_use: dict[Path, int] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """How a copy is made.

    Attributes:
        max_bytes: limit of all copies on this machine; the least recently used ones are removed.
        wanted: whether a file is needed, by its path in the folder.
        tell: called with a message when copying begins and every ten seconds while it lasts.
        stopped: called between two pieces of a file; True cancels the copy.
    """

    max_bytes: int
    wanted: Callable[[str], bool] = lambda name: True
    tell: Callable[[str], None] = log.info
    stopped: Callable[[], bool] = lambda: False


def cache_dir() -> Path:
    """Returns the folder of the copies: PACELINE_CACHE_DIR, else paceline/ in the user's cache."""
    if os.environ.get(CACHE_DIR):
        return Path(os.environ[CACHE_DIR]).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "paceline"


def keep_kernels() -> None:
    """Makes torch and FlashAttention 4 keep compiled kernels in this cache; call it before importing them.

    Otherwise torch's compiler would choose a folder below TMPDIR, which the run removes at its end, and
    FlashAttention would keep no kernels.
    """
    os.environ.setdefault(KERNEL_CACHE, str(cache_dir() / "kernels"))
    os.environ.setdefault(ATTENTION_CACHE, str(cache_dir() / "kernels" / "attention"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def fetch(folder: Folder, how: Fetch) -> Path:
    """Returns the path of a local copy, creating it if needed; this process protects it from removal.

    Raises:
        ModelError: the folder is empty or unreadable, a copy differs from SHA256SUMS, or there is no room.
        InterruptedError: `stopped` returned True.
    """
    try:
        sizes = {name: size for name, size in folder.tree().items() if how.wanted(name)}
        if not sizes:
            raise ModelError(f"{folder} holds no files; correct model.path")
        copy = _Copy(folder, sizes, cache_dir() / _key(folder, sizes))
        copy.path.parent.mkdir(parents=True, exist_ok=True)
        return copy.make(how)
    except InterruptedError:
        raise
    except OSError as error:
        raise ModelError(f"{folder} cannot be copied to {cache_dir()}: {reason(error)}") from error


def _key(folder: Folder, sizes: Mapping[str, int]) -> str:
    entries = [[name, size, folder.fingerprint(name)] for name, size in sorted(sizes.items())]
    return hashlib.blake2b(json.dumps(entries).encode(), digest_size=16).hexdigest()


class _Copy:
    def __init__(self, folder: Folder, sizes: Mapping[str, int], path: Path) -> None:
        self._folder, self._sizes, self.path = folder, sizes, path
        self._partial = path.with_name(f"{path.name}.partial")
        self._told = 0.0

    def make(self, how: Fetch) -> Path:
        while True:
            if self._use():
                return self.path
            with _lock(self.path, fcntl.LOCK_EX) as locked:
                if locked and not self._is_complete():
                    self._copy(how)
            if not locked:
                self._say(how, f"another process copies {self._folder} to this machine")
                time.sleep(_PAUSE_S)
            if how.stopped():
                raise InterruptedError(f"the copy of {self._folder} was cancelled")

    def _use(self) -> bool:
        """Locks a complete copy for the life of this process."""
        if self.path in _in_use:
            return self._is_complete()
        descriptor = _open_lock(self.path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        if not self._is_complete():
            os.close(descriptor)
            return False
        os.utime(self.path / _COMPLETE)
        _in_use[self.path] = descriptor
        return True

    def _is_complete(self) -> bool:
        try:
            sizes = json.loads((self.path / _COMPLETE).read_text(encoding="utf-8"))
            return bool(sizes == self._sizes) and all(
                (self.path / name).stat().st_size == size for name, size in sizes.items()
            )
        except (OSError, ValueError):
            return False

    def _copy(self, how: Fetch) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        total = sum(self._sizes.values())
        self._partial.mkdir(parents=True, exist_ok=True)
        _make_room(self.path, total, how.max_bytes, self._folder)
        self._say(how, f"copying {self._folder} to this machine: {_mib(total)}")
        done = 0
        for name, size in sorted(self._sizes.items()):
            self._copy_file(name, size, how, done, total)
            done += size
        self._check_sums()
        write_atomically(self._partial / _COMPLETE, json.dumps(self._sizes))
        self._partial.rename(self.path)
        how.tell(f"{self._folder} is here: {_mib(total)}")

    def _copy_file(self, name: str, size: int, how: Fetch, done: int, total: int) -> None:
        target = self._partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        start = target.stat().st_size if target.exists() else 0
        if start > size:
            target.unlink()
            start = 0
        if start < size or not target.exists():
            with target.open("ab") as file:
                for chunk in self._folder.chunks(name, start):
                    file.write(chunk)
                    self._say(how, f"copying {self._folder}: {_mib(done + file.tell())} of {_mib(total)}")
                    if how.stopped():
                        raise InterruptedError(f"the copy of {self._folder} was cancelled")
                os.fsync(file.fileno())
        if target.stat().st_size != size:
            actual = target.stat().st_size
            target.unlink()
            raise ModelError(
                f"{self._folder}/{name} changed while it was copied: got {actual} bytes instead of {size}; "
                "start again when nobody writes there"
            )

    def _check_sums(self) -> None:
        """Compares the copy with the folder's SHA256SUMS, if it has one."""
        sums = self._partial / SUMS
        if not sums.is_file():
            return
        for line in sums.read_text(encoding="utf-8").splitlines():
            digest, _, name = line.partition(" ")
            name = name.strip().removeprefix("*").removeprefix("./")
            if name not in self._sizes:
                continue
            with (self._partial / name).open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if actual != digest:
                (self._partial / name).unlink()
                raise ModelError(
                    f"{self._folder}/{name} has the SHA-256 {actual}, its {SUMS} says {digest}; put the "
                    "right file there"
                )

    def _say(self, how: Fetch, sentence: str) -> None:
        now = time.monotonic()
        if now - self._told > _TELL_EVERY_S or not self._told:
            self._told = now
            how.tell(sentence)


def _make_room(path: Path, num_bytes: int, max_bytes: int, folder: Folder) -> None:
    """Removes the least recently used copies until there is room for one more.

    Raises:
        ModelError: there is not enough room even without all other copies.
    """
    copies = sorted(path.parent.glob(f"*/{_COMPLETE}"), key=lambda file: file.stat().st_mtime)
    used = {file.parent: sum(json.loads(file.read_text(encoding="utf-8")).values()) for file in copies}
    for copy in list(used):
        if sum(used.values()) + num_bytes <= max_bytes and _free(path.parent) >= num_bytes:
            return
        with _lock(copy, fcntl.LOCK_EX) as locked:
            if locked:
                log.info("removing the copy %s to make room for %s", copy, folder)
                shutil.rmtree(copy)
                del used[copy]
    room = min(max_bytes - sum(used.values()), _free(path.parent))
    if num_bytes > room:
        raise ModelError(
            f"{folder} has {_mib(num_bytes)}, {path.parent} has room for {_mib(max(0, room))}: free some "
            f"disk, raise model.cache_gib, or set {CACHE_DIR} to a larger disk"
        )


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def _lock(path: Path, kind: int) -> Iterator[bool]:
    """Tries to take the copy's lock for the block; yields whether it succeeded."""
    descriptor = _open_lock(path)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    return os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
