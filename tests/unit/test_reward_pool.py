"""The function pool: right results in order, and every way in which a reward function can fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from paceline.config.reward import RewardConfig, RewardFunctionConfig
from paceline.core.errors import (
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    RewardError,
    RewardErrorKind,
)
from paceline.core.scoring import ScoreItem
from paceline.reward.app import consumer_options, scorer_settings
from paceline.reward.functions.pool import FunctionPool
from paceline.reward.functions.spec import FunctionSpec
from paceline.reward.scoring.scores import Score
from paceline.reward.scoring.shape import Shape
from paceline.service.children.process import ChildLimits
from paceline.service.member.controller_link import Registration
from support import cli_configs

OBEDIENT = FunctionSpec(name="f", reference="support.reward_functions:obedient")
LENGTH = FunctionSpec(name="length", reference="support.reward_functions:length", shape=Shape(weight=0.5))


def items(*responses: str, **extra: object) -> list[ScoreItem]:
    return [
        ScoreItem(trajectory_id=f"t{index}", prompt="", response=response, ground_truth="", extra=extra)
        for index, response in enumerate(responses)
    ]


def kinds(results: list[Score]) -> list[str]:
    return [result.error[0].value if result.error else str(result.reward) for result in results]


def message(result: Score) -> str:
    assert result.error is not None
    return result.error[1]


DRAWING = """\
import os, random
import numpy as np

first = random.random()

def draw(response, truth):
    if response == "exit":
        os._exit(3)
    if response == "fork":
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return {"score": random.random(), "numpy": float(np.random.random()), "first": first}

def draw_for_group(items):
    return [draw(item.response, "") for item in items]
"""


async def drawn(file: Path, seed: str | None, *, group: bool = False) -> list[float]:
    """What a pool's processes draw one after the other: the second is the replacement of the first."""
    spec = FunctionSpec(
        name="draw",
        reference=f"{file}:{'draw_for_group' if group else 'draw'}",
        shape=Shape(group=group),
    )
    numbers: list[float] = []
    async with FunctionPool([spec], num_processes=1, timeout_s=60, seed=seed) as pool:
        for response in ("a", "fork", "b", "exit", "a"):
            (score,) = await pool.score(items(response))
            assert (score.error is not None) is (response == "exit")
            numbers += score.components.values()
    return numbers


async def test_random_numbers_follow_from_the_seed_and_differ_between_processes(tmp_path: Path) -> None:
    file = tmp_path / "drawing.py"
    file.write_text(DRAWING)
    numbers = await drawn(file, "7/reward-0")
    assert numbers == await drawn(file, "7/reward-0")
    # Three calls of a process and one of the next: only the draws of their imports come again.
    assert len(numbers) == 12
    assert len(set(numbers)) == (1 + 3 * 2) + (1 + 2)
    others = [
        await drawn(file, "8/reward-0"),
        await drawn(file, "7/reward-1"),
        await drawn(file, "7/reward-0", group=True),
        await drawn(file, None),
    ]
    assert all(set(numbers).isdisjoint(other) for other in others)


def test_the_seed_is_the_runs_and_the_members() -> None:
    registration = Registration(
        run_id="r", run_dir=Path(), broker_url="", heartbeat_s=1.0, term=1, policy=None, checkpoints=(),
        config=cli_configs.config(trainer={"total_steps": 2, "seed": 5}),
    )  # fmt: skip
    settings = scorer_settings(registration, "reward-3")
    assert settings.seed == "5/reward-3"
    config = RewardConfig(functions=(RewardFunctionConfig(name="gsm8k"),))
    (pool,) = FunctionPool.configured(replace(settings, config=config))
    assert pool._seed == "5/reward-3"


@pytest.mark.parametrize(
    ("changes", "saves_texts", "max_entries"),
    [
        ({"trainer": {"total_steps": 2}}, True, 128),
        ({"trainer": {"total_steps": 2, "save_trajectories": False}}, False, 128),
        # The dataflow's function reads them.
        (
            {"trainer": {"total_steps": 2, "save_trajectories": False, "dataflow": "my.py:flow"}},
            True,
            128,
        ),
        ({"reward": {"functions": [{"name": "gsm8k", "group": True}]}, "rollout": {"n": 5}}, True, 25),
    ],
)
def test_the_run_says_whether_texts_stay_and_how_much_is_taken_at_a_time(
    changes: dict[str, Any], saves_texts: bool, max_entries: int
) -> None:
    registration = Registration(
        run_id="r", run_dir=Path(), broker_url="", heartbeat_s=1.0, term=1, policy=None, checkpoints=(),
        config=cli_configs.config(**changes),
    )  # fmt: skip
    options = consumer_options(registration, "reward-3", "4")
    assert (options.save_texts, options.max_entries) == (saves_texts, max_entries)
    assert (options.member_id, options.incarnation) == ("reward-3", "4")


async def test_results_come_in_order_with_their_components() -> None:
    async with FunctionPool([LENGTH, OBEDIENT], num_processes=2, timeout_s=30) as pool:
        texts = ["x" * (index % 7) for index in range(500)]
        results = await pool.score(items(*texts))
        assert [result.trajectory_id for result in results] == [f"t{index}" for index in range(500)]
        assert [result.reward for result in results] == [0.5 * len(text) + 1.0 for text in texts]
        assert results[6].components == {"length": 6.0, "f": 1.0}
        several = await asyncio.gather(*(pool.score(items("a" * n)) for n in range(20)))
        assert [scores[0].reward for scores in several] == [0.5 * n + 1.0 for n in range(20)]
        assert await pool.score([]) == []
        assert pool.num_replaced == 0


def num_children() -> int:
    """How many reward processes there are; one may end between the list and the look at it."""
    num_found = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            is_ours = "paceline.reward.functions.child" in child.cmdline()
            num_found += is_ours and child.status() != psutil.STATUS_ZOMBIE
    return num_found


async def test_processes_follow_the_queue_up_to_a_bound_and_back() -> None:
    pool = FunctionPool([OBEDIENT], num_processes=1, max_processes=3, timeout_s=10, idle_s=0.3)
    async with pool, asyncio.timeout(300):
        assert kinds(await pool.score(items("sleep:0.01"))) == ["1.0"]
        assert num_children() == 1
        most = 1
        # Where a process takes long to start, the first ones may have done all work by then.
        while most < 3:
            scoring = asyncio.create_task(pool.score(items(*["sleep:0.2"] * 70)))
            while not scoring.done():
                most = max(most, num_children())
                await asyncio.sleep(0.05)
            assert kinds(scoring.result()) == ["1.0"] * 70
        assert most == 3
        while num_children() > 1:  # noqa: ASYNC110  a test's own look
            await asyncio.sleep(0.05)
        assert kinds(await pool.score(items("a", "exit", "b"))) == ["1.0", "crashed", "1.0"]
        assert pool.num_replaced == 1
    assert num_children() == 0


async def test_a_process_that_is_added_and_dies_is_replaced_and_one_that_starts_ends_with_the_pool() -> None:
    async with (
        FunctionPool([OBEDIENT], num_processes=1, max_processes=2, timeout_s=10, idle_s=0.3) as pool,
        asyncio.timeout(300),
    ):
        orders = [*["sleep:0.2"] * 25, *["exit", "sleep:0.2"] * 5]
        results = kinds(await pool.score(items(*orders)))
        assert results == ["1.0"] * 25 + ["crashed", "1.0"] * 5
        closing = asyncio.create_task(pool.score(items(*["sleep:0.3"] * 40)))
        while num_children() < 2:  # noqa: ASYNC110  a test's own look
            await asyncio.sleep(0.01)
    with pytest.raises(RewardError, match="the function pool was closed"):
        await closing
    assert num_children() == 0


async def test_a_hanging_function_costs_only_its_item() -> None:
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=3.0) as pool:
        started = time.monotonic()
        results = await pool.score(items("a", "b", "hang", "c", "d"))
        took = time.monotonic() - started
        assert kinds(results) == ["1.0", "1.0", "timeout", "1.0", "1.0"]
        assert message(results[2]) == "not scored within 3 s"
        assert 3.0 <= results[2].seconds <= took
        assert pool.num_replaced == 1


async def test_crashes_are_told_apart_and_the_processes_replaced() -> None:
    async with FunctionPool([OBEDIENT], num_processes=2, timeout_s=30) as pool:
        results = await pool.score(items("a", "exit", "b", "segfault", "c"))
        assert kinds(results) == ["1.0", "crashed", "1.0", "crashed", "1.0"]
        assert message(results[1]) == "the reward process ended: exit code 3"
        assert message(results[3]) == "the reward process ended: killed by SIGSEGV"
        assert pool.num_replaced == 2
        assert kinds(await pool.score(items("after"))) == ["1.0"]


async def test_running_out_of_memory_is_a_crash() -> None:
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=30) as pool:
        results = await pool.score(items("a", "memory", "b"))
        assert kinds(results) == ["1.0", "crashed", "1.0"]
        assert message(results[1]) == "the reward process ended: out of memory"


async def test_what_a_function_raises_or_returns_is_its_items_error() -> None:
    orders = {
        "raise": ("raised", "f raised KeyError: 'no\\nsuch\\ncolumn'"),
        "sys_exit": ("raised", "f raised SystemExit: 4"),
        "timeout_error": ("timeout", "f raised TimeoutError: the judge was slow"),
        "connection_error": ("unavailable", "f raised ConnectionRefusedError: the judge is down"),
        "return:nan": ("not_finite", "f returned nan"),
        "return:str": ("wrong_type", "f returned str: return a float, or a dict of floats"),
        "return:none": ("wrong_type", "f returned NoneType: return a float, or a dict of floats"),
        "return:bool": ("wrong_type", "f returned bool: return a float, or a dict of floats"),
        "numpy:bool": ("wrong_type", "f returned bool: return a float, or a dict of floats"),
        "return:no_score": (
            "wrong_type",
            "f returned a dict that holds 'length': put its value under \"score\"",
        ),
    }
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=30) as pool:
        results = await pool.score(items(*orders, "return:dict", "numpy:float"))
        assert [(result.error[0].value, result.error[1]) for result in results if result.error] == list(
            orders.values()
        )
        assert all(result.reward is None and result.components == {} for result in results if result.error)
        assert results[-2].reward == 0.5
        assert results[-2].components == {"f": 0.5, "f/length": 3.0, "f/share": 0.25}
        assert results[-1].reward == 0.5
        assert pool.num_replaced == 0


async def test_odd_objects_and_texts_are_their_items_errors_and_no_more() -> None:
    orders = {
        "return:odd_dict": ("raised", "what a reward function returned raised RuntimeError: odd \\ud800"),
        "return:shy_key": ("raised", "what a reward function returned raised RuntimeError: no"),
        "return:shy": ("wrong_type", "f returned _Shy: return a float, or a dict of floats"),
        "surrogate": ("raised", "f raised ValueError: half \\ud83d of a pair"),
    }
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=30) as pool:
        results = await pool.score(items(*orders, "recurse", "return:surrogate_key", "fork", "a"))
        told = [(score.error[0].value, score.error[1]) for score in results[:4] if score.error]
        assert told == list(orders.values())
        assert kinds(results[4:]) == ["raised", "1.0", "1.0", "1.0"]
        assert "RecursionError" in message(results[4])
        assert results[5].components == {"f": 1.0, "f/\\udc80": 2.0}
        # The copy that the function forked neither answers nor takes requests.
        assert kinds(await pool.score(items("fork", "a", "b"))) == ["1.0"] * 3
        assert pool.num_replaced == 0


@pytest.mark.parametrize("what", ["list", "key", "row"])
async def test_junk_in_the_results_costs_a_process_and_not_the_service(what: str) -> None:
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=30) as pool:
        results = await pool.score(items("a", f"junk:{what}", *"bcdefgh"))
        assert [score.trajectory_id for score in results] == [f"t{index}" for index in range(9)]
        # However far the process was when the junk was read, the item that wrote it is the one at fault.
        assert kinds(results) == ["1.0", "crashed", *["1.0"] * 7]
        assert message(results[1]) == "the reward process sent no readable result"
        assert kinds(await pool.score(items("after"))) == ["1.0"]


async def test_prints_and_reads_do_not_touch_the_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=30) as pool:
        assert kinds(await pool.score(items("print", "read", "print", "a"))) == ["1.0", "0.0", "1.0", "1.0"]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("printed by a reward function") == 2
    assert err.count("printed by its child") == 2


async def test_a_second_attempt_can_save_an_item(tmp_path: Path) -> None:
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=3.0) as pool:
        asked = items("a", f"hang_once:{tmp_path / 'seen'}", "hang", "b")
        assert kinds(await pool.score(asked)) == ["1.0", "timeout", "timeout", "1.0"]
        assert kinds(await pool.score(asked)) == ["1.0", "1.0", "timeout", "1.0"]
        assert pool.num_replaced == 3


async def test_the_deadline_is_the_items_not_the_batchs() -> None:
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=4.0) as pool:
        started = time.monotonic()
        results = await pool.score(items(*["sleep:1.0"] * 5))
        took = time.monotonic() - started
        assert kinds(results) == ["1.0"] * 5
        assert pool.num_replaced == 0
        assert all(result.seconds >= 1.0 for result in results)
        assert sum(result.seconds for result in results) <= took


async def test_a_kill_takes_the_functions_children_along(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=5.0) as pool:
        assert kinds(await pool.score(items("hang_with_child", pid_file=str(pid_file)))) == ["timeout"]
    assert gone(int(pid_file.read_text()))


async def test_a_stopped_process_is_replaced() -> None:
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=3.0) as pool:
        pid = (await pool.score(items("pid")))[0].reward
        assert pid is not None
        os.kill(int(pid), signal.SIGSTOP)
        assert kinds(await pool.score(items("a", "b"))) == ["timeout", "1.0"]
        assert not alive(int(pid))


async def test_extra_fields_reach_the_functions_that_name_them() -> None:
    spec = FunctionSpec(name="f", reference="support.reward_functions:tells_fields", arguments={"level": 9})
    item = ScoreItem(
        trajectory_id="t", response="", ground_truth="", prompt="four", data_source="xy", extra={"other": [1]}
    )
    async with FunctionPool([spec], num_processes=1, timeout_s=30) as pool:
        assert (await pool.score([item]))[0].reward == 429.0
    needs = FunctionSpec(name="f", reference="support.reward_functions:needs_field")
    async with FunctionPool([needs], num_processes=1, timeout_s=30) as pool:
        assert (await pool.score(items("a", difficulty=np.float32(0.5))))[0].reward == 0.5
        assert message((await pool.score(items("a")))[0]).startswith(
            "support.reward_functions:needs_field needs difficulty, which the item does not have"
        )


async def test_fields_that_cannot_be_sent_fail_alone() -> None:
    odd = ScoreItem(trajectory_id="odd", prompt="", response="", ground_truth="", extra={"handle": object()})
    shadowing = ScoreItem(trajectory_id="t", prompt="", response="", ground_truth="", extra={"response": "x"})
    broken_text = ScoreItem(
        trajectory_id="half a surrogate pair", prompt="", response="\ud83d", ground_truth="\ud83d"
    )
    async with FunctionPool(
        [FunctionSpec(name="f", reference="exact_match")], num_processes=1, timeout_s=10
    ) as pool:
        results = await pool.score([*items(""), odd, broken_text, shadowing])
        assert kinds(results) == ["1.0", "wrong_type", "1.0", "wrong_type"]
        assert "may not be named response: rename the columns" in message(results[3])
        assert "a value of type object cannot be sent" in message(results[1])
        assert kinds(await pool.score([odd])) == ["wrong_type"]


@pytest.mark.parametrize(
    ("body", "kind", "sentence"),
    [
        ("x = 1", ConfigError, "has no 'f'"),
        ("raise OSError('no model here')", ConfigError, "raised OSError: no model here"),
        ("import time; time.sleep(3600)", DeadlineError, "imports .*slow.py:f within 1 s; the import"),
        ("import os; os._exit(5)", PeerLostError, "died while importing .*: exit code 5"),
    ],
)
async def test_start_tells_what_is_wrong_and_leaves_nothing(
    tmp_path: Path, body: str, kind: type[Exception], sentence: str
) -> None:
    limits = ChildLimits(start_s=1 if kind is DeadlineError else 60)
    (tmp_path / "slow.py").write_text(body)
    spec = FunctionSpec(name="f", reference=f"{tmp_path}/slow.py:f")
    pool = FunctionPool([spec], num_processes=2, timeout_s=1, limits=limits)
    with pytest.raises(kind, match=sentence):
        await pool.start()
    assert children() == []


async def test_close_ends_waiting_calls_and_leaves_no_process() -> None:
    pool = FunctionPool([OBEDIENT], num_processes=2, timeout_s=60)
    await pool.start()
    waiting = asyncio.create_task(pool.score(items("hang", "a")))
    await asyncio.sleep(0.1)
    await pool.close()
    with pytest.raises(RewardError, match="the function pool was closed") as caught:
        await waiting
    assert caught.value.kind is RewardErrorKind.UNAVAILABLE
    assert children() == []


async def test_a_cancelled_call_leaves_the_pool_usable() -> None:
    async with FunctionPool([OBEDIENT], num_processes=1, timeout_s=30) as pool:
        waiting = asyncio.create_task(pool.score(items(*["sleep:0.5"] * 400)))
        await asyncio.sleep(0.1)
        waiting.cancel()
        async with asyncio.timeout(60):  # and not the two hundred seconds of the cancelled call
            assert kinds(await pool.score(items("a"))) == ["1.0"]


async def test_processes_that_cannot_be_replaced_end_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.reward.functions.pool._RESTART_PAUSES_S", (0.0, 0.01))
    path = tmp_path / "fleeting.py"
    path.write_text("import os\ndef f(response, ground_truth):\n    os._exit(1)\n")
    async with FunctionPool(
        [FunctionSpec(name="f", reference=f"{path}:f")], num_processes=1, timeout_s=10
    ) as pool:
        path.unlink()
        assert kinds(await pool.score(items("a"))) == ["crashed"]
        with pytest.raises(RewardError, match=r"no reward processes: .*there is no file"):
            await pool.score(items("a"))
        with pytest.raises(RewardError, match="no reward processes"):
            await pool.score(items("a"))


def test_processes_die_with_their_parent() -> None:
    code = (
        "import asyncio, os, signal\n"
        "from paceline.core.scoring import ScoreItem\n"
        "from paceline.reward.functions.spec import FunctionSpec\n"
        "from paceline.reward.functions.pool import FunctionPool\n"
        "async def main():\n"
        f"    spec = FunctionSpec(name='f', reference={OBEDIENT.reference!r})\n"
        "    pool = FunctionPool([spec], num_processes=1, timeout_s=60)\n"
        "    await pool.start()\n"
        "    item = lambda text: ScoreItem(trajectory_id='t', prompt='', response=text, ground_truth='')\n"
        "    print(int((await pool.score([item('pid')]))[0].reward), flush=True)\n"
        "    await pool.score([item('hang')])\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        assert alive(child)
        parent.kill()
    assert gone(child)


async def test_math_verify_and_its_own_deadline_work_in_a_child_process() -> None:
    spec = FunctionSpec(name="f", reference="math_verify", arguments={"timeout_s": 4})
    undecided = "$9^{9^{9^{9}}}$"
    tasks = [
        ScoreItem(trajectory_id=text, prompt="", response=text, ground_truth="1/2")
        for text in ("\\boxed{0.5}", undecided, "2")
    ]
    async with FunctionPool([spec], num_processes=1, timeout_s=30) as pool:
        results = await pool.score(tasks)
        assert kinds(results) == ["1.0", "timeout", "0.0"]
        assert message(results[1]) == "f raised TimeoutError: math_verify did not decide within 4 s"
        assert pool.num_replaced == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_processes": 0, "timeout_s": 1.0}, "num_processes is 0"),
        ({"num_processes": 1, "timeout_s": 0.0}, "timeout_s is 0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        FunctionPool([OBEDIENT], **options)


async def test_score_needs_a_started_pool() -> None:
    with pytest.raises(ProtocolError, match="call start"):
        await FunctionPool([OBEDIENT], num_processes=1, timeout_s=1).score(items("a"))


async def test_throughput_is_reported(record_property: pytest.RecordProperty) -> None:
    spec = FunctionSpec(name="gsm8k", reference="gsm8k")
    many = [
        ScoreItem(
            trajectory_id=f"run/1/{n}/0",
            prompt="",
            response="a thought " * 50 + f"#### {n}",
            ground_truth=str(n),
        )
        for n in range(4_000)
    ]
    async with FunctionPool([spec], num_processes=2, timeout_s=30) as pool:
        await pool.score(many[:500])
        started = time.monotonic()
        results = await pool.score(many)
        seconds = time.monotonic() - started
    assert all(result.reward == 1.0 for result in results)
    record_property("microseconds_per_item", round(seconds / len(many) * 1e6, 1))
    print(f"{seconds / len(many) * 1e6:.1f} us per item, {len(many) / seconds:.0f} items/s with 2 processes")


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def gone(pid: int) -> bool:
    """Whether the process ends: a signal takes effect a little after it was sent."""
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def children() -> list[int]:
    running = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "paceline.reward.functions.child" in " ".join(child.cmdline()):
                running.append(child.pid)
    return running
