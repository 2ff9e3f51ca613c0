"""Attempts to leave a confinement, run inside one: `python escapes.py` prints what each attempt got.

An attempt that gets through returns something true; what is refused raises, or returns nothing.
"""

import ctypes
import glob
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    """Whether a system call succeeds."""
    return libc.syscall(number, *arguments) >= 0


def write(path):
    with open(path, "w") as file:
        file.write("x")
    return True


def read(path):
    with open(path, "rb") as file:
        return file.read(1)


def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        client.connect(address)
    return True


def mount(kind, target):
    return libc.mount(b"none", target, kind, 0, None) == 0


def raise_limit():
    resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))
    return True


def become_root():
    os.setuid(0)
    return True


def follow_link():
    os.symlink("/proc/1/root/etc/shadow", "/tmp/link")
    return read("/tmp/link")


def set_user_bit():
    shutil.copy("/bin/true", "/tmp/true")
    os.chmod("/tmp/true", 0o4755)
    return os.stat("/usr/bin/passwd").st_uid == os.getuid()


def run_setuid():
    words = ["/bin/su", "-c", "id -u", "root"]
    return subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, timeout=60).returncode == 0


def signal_others():
    """Every process that may be signalled, but for this one."""
    return [pid for pid in range(2, 4000) if pid != os.getpid() and _signalled(pid)]


def _signalled(pid):
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def kill_init():
    os.kill(1, signal.SIGKILL)
    return False  # the attempt is whether this process's namespaces survive, which the last line shows


def shared_memory():
    return call(29, 0x5043, 4096, 0o1666)  # shmget, which makes what is not there


def hidden_file():
    return os.memfd_create("x")


def many_files():
    return [open("/dev/null") for _ in range(5000)]


def fill_disk():
    with open("/tmp/big", "wb") as file:
        for _ in range(200):
            file.write(b"\0" * (1 << 20))
    return True


def fill_many():
    for number in range(100_000):
        with open(f"/tmp/{number}", "w"):
            pass
    return True


def much_memory():
    return bytearray(4 << 30)


def secrets():
    return [name for name in os.environ if name.startswith(("PACELINE", "AWS"))]


def open_descriptors():
    kept = []
    for number in range(3, 200):
        try:
            os.fstat(number)
        except OSError:
            continue
        kept.append(number)
    return kept


def new_user():
    return libc.unshare(0x10000000) == 0


def clone_namespace():
    return call(56, 0x10000000 | 17, 0, 0, 0, 0)


def leave_by_descriptor():
    directory = os.open("/", os.O_RDONLY)
    return os.access("../../../root/.ssh", os.F_OK, dir_fd=directory) or os.path.exists("/../../home")


def host_name():
    return libc.sethostname(b"mine", 4) == 0


def priority():
    os.nice(-5)
    return True


def reboot():
    return call(169, 0xFEE1DEAD, 672274793, 0x1234567, 0)


ATTEMPTS = {
    "read /etc/shadow": lambda: read("/etc/shadow"),
    "read /etc/passwd": lambda: read("/etc/passwd"),
    "read a file of the host's /tmp": lambda: read(sys.argv[1]),
    "read /root": lambda: os.listdir("/root/.ssh"),
    "read /home": lambda: os.listdir("/home"),
    "read /var": lambda: os.listdir("/var"),
    "read /sys": lambda: os.listdir("/sys"),
    "read /proc/1/environ": lambda: read("/proc/1/environ"),
    "read /proc/self/mem": lambda: read("/proc/self/mem"),
    "list /proc": lambda: os.listdir("/proc"),
    "read the run's secrets": secrets,
    "keep open descriptors": open_descriptors,
    "write to /usr": lambda: write("/usr/x"),
    "write to /": lambda: write("/x"),
    "write to Python": lambda: write(os.__file__),
    "write to /dev": lambda: write("/dev/x"),
    "write to /etc": lambda: write("/etc/x"),
    "follow a link to /proc": follow_link,
    "leave by ..": leave_by_descriptor,
    "make a device": lambda: os.mknod("/tmp/sda", 0o60600, os.makedev(8, 0)),
    "open a disk": lambda: glob.glob("/dev/sd*") + glob.glob("/dev/vd*") + glob.glob("/dev/nvme*"),
    "open kernel memory": lambda: read("/dev/mem"),
    "open KVM": lambda: read("/dev/kvm"),
    "open a terminal": lambda: read("/dev/tty"),
    "mount /proc": lambda: mount(b"proc", b"/tmp"),
    "mount a tmpfs": lambda: mount(b"tmpfs", b"/tmp"),
    "unmount": lambda: libc.umount2(b"/usr", 2) == 0,
    "remount writable": lambda: libc.mount(None, b"/usr", None, 32 | 4096, None) == 0,
    "chroot": lambda: os.chroot("/tmp"),
    "make a user namespace": new_user,
    "clone into a user namespace": clone_namespace,
    "enter a namespace": lambda: call(308, 0, 0),
    "open by handle": lambda: call(304, -100, 0, 0),
    "become root": become_root,
    "run a set-user-id program": run_setuid,
    "make a set-user-id program": set_user_bit,
    "connect to the internet": lambda: connect(socket.AF_INET, ("1.1.1.1", 53)),
    "connect to the host": lambda: connect(socket.AF_INET, ("127.0.0.1", int(sys.argv[2]))),
    "connect over IPv6": lambda: connect(socket.AF_INET6, ("::1", int(sys.argv[2]))),
    "connect to an abstract socket": lambda: connect(socket.AF_UNIX, "\0" + sys.argv[3]),
    "open a raw socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "open a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "open a vsock": lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM),
    "look a name up": lambda: socket.getaddrinfo("example.org", 80),
    "trace a process": lambda: call(101, 16, os.getppid(), 0, 0),
    "read another's memory": lambda: call(310, os.getppid(), 0, 0, 0, 0, 0),
    "signal others": signal_others,
    "kill init": kill_init,
    "reach shared memory": shared_memory,
    "make a file in memory": hidden_file,
    "make a secret file in memory": lambda: call(447, 0),
    "make a message queue": lambda: call(68, 0, 0o1666) or call(240, b"x", 0o102, 0o600, None),
    "make semaphores": lambda: call(64, 0, 250, 0o1666),
    "make a ring of asynchronous calls": lambda: call(206, 1, ctypes.create_string_buffer(8)),
    "write to /dev/shm": lambda: write("/dev/shm/x"),
    "set the clock": lambda: time.clock_settime(time.CLOCK_REALTIME, 1),
    "set the host's name": host_name,
    "raise the priority": priority,
    "raise a limit": raise_limit,
    "load a BPF program": lambda: call(321, 5, 0, 0),
    "use io_uring": lambda: call(425, 1, ctypes.create_string_buffer(200)),
    "use userfaultfd": lambda: call(323, 1),
    "watch the CPU": lambda: call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0),
    "use the kernel's keys": lambda: call(250, 0, -3, 1),
    "load a module": lambda: call(175, 0, 0, b""),
    "reboot": reboot,
    "read the kernel's log": lambda: call(103, 3, ctypes.create_string_buffer(100), 100) or read("/dev/kmsg"),
    "open many files": many_files,
    "take 4 GiB": much_memory,
    "fill the disk": fill_disk,
    "make many files": fill_many,
}


def attempt(function):
    """ "no" or what it got."""
    try:
        got = function()
    except BaseException:  # noqa: BLE001  whatever refuses it
        return "no"
    return "THROUGH" if got else "no"


if __name__ == "__main__":
    for name, function in ATTEMPTS.items():
        print(f"{attempt(function)} {name}", flush=True)
    print("end")
