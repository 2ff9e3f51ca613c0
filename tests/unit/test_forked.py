"""Programs of tests as forks: what they are given and what is told of them is as with an interpreter each."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support import forked

STANDS_STILL = "import time; print('up', flush=True); time.sleep(1000)"


def run(*words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return forked.run(words, timeout=120, **options)


def test_words_folder_environment_and_streams_are_the_programs_own(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "print(sys.argv, os.getcwd())\n"
        "print(*map(os.environ.get, ['MINE', 'HOME', 'OMP_NUM_THREADS']))\n"
        "print(sys.stdin.read(), file=sys.stderr)\n"
        "print(__name__, 'torch' in sys.modules)"
    )
    program = forked.Forked(
        ["-c", code, "a", "b c"],
        cwd=tmp_path,
        env={"MINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = program.communicate("read", timeout=120)
    assert out.splitlines() == [f"['-c', 'a', 'b c'] {tmp_path}", "1 None 1", "__main__ True"]
    assert err == "read\n"
    assert program.returncode == 0


def test_a_file_and_a_module_are_run_as_an_interpreter_runs_them(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "own.py").write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.NAME)")
    told = "__main__ ['x'] beside\n"
    assert run(tmp_path / "own.py", "x").stdout == told
    assert run("-m", "own", "x", cwd=tmp_path).stdout == told


@pytest.mark.parametrize(
    ("code", "exit_code", "told"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no such file')", 1, "no such file\n"),
        ("raise SystemExit", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
)
def test_the_end_is_told_as_that_of_a_process(code: str, exit_code: int, told: str) -> None:
    ended = run("-c", code)
    assert ended.returncode == exit_code
    assert ended.stderr.endswith(told)
    assert bool(ended.stderr) is bool(told)


def test_what_a_program_changes_stays_its_own() -> None:
    run("-c", "import os, sys; os.environ['LEFT'] = '1'; sys.modules['left'] = sys; os.chdir('/')")
    seen = run("-c", "import os, sys; print(os.environ.get('LEFT'), 'left' in sys.modules, os.getcwd())")
    assert seen.stdout == f"None False {Path.cwd()}\n"


def test_a_program_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired), forked.Forked(["-c", STANDS_STILL]) as program:
        try:
            program.wait(0.01)
        finally:
            process = psutil.Process(program.pid)
            program.kill()
    assert program.returncode == -signal.SIGKILL
    assert not process.is_running()


def test_a_program_for_which_nobody_waits_any_more_is_killed() -> None:
    """As where the test that started it was killed: the connection breaks."""
    program = forked.Forked(["-c", STANDS_STILL], stdout=subprocess.PIPE)
    assert program.stdout is not None
    with program.stdout:
        assert program.stdout.readline() == "up\n"
        process = psutil.Process(program.pid)
        program._said.close()
        program._connection.close()
        process.wait(120)
    program.returncode = 0  # told by nobody


def test_the_server_ends_with_pytest(tmp_path: Path) -> None:
    """Another process stands for pytest, and nothing is imported."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from support import forked\n"
        "forked.IMPORTS = ()\n"
        "forked.serve(Path(sys.argv[1]), int(sys.argv[2]))"
    )
    folder = tmp_path / "forks"
    folder.mkdir()
    for name in ("lock", "log"):
        (folder / name).touch()
    environ = {"PYTHONPATH": ":".join([str(forked.TESTS), *filter(None, sys.path)])}
    with contextlib.ExitStack() as stack:
        stands_in = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
        command = [sys.executable, "-c", code, folder, str(stands_in.pid)]
        server = stack.enter_context(subprocess.Popen(command, env=environ))
        stack.callback(server.kill)
        stack.callback(stands_in.kill)
        while not (folder / "socket").exists():
            assert server.poll() is None
            time.sleep(0.01)
        stands_in.kill()
        assert server.wait(60) == 0
    assert not folder.exists()
