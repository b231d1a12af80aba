"""The chaos benchmark's assertions accept a correct story, and find each kind of fault."""

from __future__ import annotations

from dataclasses import replace
from signal import Signals

import pytest

from benchmarks.verdicts import (
    MOMENTS,
    SIGNALS,
    Fault,
    Made,
    Note,
    Schedule,
    Setting,
    Story,
    draw,
    expected,
    judge,
)
from flytekitplugins.daskpytorch import Gang

WORKERS = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
SETTING = Setting(
    num_workers=2,
    ranks_per_worker=1,
    min_workers=None,
    max_restarts=3,
    hang_timeout=None,
    save_interval=2,
    ballast=0,
    heeds_sigterm=True,
    is_warm=True,
)
KILL = Fault(target="rank", signum=Signals.SIGKILL, moment="middle", victim=1)
TERM = Fault(target="driver", signum=Signals.SIGTERM, moment="middle", victim=0)
REASON = f"rank 1 on {WORKERS[1]} after step 3: ended by signal 9, SIGKILL; starting again (failure 1)"


def placed(at: float, workers: list[str] = WORKERS) -> dict[str, object]:
    return {"kind": "placed", "at": at, "workers": workers}


def kept(at: float, step: int) -> dict[str, object]:
    return {"kind": "kept", "at": at, "step": step}


def restarting(at: float, text: str, step: int | None) -> dict[str, object]:
    return {"kind": "restarting", "at": at, "text": text, "step": step}


def trained(attempt: int, start: int, end: int, at: float, num_ranks: int = 2) -> list[Note]:
    return [
        Note(rank, attempt, kind, step, at, 1000 * attempt + rank)
        for rank in range(num_ranks)
        for kind, step in [("start", start), *(("step", step) for step in range(start + 1, end + 1))]
    ]


def made(fault: Fault, *, ranks: set[int] | None = None, is_certain: bool = True) -> Made:
    return Made(fault=fault, at=5.0, ranks=ranks, workers=None, is_certain=is_certain, recovery=1.0)


def killed() -> Story:
    """A rank was killed after step 3, and the gang finished from the checkpoint of step 2."""
    return Story(
        events=[
            placed(1),
            kept(3, 2),
            restarting(6, REASON, 2),
            placed(7),
            kept(8, 4),
            {"kind": "ended", "at": 9, "text": ""},
        ],
        notes=[*trained(0, 0, 3, 2), *trained(1, 2, 6, 8)],
        made=[made(KILL, ranks={1})],
        outcome="finished",
        results=[[6, expected(6)]] * 2,
    )


def stopped() -> Story:
    """The driver was told to end after step 3, and the gang saved that."""
    return Story(
        events=[placed(1), kept(3, 2), kept(6, 3), {"kind": "ended", "at": 7, "text": "PreemptedError: told to end"}],
        notes=trained(0, 0, 3, 2),
        made=[made(TERM)],
        outcome="PreemptedError",
    )


def judged(story: Story, setting: Setting = SETTING) -> str:
    return "\n".join(judge(Schedule(0, 0, setting, tuple(one.fault for one in story.made)), story))


def test_a_story_that_is_right_passes() -> None:
    assert not judged(killed())
    assert not judged(stopped())


def test_a_wrong_result() -> None:
    story = killed()
    story.results[1] = [6, 0]
    assert judged(story) == f"rank 1 returned 0 after 6 steps instead of {expected(6)}"


def test_a_resume_below_the_newest_checkpoint() -> None:
    story = killed()
    story.events.insert(2, kept(3.5, 3))
    assert judged(story) == "attempt 1 starts from step 2, 3 was kept"


def test_a_rank_that_starts_elsewhere_or_skips_a_step() -> None:
    story = killed()
    story.notes = [note for note in story.notes if (note.rank, note.kind, note.step) != (0, "step", 4)]
    assert judged(story) == "rank 0 of attempt 1 took the steps [3, 5, 6] after 2"
    story = killed()
    story.notes = [replace(note, step=0) if note.kind == "start" else note for note in story.notes]
    assert "rank 0 of attempt 1 started from [0], the gang from 2" in judged(story)


@pytest.mark.parametrize("reason", [REASON.replace("rank 1", "rank 0"), REASON.replace("SIGKILL", "SIGSEGV")])
def test_a_wrong_blame(reason: str) -> None:
    story = killed()
    story.events[2] = restarting(6, reason, 2)
    assert "no fault that was made explains it" in judged(story)


def test_a_fault_that_nobody_is_blamed_for() -> None:
    story = killed()
    story.events[2] = restarting(6, "more workers have come", 2)
    assert "SIGKILL rank [1] (middle +0): no rank was blamed for it" in judged(story)


def test_more_failures_than_faults() -> None:
    story = killed()
    story.events[4:4] = [restarting(7.5, REASON, 2), placed(7.6)]
    story.notes = [replace(note, attempt=2) if note.attempt else note for note in story.notes]
    assert "no fault that was made explains it" in judged(story)


def test_a_wrong_end() -> None:
    story = killed()
    story.outcome, story.message = "GangError", "the agent failed"
    assert judged(story).startswith("ended as GangError: the agent failed; allowed: finished")
    assert judged(killed(), replace(SETTING, max_restarts=0)).startswith("ended as finished; allowed: ")
    story = stopped()
    story.outcome = "finished"
    story.results = [[3, expected(3)]] * 2
    assert judged(story) == "ended as finished; allowed: PreemptedError"
    assert judged(stopped(), replace(SETTING, heeds_sigterm=False)).startswith("ended as PreemptedError; allowed: died")


def test_a_stop_that_loses_a_step() -> None:
    story = stopped()
    story.notes += [Note(rank, 0, "step", 4, 5.5, rank) for rank in range(2)]
    assert judged(story).endswith("step 4 was trained, and 3 the newest checkpoint kept")


def test_a_recovery_that_takes_too_long() -> None:
    story = killed()
    story.made[0].recovery = 61.0
    assert judged(story) == "SIGKILL rank [1] (middle +0): 61 s until the gang trained again or had ended"


def test_schedules_are_drawn_from_seed_and_index_alone() -> None:
    assert [draw(3, index) for index in range(50)] == [draw(3, index) for index in reversed(range(50))][::-1]
    assert draw(3, 0) != draw(4, 0)


def test_what_is_drawn_covers_all() -> None:
    faults = [(draw(0, index).setting, fault) for index in range(600) for fault in draw(0, index).faults]
    signals = {(fault.target, fault.signum.name) for _, fault in faults}
    assert signals == {(target, signum) for target, weights in SIGNALS.items() for signum in weights}
    moments = {fault.moment for _, fault in faults}
    assert moments == set(MOMENTS)
    for setting, fault in faults:
        Gang(
            ranks_per_worker=setting.ranks_per_worker,
            min_workers=setting.min_workers,
            max_restarts=setting.max_restarts,
            hang_timeout=setting.hang_timeout,
            start_timeout=setting.start_timeout,
        )
        assert fault.moment not in ("newcomer", "growth") or setting.min_workers is not None
        assert fault.target != "rank" or fault.seconds != 20.0 or setting.hang_timeout is not None
