"""Scores programs that try to harm a run, drawn from a grammar, with the reward service's own code.

    python benchmarks/hostile_programs.py --count 200 --seed 0

Each program is a response: a few hostile acts, mostly followed by the right answer, in some form of code
fences. They run only in the project's confinement. A consumer takes them from a mailbox, `reward.code` scores
them, and the results are read as the controller reads them. Prints the outcomes of each kind of act. The
service must still work, and each response must have a typed error or a reward; if the grammar predicts the
reward, the two must agree.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rich.console import Console
from rich.table import Table

from paceline.broker import Mailbox, names
from paceline.config.reward import CodeConfig, RewardConfig
from paceline.core.samples.trajectory import ScoredHeader
from paceline.reward.code import scorer as code_scorer
from paceline.reward.consumer import Consumer, ConsumerOptions
from paceline.reward.scoring.scorer import ScorerSettings
from paceline.reward.weighted_sum import WeightedSum
from paceline.service.confinement.confined import Command, CommandResult, run_confined
from paceline.wire import decode_scored
from support.memory_broker import MemoryBroker
from support.trajectories import finished_sample

RUN = "hostile"
PRINTS = '{"inputs": ["3 4\\n"], "outputs": ["7"]}'
CALLS = '{"calls": ["add(3, 4)"], "results": [7]}'

# Acts by kind: those after which the right answer still counts, those after which it does not, and uncertain
# ones. N is replaced by a random number.
HARMLESS: Mapping[str, Sequence[str]] = {
    "descriptors": ["for n in range(3, 1024):\n    try: os.write(n, b'+broken')\n    except OSError: pass"],
    "memory": ["x = bytearray(1 << 40)", "x = [bytearray(N << 20) for _ in range(1000)]"],
    "shared memory": [
        "[os.memfd_create('x') for _ in range(N)]",
        "assert libc.shmget(0, N << 20, 0o1600) < 0 or print('held')",
        "open('/dev/shm/x', 'wb').write(bytes(N << 20))",
    ],
    "threads": [
        "for _ in range(N): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    ],
    "files": [
        "open('/tmp/big', 'wb').write(bytes(N << 20))",
        "for n in range(9999): open(f'/tmp/{n}', 'w').close()",
        "os.unlink('/tmp/program.py')",
        "os.symlink('/proc/1/fd', '/tmp/link'); os.listdir('/tmp/link')",
        "open(f'/tmp/{chr(N) * 300}', 'w')",
    ],
    "recursion": [
        "def dig(n): return dig(n + 1)\ndig(0)",
        "json.loads('[' * (N * 1000))",
        "x = []\nfor _ in range(N * 100): x = [x]\njson.dumps(x)",
    ],
    "unicode": ["print(chr(0xD800 + N), file=sys.stderr)", "os.write(2, bytes(range(256)) * N)"],
    "signals": ["os.kill(1, 9)", "signal.raise_signal(signal.SIGCHLD)", "os.kill(os.getppid(), 15)"],
    "forbidden calls": [
        "libc.syscall((29, 64, 68, 101, 206, 240, 272, 310, 319, 425, 435, 447)[N % 12], 0, 0, 0, 0, 0, 0)",
        "libc.prctl(1, 0, 0, 0, 0)",
        "socket.create_connection(('127.0.0.1', 6379), 1)",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    ],
}
FATAL: Mapping[str, Sequence[str]] = {
    "exit codes": ["os._exit(1 + N % 255)", "os._exit(120)", "os._exit(0)"],
    "descriptors": [
        "os.close(1)",
        "os.dup2(0, 1)",
        "with open(1, 'w') as file: file.write('7')",
        "os.closerange(0, 1024)",
    ],
    "output": [
        "sys.stdout.write('[' * (N * 10000)); sys.stdout.flush(); os._exit(0)",
        "while True: sys.stdout.write('x' * N)",
        "while True: os.write(2, b'y' * N)",
        "print('[' * 100000, flush=True); os._exit(0)",
    ],
    "signals": ["os.kill(os.getpid(), (4, 6, 7, 8, 9, 11, 15)[N % 7])", "os.abort()"],
    "sleeping": ["time.sleep(600)", "while True: pass", "signal.pause()", "threading.Event().wait()"],
    "execution": ["os.execv('/bin/sleep', ['sleep', '600'])", "os.execv('/bin/false', ['false'])"],
}
UNSURE: Mapping[str, Sequence[str]] = {
    "forks": [
        "while True: os.fork()",
        "for _ in range(N):\n    if os.fork() == 0: os.setsid(); time.sleep(600)",
        "if os.fork(): os._exit(0)",
        "subprocess.Popen(['/bin/sh', '-c', 'while :; do :; done & sleep 600'])",
    ],
    "signals": ["os.kill(-1, 9)", "os.kill(0, 9)", "os.kill(os.getpid(), 1 + N % 64)", "signal.alarm(1)"],
    "threads": ["for _ in range(N): threading.Thread(target=time.sleep, args=(600,)).start()"],
    "recursion": [
        "sys.setrecursionlimit(1 << 30)\ndef dig(n): return dig(n + 1)\ndig(0)",
        "eval('(' * N * 1000)",
        "eval('-' * N * 10000 + '1')",
    ],
    "unicode": ["x = '\x00'", "print(chr(0xDC00 + N % 99))", "\u202e\u2066x = 1", "print('\u2028' * N)"],
    "memory": ["mmap.mmap(-1, N << 20).write(bytes(N << 20))", "libc.memset(N, 0, 1 << 30)"],
    "descriptors": ["os.close(0)", "os.close(2)", "sys.stdout = None", "os.dup2(1, 2)"],
    "threads that print": ["threading.Timer(0.5, lambda: print('x' * N)).start()"],
}
HEAD = (
    "import atexit, ctypes, json, mmap, os, resource, signal, socket, subprocess, sys, threading, time\n"
    "libc = ctypes.CDLL(None)\n"
)
ANSWERS = {PRINTS: "print(sum(map(int, input().split())))\n", CALLS: "def add(a, b):\n    return a + b\n"}
FENCES = {
    "none": "{}",
    "one": "Here:\n```python\n{}```\nDone.",
    "two": "```\nprint(1)\n```\nBetter:\n```py\n{}```",
    "carriage returns": "```python \r\n{}```",
    "spaces": "```" + " " * 20_000 + "x y\n```\n{}```",
    "backticks": "`" * 20_000 + "x y\n```\n{}```",
    "cut off": "```python\n{}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hostile:
    """A response: its acts' kinds, its text and its tests; `reward` is None if uncertain."""

    kinds: tuple[str, ...]
    fence: str
    response: str
    ground_truth: str
    reward: float | None


@dataclass(kw_only=True, slots=True)
class Record:
    """The outcomes of the responses.

    `headers` are by prompt id; `endings` says how each program ended; `left` names processes that remain.
    """

    headers: dict[int, ScoredHeader] = field(default_factory=dict)
    endings: dict[int, str] = field(default_factory=dict)
    has_ended: bool = False
    longest_lag_s: float = 0.0
    left: list[str] = field(default_factory=list)

    def wrong(self, drawn: Sequence[Hostile]) -> list[str]:
        """Returns violations."""
        faults = ["the service ended"] if self.has_ended else []
        for number, hostile in enumerate(drawn):
            header = self.headers.get(number)
            if header is None or (header.reward is None and header.reward_error is None):
                faults.append(f"{number} {hostile.kinds}: neither a reward nor an error")
            elif hostile.reward is not None and header.reward != hostile.reward:
                faults.append(
                    f"{number} {hostile.kinds}: {header.reward} {header.reward_error}, not {hostile.reward}"
                )
        return [*faults, *self.left]


def draw(source: random.Random) -> Hostile:
    """Returns a response of one to three acts."""
    lines, kinds, reward = [HEAD], [], 1.0
    for _ in range(source.randint(1, 3)):
        sort, weight = source.choice([(HARMLESS, 1.0), (FATAL, 0.0), (UNSURE, float("nan"))])
        kind = source.choice(sorted(sort))
        act = source.choice(sort[kind]).replace("N", str(source.randint(1, 99)))
        kinds.append(kind)
        body = "".join(f"    {line}\n" for line in act.split("\n"))
        # One fatal act decides the reward, whatever the other acts do.
        reward = weight if weight == 0.0 or (reward != 0.0 and weight != 1.0) else reward
        lines.append(f"try:\n{body}except BaseException: pass\n")
    ground_truth = source.choice([PRINTS, PRINTS, CALLS])
    fence = source.choice(sorted(FENCES))
    program = "".join(lines) + ANSWERS[ground_truth]
    if fence == "cut off":
        reward = 0.0
    return Hostile(
        kinds=tuple(kinds),
        fence=fence,
        response=FENCES[fence].replace("{}", program),
        ground_truth=ground_truth,
        # An uncertain act may end the program before a fatal one, but never gives the answer.
        reward=None if reward != reward else reward,
    )


class _CodePoints:
    """Decodes token n as the character n - 1."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token - 1) for token in token_ids)


async def score(drawn: Sequence[Hostile], *, seconds: float) -> Record:
    """Lets a consumer score the responses, each program within `seconds`."""
    record, broker = Record(), MemoryBroker()
    numbers: dict[str, list[int]] = {}
    for number, hostile in enumerate(drawn):
        numbers.setdefault(code_scorer.code_of(hostile.response), []).append(number)

    async def observed(command: Command) -> CommandResult:
        (program,) = command.files.values()
        outcome = await run_confined(command)
        for text in numbers:
            if program.startswith(text):  # a test of calls adds its caller
                record.endings |= dict.fromkeys(numbers[text], f"{outcome.ending.value} {outcome.code}")
        return outcome

    code = CodeConfig(name="code", test_timeout_s=seconds, memory_mib=64, max_processes=8)
    total = WeightedSum.configured(ScorerSettings(config=RewardConfig(functions=(), code=(code,))))
    await total.start()
    consumer = Consumer(
        broker=broker,
        scorer=total,
        tokenizer=_CodePoints(),  # type: ignore[arg-type]
        options=ConsumerOptions(run_id=RUN, member_id="reward-0"),
    )
    with mock.patch.object(code_scorer, "run_confined", observed):
        for number, hostile in enumerate(drawn):
            tokens = [ord(letter) + 1 for letter in hostile.response]
            sample = finished_sample(RUN, number, tokens, ground_truth=hostile.ground_truth)
            await broker.append([sample])
        working = asyncio.create_task(consumer.run(), name="consumer")
        lag = asyncio.create_task(_watch(record), name="lag")
        reading = asyncio.create_task(_read(broker, record, len(drawn)), name="scored")
        await asyncio.wait({working, reading}, return_when=asyncio.FIRST_COMPLETED)
        record.has_ended = working.done()
        for task in (working, lag, reading):
            task.cancel()
        await asyncio.gather(working, lag, reading, return_exceptions=True)
    await total.close()
    record.left = [f"a process is left: {child}" for child in _programs()]
    return record


def _programs() -> list[psutil.Process]:
    """Returns the confined programs that run below this process."""
    running = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and may be a zombie
            running += [child] * ("inside.py" in str(child.cmdline()))
    return running


async def _read(broker: MemoryBroker, record: Record, count: int) -> None:
    async with Mailbox(broker, names.scored(RUN), names.CONTROLLER_GROUP, "controller") as box:
        while len(record.headers) < count:
            entries = await box.take()
            for entry in entries:
                header: Any = decode_scored(entry.payload)
                record.headers[header.trajectory_id.prompt_id] = header
            await box.done(entries)


async def _watch(record: Record) -> None:
    while True:
        started = time.monotonic()
        await asyncio.sleep(0.05)
        record.longest_lag_s = max(record.longest_lag_s, time.monotonic() - started - 0.05)


def table(drawn: Sequence[Hostile], record: Record) -> Table:
    """Makes a table by kind of act: responses, their rewards, errors, and how programs ended."""
    shown = Table("act", "responses", "reward 1", "reward 0", "error", "how programs ended")
    for kind in sorted({kind for hostile in drawn for kind in hostile.kinds}):
        numbers = [number for number, hostile in enumerate(drawn) if kind in hostile.kinds]
        rewards = Counter(record.headers[number].reward for number in numbers if number in record.headers)
        endings = Counter(record.endings.get(number, "not run") for number in numbers)
        shown.add_row(
            kind,
            *map(str, (len(numbers), rewards[1.0], rewards[0.0], rewards[None])),
            ", ".join(f"{count} {ending}" for ending, count in endings.most_common()),
        )
    return shown


def main() -> int:
    """Runs the benchmark; returns 1 if there were violations."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0, help="longest time for each program")
    options = parser.parse_args()
    source = random.Random(options.seed)  # noqa: S311
    drawn = [draw(source) for _ in range(options.count)]
    started = time.monotonic()
    record = asyncio.run(score(drawn, seconds=options.seconds))
    console = Console(width=180)
    console.print(f"$ python benchmarks/hostile_programs.py {' '.join(sys.argv[1:])}")
    console.print(table(drawn, record))
    errors = Counter(header.reward_error for header in record.headers.values() if header.reward_error)
    console.print(
        f"{len(record.headers)} of {len(drawn)} responses scored in {time.monotonic() - started:.0f} s; "
        f"{int(record.has_ended)} services ended; the event loop lagged at most {record.longest_lag_s:.2f} s"
    )
    for (kind, message), count in errors.most_common():
        console.print(f"{count} with the error {kind}: {message}", markup=False)
    for fault in record.wrong(drawn):
        console.print(f"WRONG {fault}", markup=False)
    return 1 if record.wrong(drawn) else 0


if __name__ == "__main__":
    sys.exit(main())
