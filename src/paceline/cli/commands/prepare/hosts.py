"""`paceline hosts init`: prepares several hosts for a run, and writes the HOSTS.yaml of `paceline up`."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from paceline.broker.address import REDIS_PASSWORD
from paceline.checks.host_check import ask_python, check_hosts
from paceline.cli import certificates
from paceline.cli.commands import arguments
from paceline.config.load import parse
from paceline.config.run import RunConfig
from paceline.core.cards import card_of
from paceline.core.errors import ConfigError, EnvironmentLackError
from paceline.launch.planning.hosts import Host, Hosts, with_hosts
from paceline.service.addresses import is_loopback, join, on_route_to
from paceline.service.identity.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TLS_DIR
from paceline.service.process import write_atomically

_TLS_FILES = (CA_FILE, CERTIFICATE_FILE, KEY_FILE)
_REDIS_PORT = 6380
_UNKNOWN = "0.0.0.0"
_FOLDER_S = 60.0
_COPY_S = 24 * 3600.0
_KEYS = ("learner", "rollout", "reward", "address", "folder", "python", "gpus")

# Both scripts run on a host, in its folder, with its interpreter. This one prints the host's folder, address
# and GPUs.
_LOOK = """
import json, os, socket, subprocess, sys
where, model = sys.argv[1:]
family, kind, protocol, _, address = socket.getaddrinfo(where, 9, type=socket.SOCK_DGRAM)[0]
with socket.socket(family, kind, protocol) as probe:
    probe.connect(address)
    own = probe.getsockname()[0]
try:
    words = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
    gpus = {int(line.partition(",")[0]): line.partition(",")[2].strip() for line in told.splitlines()}
except (OSError, subprocess.SubprocessError, ValueError):
    gpus = {}
there = os.path.exists(model)
print(json.dumps({"address": own, "gpus": gpus, "cores": os.cpu_count(), "model": there}))
"""
# This one writes the files that it gets through its environment.
_WRITE = """
import json, os, sys
os.makedirs(sys.argv[1], mode=0o700, exist_ok=True)
for name, text in json.loads(os.environ["PACELINE_FILES"]).items():
    path = os.path.join(sys.argv[1], name)
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(path + ".new", path)
print(json.dumps({"folder": os.path.abspath(sys.argv[1])}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "action",
        choices=("init", "renew"),
        help="init: prepare the hosts, and write HOSTS.yaml; renew: replace certificates that are past half "
        "of their lifetime, and copy them",
    )
    parser.add_argument(
        "config", type=Path, metavar="FILE", help="init: the run's configuration; renew: HOSTS.yaml"
    )
    parser.add_argument(
        "--host",
        action="append",
        nargs="+",
        default=[],
        metavar=("NAME", "KEY=VALUE"),
        help="name of a host for ssh, and what it runs: learner=RANKS, rollout=SERVERS, reward=SERVICES; "
        "further keys: address, folder, python, gpus=0,1",
    )
    parser.add_argument("--folder", default="paceline", help="folder on the hosts (default: paceline)")
    parser.add_argument("--python", default="python3", help="interpreter there that has Paceline")
    parser.add_argument("--address", help="address at which hosts reach this machine (default: looked up)")
    parser.add_argument(
        "--certs", type=Path, default=Path("certs"), help="folder of the authority (default: certs)"
    )
    parser.add_argument("--to", type=Path, default=Path("HOSTS.yaml"), help="the file (default: HOSTS.yaml)")
    parser.add_argument("--shell", help="command line used instead of ssh; {name} in it is the host")


def run(args: argparse.Namespace) -> int:
    """Prepares the hosts step by step, and prints the commands to type next."""
    if args.action == "renew":
        _certify(args.certs.absolute(), arguments.load_config(Hosts, args.config, []))
        return 0
    if not args.host:
        raise ConfigError("name the hosts: --host me@node1 learner=4 reward=1 --host node2 rollout=4")
    if args.to.exists():
        raise ConfigError(f"{args.to} is there already: delete it, or name another file with --to")
    config = arguments.load_config(RunConfig, args.config, [])
    shell = {"shell": shlex.split(args.shell)} if args.shell else {}
    wanted = [_wanted(words, args) for words in args.host]
    draft = parse(Hosts, {"config": "-", "address": _UNKNOWN, "hosts": wanted, **shell})
    address = args.address or _own_address(draft.hosts[0].name)
    for host in draft.hosts:
        _make_folder(draft, host)
    model = config.model.path
    seen = [ask_python(draft, host, _LOOK, address, model) for host in draft.hosts]
    tree = {
        "config": str(args.config.absolute()),
        "address": address,
        **shell,
        "hosts": [_found(*each) for each in zip(wanted, draft.hosts, seen, strict=True)],
    }
    hosts = parse(Hosts, tree)
    url = f"rediss://paceline@{join(address, _REDIS_PORT)}/0"
    with_hosts(config.model_copy(update={"broker": config.broker.model_copy(update={"url": url})}), hosts)
    own = _certify(args.certs.absolute(), hosts)
    for host, answer in zip(hosts.hosts, seen, strict=True):
        if not answer["model"] and Path(model).is_dir():
            _copy(hosts, host, Path(model))
    check_hosts(hosts, tls_dir=str(own))
    write_atomically(args.to, yaml.safe_dump(tree, sort_keys=False))
    print(_next(args, hosts, own, url))
    return 0


def _wanted(words: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Returns what the command line says about a host, as an entry of HOSTS.yaml."""
    host: dict[str, Any] = {
        "name": words[0],
        "address": _UNKNOWN,
        "folder": args.folder,
        "python": args.python,
    }
    for word in words[1:]:
        key, is_there, value = word.partition("=")
        if not is_there or key not in _KEYS:
            raise ConfigError(f"--host {words[0]}: {word} is none of {', '.join(f'{key}=' for key in _KEYS)}")
        host[key] = [int(each) for each in value.split(",") if each] if key == "gpus" else value
        if key in ("learner", "rollout", "reward"):
            host[key] = int(value) if value.isdecimal() else value
    return host


def _own_address(name: str) -> str:
    """Returns this machine's address on the route to a host.

    Raises:
        ConfigError: there is no address at which the host could reach this machine.
    """
    try:
        address = on_route_to(name.rpartition("@")[2], 22)
    except OSError as error:
        address = f"none ({error})"
    if is_loopback(address) or address.startswith("none"):
        raise ConfigError(
            f"this machine's address on the route to {name} is {address}, which other hosts cannot reach: "
            "give an address that they can reach with --address"
        )
    return address


def _make_folder(hosts: Hosts, host: Host) -> None:
    code = _shell(hosts, host, f"mkdir -p {shlex.quote(host.folder)}", _FOLDER_S)
    if code:
        raise EnvironmentLackError(
            f"{host.name}: {hosts.shell[0]} did not create the folder {host.folder} (exit code {code}); it "
            "must log in without asking anything: with a key, and with the host in known_hosts"
        )


def _shell(hosts: Hosts, host: Host, line: str, limit_s: float, stdin: IO[bytes] | None = None) -> int:
    """Runs a command line on a host; returns the exit code.

    Raises:
        EnvironmentLackError: it has not ended after `limit_s`.
    """
    words = [*(word.replace("{name}", host.name) for word in hosts.shell), line]
    try:
        ended = subprocess.run(words, stdin=stdin or subprocess.DEVNULL, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentLackError(
            f"{host.name}: {hosts.shell[0]} has not ended after {limit_s:g} s ({line}); "
            "check name and network"
        ) from error
    return ended.returncode


def _found(wanted: dict[str, Any], host: Host, seen: dict[str, Any]) -> dict[str, Any]:
    """Returns the host's entry, completed by what the host reported; the command line takes precedence."""
    entry = dict(wanted)
    if host.address == _UNKNOWN:
        entry["address"] = seen["address"]
    entry.setdefault("gpus", sorted(map(int, seen["gpus"])))
    cards = {card_of(seen["gpus"].get(str(gpu), "")) for gpu in entry["gpus"]}
    if len(cards) == 1 and (card := cards.pop()) is not None:
        entry["card"] = card.name
    entry["cores"] = seen["cores"] or host.cores
    return entry | {"env": {TLS_DIR: "tls"}}


def _certify(folder: Path, hosts: Hosts) -> Path:
    """Issues a certificate to every host and to this machine; returns the folder of this machine's."""
    if not (folder / certificates.CA_KEY_FILE).exists():
        certificates.Authority.create(folder, days=certificates.AUTHORITY_DAYS)
    names = [f"host-{re.sub('[^A-Za-z0-9.-]', '-', host.name)}" for host in hosts.hosts]
    for sentence in certificates.renew(folder, ["host-here", *names]):
        print(sentence)
    for host, name in zip(hosts.hosts, names, strict=True):
        files = {file: (folder / name / file).read_text(encoding="ascii") for file in _TLS_FILES}
        ask_python(hosts, host, _WRITE, "tls", env={"PACELINE_FILES": json.dumps(files)})
    return folder / "host-here"


def _copy(hosts: Hosts, host: Host, model: Path) -> None:
    """Copies the model's folder to the folder where the host's services read it."""
    print(f"{host.name}: copying {model}", flush=True)
    target = shlex.quote(str(model))
    there = f"cd {shlex.quote(host.folder)} && mkdir -p {target} && tar -x -C {target}"
    with subprocess.Popen(["tar", "-c", "-C", str(model), "."], stdout=subprocess.PIPE) as files:
        code = _shell(hosts, host, there, _COPY_S, files.stdout)
    if code or files.returncode:
        raise EnvironmentLackError(
            f"{host.name}: {model} was not copied (exit code {code}); check the free disk space there"
        )


def _next(args: argparse.Namespace, hosts: Hosts, own: Path, url: str) -> str:
    certs = shlex.quote(str(args.certs.absolute()))
    first = next(host for host in hosts.hosts if host.learner)
    return f"""\
{args.to} is written. Let the hosts and this machine reach each other on every port, or at least on those of
docs/several-hosts.md: {_REDIS_PORT} here is Redis, {hosts.learner_port} of {first.name} the learner. Then:

  paceline redis {certs} --host {hosts.address} --port {_REDIS_PORT} &
  export {TLS_DIR}={shlex.quote(str(own))} {REDIS_PASSWORD}_FILE={certs}/redis_password
  paceline up {shlex.quote(str(args.to))} broker.url={url}"""
