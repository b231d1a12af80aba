"""`Gang(on_error="hold")` keeps a rank in post-mortem mode after its exception, and the gang still, for a set time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from datetime import timedelta
from pathlib import Path

import pexpect
import pytest
import torch
import torch.distributed as dist

from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
from flytekitplugins.daskpytorch.protocol.debugging import Debugging
from gangs import Notes, on_this_machine
from processes import end, nothing_left_behind, until
from test_attach_integration import start
from test_attach_integration import terminal as attached

HELD = "rank 1 .* raised ValueError: bad value 31, and waits up to .* The gang holds its 2 ranks meanwhile"
SCRIPT = """
    import torch
    import torch.distributed as dist
    from flytekitplugins.daskpytorch import current_rank

    def step(number, rank):
        value = 10 * number + rank
        if value == 31:
            raise ValueError(f"bad value {value}")

    dist.init_process_group()
    for number in range(5):
        step(number, current_rank().rank)
        dist.all_reduce(torch.ones(1))
"""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(temporary))  # this test's gangs alone
    with nothing_left_behind():
        yield


def fail(folder: str) -> None:
    Path(folder, str(current_rank().rank)).write_text(str(os.getpid()))
    for number in range(5):
        value = 10 * number + current_rank().rank
        if value == 31:
            raise ValueError(f"bad value {value}")
        dist.all_reduce(torch.ones(1))


def test_held_rank_is_looked_at_and_then_its_error_is_the_gangs() -> None:
    options = ["--nproc", "2", "--on-error", "hold", "--hang-timeout", "2.5", "--max-restarts", "0"]
    run, log = start(SCRIPT, *options)
    try:
        until(lambda: ": daskpytorch attach 1" in log.read_text(), log.read_text)
        terminal = attached("1")
        terminal.expect_exact("raised ValueError: bad value 31")
        terminal.expect_exact("(Pdb rank 1) ")
        terminal.sendline("p value * 2")
        terminal.expect_exact("\r\n62\r\n(Pdb rank 1) ")
        terminal.sendline("q")
        terminal.expect_exact("the rank has ended")
        terminal.expect(pexpect.EOF)
        assert run.wait(100) == 1
    finally:
        end(run)
    assert "\nValueError: bad value 31" in log.read_text()


def test_rank_to_which_nobody_attaches_is_held_for_the_stated_time(tmp_path: Path) -> None:
    notes = Notes()
    settings = {"on_error": "hold", "attach_timeout": 10.0, "hang_timeout": 2.0, "max_restarts": 0}
    begun_at = time.monotonic()
    futures = on_this_machine(fail, str(tmp_path), observers=[notes], **settings)
    with pytest.raises(ValueError, match="bad value 31"):
        futures.result(timeout=200)
    assert time.monotonic() - begun_at >= settings["attach_timeout"]
    assert len(notes.told(HELD)) == 1


def test_error_of_a_held_rank_is_the_cause_of_what_comes_later(tmp_path: Path) -> None:
    notes = Notes()
    futures = on_this_machine(fail, str(tmp_path), observers=[notes], on_error="hold", max_restarts=0)
    until(lambda: notes.told(HELD), lambda: str(notes.texts))
    os.kill(int((tmp_path / "0").read_text()), 9)
    with pytest.raises(ValueError, match="bad value 31"):
        futures.result(timeout=200)


def test_gang_that_stays_goes_on_after_a_held_call() -> None:
    def call(rank: int) -> int:
        if current_rank().rank == rank:
            raise ValueError("bad value")
        return current_rank().rank

    with dispatch.gang(nproc=2, gang=Gang(on_error="hold", attach_timeout=4.0, hang_timeout=2.0)) as gang:
        with pytest.raises(TypeError, match="cannot be called with the arguments given"):  # holds no rank
            gang.call(call)
        with pytest.raises(ValueError, match="bad value"):
            gang.call(call, 1).result(timeout=200)
        assert gang.call(call, 7).result(timeout=200) == [0, 1]


def raise_alone() -> None:
    raise ValueError("bad value")


def stop_alone() -> None:
    breakpoint()  # noqa: T100


@pytest.mark.parametrize("function", [raise_alone, stop_alone])
def test_cancel_ends_a_call_in_which_a_rank_waits_for_a_terminal(
    capfd: pytest.CaptureFixture[str], function: Callable[[], None]
) -> None:
    said: list[str] = []

    def is_waiting() -> bool:
        said.append(capfd.readouterr().err)
        return ": daskpytorch attach 0" in "".join(said)

    with dispatch.gang(nproc=1, gang=Gang(on_error="hold", attach_timeout=600.0)) as gang:
        futures = gang.call(function)
        until(is_waiting, lambda: "".join(said))
        assert futures.cancel()
        with pytest.raises(CancelledError):
            futures.result(timeout=200)
        assert gang.call(os.getpid).result(timeout=200)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Gang(), None),
        (Gang(attach_timeout=60), None),
        (Gang(on_error="hold", attach_timeout=60), timedelta(hours=1, seconds=60)),
    ],
)
def test_collectives_wait_longer_than_a_rank_is_held(settings: Gang, expected: timedelta | None) -> None:
    assert Debugging().patience(settings) == expected
