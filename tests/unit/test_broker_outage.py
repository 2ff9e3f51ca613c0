"""When an outage begins, is announced, ends and is given up, on a clock that the test sets."""

from __future__ import annotations

import ssl
from dataclasses import replace

import pytest
from redis import exceptions

from paceline.broker.redis.outage import Attempts, Outage, Trouble
from paceline.broker.redis.redis_errors import is_missing, trouble_of
from paceline.core.errors import BrokerError
from paceline.service.observability import metrics
from support.clocks import ManualClock
from support.measured import measured

GONE = Trouble(state="is gone", remedy="bring it back")


class Client:
    """An outage with its clock and what it said."""

    def __init__(self, timeout_s: float = 100.0) -> None:
        self.clock = ManualClock(now=1000.0)
        self.said: list[str] = []
        self.outage = Outage(
            "redis://x",
            timeout_s=timeout_s,
            on_outage=self.said.append,
            on_recovery=self.said.append,
            clock=self.clock,
        )

    def command(self, name: str = "XADD", limit_s: float | None = None) -> Attempts:
        return Attempts(self.outage, name, limit_s=limit_s)


def test_pauses_grow_to_a_second_and_end_with_the_bound() -> None:
    client, pauses = Client(timeout_s=3.0), []
    with client.command() as attempts, pytest.raises(BrokerError) as caught:
        while True:
            pauses.append(attempts.failed(GONE))
            client.clock.advance(pauses[-1])
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 0.45])
    assert str(caught.value) == (
        "XADD: broker redis://x is gone, for 3.0 s now; "
        "commands wait 3 s (broker.outage_timeout_s): bring it back"
    )


def test_it_is_said_once_after_two_seconds_and_once_when_it_is_over() -> None:
    client = Client()
    with client.command() as first, client.command() as second:
        for seconds in (0.0, 1.9):
            client.clock.advance(seconds)
            first.failed(GONE)
            second.failed(GONE)
        assert client.said == []
        client.clock.advance(0.1)
        first.failed(GONE)
        second.failed(GONE)
        assert client.said == ["broker redis://x is gone; waiting up to 100 s: bring it back"]
        client.clock.advance(5.0)
        first.answered()
        second.answered()
    assert client.said[1:] == ["broker redis://x is back after 7 s"]


def test_a_short_outage_is_not_worth_a_word() -> None:
    client = Client()
    with client.command() as attempts:
        attempts.failed(GONE)
        client.clock.advance(1.9)
        attempts.answered()
    assert client.said == []
    assert not client.outage.is_on


def test_what_a_person_has_to_end_is_said_at_once_even_after_another_cause() -> None:
    """A server on a full disk is silent first, while it tries to write: that sentence alone would mislead."""
    text = "MISCONF Errors writing to the AOF file: No space left on device"
    full = trouble_of(exceptions.ResponseError(text), timeout_s=7.0)
    assert full is not None
    sentence = (
        "broker redis://x cannot write its data to disk (No space left on device); waiting up to 100 s: make "
        "room on its disk (for the run's own server, the run directory's); see its log"
    )
    at_once, later = Client(), Client()
    with at_once.command() as attempts:
        attempts.failed(full)
        assert at_once.said == [sentence]
        at_once.clock.advance(3.0)
        attempts.failed(full)
        attempts.failed(GONE)
        attempts.failed(full)
        attempts.answered()
    assert at_once.said == [sentence, "broker redis://x is back after 3 s"]
    with later.command() as attempts:
        attempts.failed(GONE)
        later.clock.advance(2.0)
        attempts.failed(GONE)
        attempts.failed(full)
        attempts.failed(full)
        assert later.said == ["broker redis://x is gone; waiting up to 100 s: bring it back", sentence]
        attempts.answered()
    assert len(later.said) == 3
    with later.command() as attempts:
        attempts.failed(full)
    assert later.said[3:] == [sentence]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("MISCONF Errors writing to the AOF file: Input/output error", " (Input/output error)"),
        (
            "@user_script:3: -MISCONF Errors writing to the AOF file: No space left on device script: 1f",
            " (No space left on device)",
        ),
        ("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist", ""),
    ],
)
def test_a_disk_that_is_at_fault_is_named_with_what_the_server_says_of_it(text: str, state: str) -> None:
    trouble = trouble_of(exceptions.ResponseError(text), timeout_s=7.0)
    assert trouble is not None
    assert trouble.state == f"cannot write its data to disk{state}"


def test_readers_of_a_full_server_do_not_end_the_outage_of_its_writers() -> None:
    client = Client(timeout_s=10.0)
    with client.command("XADD") as writer:
        for _ in range(9):
            writer.failed(GONE)
            client.clock.advance(1.0)
            with client.command("XLEN") as reader:
                reader.answered()
        client.clock.advance(1.0)
        with pytest.raises(BrokerError, match="10 s"):
            writer.failed(GONE)
    assert len(client.said) == 1


def test_another_writer_that_gets_through_gives_the_others_their_time_again() -> None:
    client = Client(timeout_s=10.0)
    with client.command() as first, client.command() as second:
        first.failed(GONE)
        second.failed(GONE)
        client.clock.advance(9.0)
        first.answered()
        client.clock.advance(9.0)
        assert second.failed(GONE) > 0
        client.clock.advance(9.0)
        assert second.failed(GONE) > 0


def test_once_given_up_commands_fail_at_once_until_one_gets_through() -> None:
    client = Client(timeout_s=10.0)
    with client.command() as attempts:
        attempts.failed(GONE)
        client.clock.advance(10.0)
        with pytest.raises(BrokerError):
            attempts.failed(GONE)
    with client.command() as attempts, pytest.raises(BrokerError):
        attempts.failed(GONE)
    with client.command() as attempts:
        attempts.answered()
    with client.command() as attempts:
        assert attempts.failed(GONE) > 0


def test_a_cancelled_command_waits_no_longer() -> None:
    client = Client()
    with pytest.raises(KeyboardInterrupt), client.command() as attempts:
        attempts.failed(GONE)
        raise KeyboardInterrupt
    with client.command() as other:
        other.answered()
    assert not client.outage.is_on


def test_silence_counts_from_its_beginning() -> None:
    client = Client(timeout_s=10.0)
    frozen = Trouble(state="has not answered for 4 s", remedy="look", silent_s=4.0)
    with client.command() as attempts:
        attempts.failed(frozen)
        assert len(client.said) == 1
        client.clock.advance(6.0)
        with pytest.raises(BrokerError):
            attempts.failed(frozen)


def test_a_command_may_wait_less_than_the_others() -> None:
    client = Client()
    with client.command(limit_s=5.0) as short, client.command() as usual:
        short.failed(GONE)
        usual.failed(GONE)
        client.clock.advance(5.0)
        with pytest.raises(BrokerError, match="wait 5 s"):
            short.failed(GONE)
        assert usual.failed(GONE) > 0


def test_an_outage_is_recent_for_a_while() -> None:
    client = Client()
    assert not client.outage.is_recent(1000.0)
    with client.command() as attempts:
        attempts.failed(GONE)
        assert client.outage.is_recent(0.0)
        attempts.answered()
    client.clock.advance(4.0)
    assert client.outage.is_recent(5.0)
    assert not client.outage.is_recent(4.0)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "cannot be reached"),
        (exceptions.ConnectionError("Connection reset by peer"), "cannot be reached"),
        (exceptions.ConnectionError("max number of clients reached"), "cannot be reached"),
        (TimeoutError(), "has not answered for 7 s"),
        (exceptions.TimeoutError("Timeout connecting to server"), "has not answered"),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "is still loading"),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), "is a replica"),
        (
            exceptions.ResponseError("Error running script: @user_script:1: -READONLY You can't"),
            "is a replica",
        ),
        (exceptions.MasterDownError("Link with MASTER is down"), "is a replica that has lost"),
        (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "is full"),
        (exceptions.ResponseError("Error running script: @user_script: 9: OOM command not"), "is full"),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file: No space left"), "cannot write"),
        (exceptions.ResponseError("BUSY Redis is busy running a script."), "is busy"),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."), "has too few"),
    ],
)
def test_what_waiting_mends(error: Exception, state: str) -> None:
    trouble = trouble_of(error, timeout_s=7.0)
    assert trouble is not None
    assert trouble.state.startswith(state)


def certificate_error() -> Exception:
    error = exceptions.ConnectionError("Error 1 connecting to host:1. certificate verify failed")
    error.__context__ = ssl.SSLCertVerificationError("certificate verify failed")
    return error


@pytest.mark.parametrize(
    "error",
    [
        exceptions.AuthenticationError("invalid username-password pair"),
        exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        exceptions.ResponseError("WRONGTYPE paceline:OOM :READONLY is a string, not a stream"),
        exceptions.ResponseError("unknown command 'XGROUP'"),
        exceptions.NoPermissionError("this user has no permissions"),
        certificate_error(),
    ],
)
def test_what_waiting_does_not_mend(error: Exception) -> None:
    assert trouble_of(error, timeout_s=7.0) is None


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("NOGROUP No such key 's' or consumer group 'g' in XREADGROUP with GROUP option", True),
        ("Error running script: @user_script:4: @user_script: 4: NOGROUP No such key 's'", True),
        ("UNBLOCKED the stream key no longer exists", True),
        ("The XGROUP subcommand requires the key to exist.", True),
        ("WRONGTYPE the key NOGROUP is a string", False),
    ],
)
def test_what_a_missing_stream_reads_like(text: str, missing: bool) -> None:
    assert is_missing(exceptions.ResponseError(text)) is missing


def test_its_seconds_are_counted_while_it_lasts() -> None:
    with measured() as read:
        client = Client()
        assert read(metrics.BROKER_OUTAGE) == {"": 0}
        with client.command() as attempts:
            for seconds in (0.0, 1.5, 2.0):
                client.clock.advance(seconds)
                attempts.failed(GONE)
            assert read(metrics.BROKER_OUTAGE) == {"": 3.5}
            client.clock.advance(1.0)
            attempts.answered()
        client.clock.advance(60.0)
        with client.command() as attempts:
            attempts.answered()
            attempts.failed(replace(GONE, silent_s=10.0))
        assert read(metrics.BROKER_OUTAGE) == {"": 14.5}
