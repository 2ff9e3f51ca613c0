"""An engine's processes among the children of a process, of which some are forked by another one."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import multiprocessing, time
    import psutil
    from paceline.rollout.engines.processes import EngineProcesses, end_all_children

    if __name__ == "__main__":
        own = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        own.start()
        engine = EngineProcesses()
        core = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
        core.start()
        other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        other.start()
        tracker = {c.pid for c in psutil.Process().children() if "resource_tracker" in " ".join(c.cmdline())}
        engine.settle()
        print({child.pid for child in engine.children()} - tracker == {core.pid, other.pid})
        end_all_children()
        left = {c.pid for c in psutil.Process().children(recursive=True) if c.status() != "zombie"}
        print(left - tracker)
    """
)


def test_what_a_fork_server_started_counts_and_everything_ends(tmp_path: object) -> None:
    script = f"{tmp_path}/script.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["True", "set()"], done.stderr
