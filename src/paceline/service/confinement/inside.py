"""Builds the confinement around itself, then becomes the program: `python -I -S inside.py SPEC REPORT`.

    this process: maps users --> namespaces: users, mounts, processes, network, IPC, names, cgroups
      `-- init of the namespaces: its own read-only root; ends with the program, and everything with it
            `-- the program: another user, no capabilities, a filter of system calls, limits

Standard library only: it runs before anything is imported. Both arguments are file descriptors: a file that
holds what `confined.Command` describes, as JSON, and a pipe for what the builder reports: STARTED just before
the program begins, or the reason why something failed. The program never has the pipe, so neither its output
nor its exit code can be taken for a report.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

STARTED = b"+"
"""The first byte of a report once the confinement is built; what follows says why no program began."""

_CLONE_NEW = {
    "cgroup": 0x02000000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000, "pid": 0x20000000,
    "net": 0x40000000, "mount": 0x00020000, "time": 0x00000080,
}  # fmt: skip
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 1 << 18, 2, 4
_MNT_DETACH, _AT_RECURSIVE = 2, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 24, 38, 22
_LAST_CAPABILITY = 40
_NOBODY, _INSIDE_ID = 65534, 1000
_REASON_BYTES = 1024
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

# Numbers of system calls: x86_64, aarch64; None if there is none.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "unshare": (272, 97), "setns": (308, 268), "mknod": (133, None), "mknodat": (259, 33),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None),
    # Memory that belongs to no process, so that no limit of a process counts it.
    "shmget": (29, 194), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "io_setup": (206, 0),
    "vmsplice": (278, 75), "sethostname": (170, 161), "setdomainname": (171, 162),
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_PIVOT_ROOT, _MOUNT_SETATTR = (155, 41), 442
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _AF_UNIX, _X32 = 1, 38, 1, 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Runs the command; returns its exit code, or 128 plus the number of the signal that ended it."""
    descriptor, report = map(int, sys.argv[1:])
    return _guarded(report, _build, descriptor, report)


def _build(descriptor: int, report: int) -> int:
    os.set_inheritable(report, False)  # the program's execve closes it
    with os.fdopen(descriptor, "rb") as file:
        spec: dict[str, Any] = json.load(file)
    _die_with_parent()
    ready, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready[0])
        os.close(mapped[1])
        os._exit(_guarded(report, _namespaces, spec, report, ready, mapped))
    os.close(ready[1])  # so that the end of a child that fails is noticed
    os.close(mapped[0])
    if os.read(ready[0], 1):
        _map_users(child)
        os.write(mapped[1], b"m")
    return _wait_for(child)


def _guarded(report: int, function: Any, *arguments: Any) -> int:
    try:
        return int(function(*arguments))
    except Exception as error:  # noqa: BLE001  whatever it is, the program has not begun
        reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        os.write(report, reason.encode(errors="replace")[:_REASON_BYTES])
        return 1


def _namespaces(spec: dict[str, Any], report: int, ready: tuple[int, int], mapped: tuple[int, int]) -> int:
    _die_with_parent()
    flags = 0
    for name, flag in _CLONE_NEW.items():
        flags |= flag if name != "time" else 0
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")
    os.write(ready[1], b"r")
    if not os.read(mapped[0], 1):
        return 1  # the parent has reported why
    if spec["other_user"]:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    init = os.fork()
    if init == 0:
        os._exit(_guarded(report, _init, spec, report))
    return _wait_for(init)


def _init(spec: dict[str, Any], report: int) -> int:
    """Runs the first process of the namespaces; when it ends, the kernel ends all others."""
    _die_with_parent()
    os.setsid()
    _build_root(spec)
    program = os.fork()
    if program == 0:
        os._exit(_guarded(report, _become, spec, report))
    os.close(report)
    while True:
        pid, status = os.wait()
        if pid == program:
            return _code(status)


def _build_root(spec: dict[str, Any]) -> None:
    root = spec["root"]
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in spec["read_only"]:
        _bind(path, root + path)
    os.makedirs(root + "/dev")
    for path in _DEVICES:
        Path(root + path).touch()
        _mount(path, root + path, "", _MS_BIND)
    os.mkdir(root + "/tmp")
    size = f"size={spec['disk_bytes']},mode=1777,nr_inodes=4096"
    _mount("tmpfs", root + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    for name, text in spec["files"].items():
        Path(root, "tmp", name).write_text(text, encoding="utf-8", errors="surrogatepass")
    _set_attributes(root, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, recursive=False)
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT[_machine()[0]], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/tmp")


def _bind(path: str, target: str) -> None:
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    if not os.path.exists(path) or os.path.exists(target):
        return
    if os.path.isdir(path):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(path, target, "", _MS_BIND | _MS_REC)
    _set_attributes(target, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, recursive=True)


def _become(spec: dict[str, Any], report: int) -> int:
    _die_with_parent()
    os.closerange(3, report)
    os.closerange(report + 1, 4096)
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if spec["other_user"]:
        os.setgroups([])
        os.setresgid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
        os.setresuid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
    _drop_capabilities()
    _die_with_parent()  # the change of the user has undone it
    for name, value in spec["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _filter_calls()
    os.write(report, STARTED)
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def _drop_capabilities() -> None:
    header = struct.pack("<Ii", 0x20080522, 0)
    _check(_libc.capset(header, struct.pack("<6I", *[0] * 6)), "capset")


def _filter_calls() -> None:
    column, architecture = _machine()
    rules = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, _KILL), (0x20, 0, 0, 0)]
    if column == 0:
        rules += [(0x35, 0, 1, _X32), (0x06, 0, 0, _KILL)]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            rules += [(0x15, 0, 1, number), (0x06, 0, 0, _ERRNO | _EPERM)]
    rules += [(0x15, 0, 1, _CLONE3[column]), (0x06, 0, 0, _ERRNO | _ENOSYS)]
    namespaces = 0
    for flag in _CLONE_NEW.values():
        namespaces |= flag
    namespaces &= ~_CLONE_NEW["time"]  # in clone's flags, this bit belongs to the signal's number
    rules += [(0x15, 0, 4, _CLONE[column]), (0x20, 0, 0, 16), (0x45, 0, 1, namespaces)]
    rules += [(0x06, 0, 0, _ERRNO | _EPERM), (0x06, 0, 0, _ALLOW)]
    rules += [(0x15, 0, 3, _SOCKET[column]), (0x20, 0, 0, 16), (0x15, 1, 0, _AF_UNIX)]
    rules += [(0x06, 0, 0, _ERRNO | _EPERM), (0x06, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("<HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


def _map_users(child: int) -> None:
    """Maps this user; if this is root, two users: one that builds, and one that runs the program."""
    user, group = os.getuid(), os.getgid()
    folder = Path("/proc", str(child))
    if user == 0:
        (folder / "uid_map").write_text(f"0 0 1\n{_INSIDE_ID} {_NOBODY} 1\n")
        (folder / "gid_map").write_text(f"0 0 1\n{_INSIDE_ID} {_NOBODY} 1\n")
        return
    (folder / "setgroups").write_text("deny")
    (folder / "uid_map").write_text(f"{_INSIDE_ID} {user} 1\n")
    (folder / "gid_map").write_text(f"{_INSIDE_ID} {group} 1\n")


def _machine() -> tuple[int, int]:
    try:
        return _ARCHITECTURES[platform.machine()]
    except KeyError:
        raise OSError(f"no filter of system calls for {platform.machine()}") from None


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    outcome = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )
    _check(outcome, f"mount {target}")


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    record = struct.pack("<4Q", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    outcome = _libc.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, record, ctypes.c_size_t(len(record)))
    _check(outcome, f"mount_setattr {path}")


def _check(outcome: int, what: str) -> None:
    if outcome < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait_for(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return _code(status)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
