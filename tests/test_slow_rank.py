"""A slow rank or link is named with its cause, and noise, evaluations and pipelines name none."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed import Client
from torch import distributed as dist

import fake_gpus
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
from flytekitplugins.daskpytorch.driver.slow_rank import MAX_TIMINGS, MIN_TIMED, SlowRankWatch
from flytekitplugins.daskpytorch.protocol.failure import MAX_COLLECTIVES
from flytekitplugins.daskpytorch.protocol.reports import Entered, Timed
from flytekitplugins.daskpytorch.rank import entries, flight_recorder
from flytekitplugins.daskpytorch.rank.entries import Entries
from flytekitplugins.daskpytorch.rank.usage import Ledger
from gangs import Notes

pytestmark = pytest.mark.timeout(300)
STEP = 0.1
NUM_RANKS = 3
Lateness = Callable[[int, int, random.Random], float]
"""Seconds by which a rank enters a step's collective after the earliest: of rank, step and chance."""


def reports_of(
    lateness: Lateness,
    num_windows: int = 5,
    *,
    clocks: Mapping[int, float] | None = None,
    buckets: int = 1,
    link: float = 0.0,
    resolution: float = 0.002,
    length: float = STEP,
) -> Iterable[tuple[int, Entered, float]]:
    """Yield rank, report and time of arrival of each report: of `length` seconds a step, and ten seconds a window.

    A collective takes 1 ms, and `link` longer in rank 1. Ends are looked for at random times.
    """
    chance, num_steps = random.Random(1), round(10.0 / length)
    for window in range(1, num_windows + 1):
        steps = range(num_steps * window - min(32 // buckets, num_steps), num_steps * window)
        late = {step: [lateness(rank, step, chance) for rank in range(NUM_RANKS)] for step in steps}
        for rank in range(NUM_RANKS):
            clock = (clocks or {}).get(rank, 0.0)
            timed: dict[int, Timed] = {}
            for step, bucket in itertools.product(steps, range(buckets)):
                entered = step * length + late[step][rank] + clock + bucket / 1000
                end = step * length + max(late[step]) + clock + bucket / 1000 + 0.001 + (link if rank == 1 else 0.0)
                early = chance.uniform(0.0, resolution)
                timed[buckets * step + bucket] = Timed(entered, end - early, end - early + resolution)
            report = Entered(
                window=window,
                time=10.0 * window + clock,
                times={number: each.entered for number, each in timed.items()},
                is_partial=False,
                num_steps=100 * window,
                data=1.0,
                line="train.py:7 (train)",
                timed=timed,
                queued=0.0,
            )
            yield rank, report, 10.0 * window + chance.uniform(0.001, 0.01)


def told(
    reports: Iterable[tuple[int, Entered, float]],
    hosts: str = "aaa",
    gpus: Mapping[int, str] | None = None,
    max_timings: int = MAX_TIMINGS * NUM_RANKS,
) -> list[str]:
    """Texts of the hints that a user gets."""
    return list(told_by_kind(reports, hosts, gpus, max_timings).values())


def told_by_kind(
    reports: Iterable[tuple[int, Entered, float]],
    hosts: str = "aaa",
    gpus: Mapping[int, str] | None = None,
    max_timings: int = MAX_TIMINGS * NUM_RANKS,
) -> Mapping[str, str]:
    """Texts of the first hint of each kind, if only a rank's next report after a request has ends of collectives."""
    requests: list[None] = []
    asked: set[int] = set()

    def time_ends() -> None:
        requests.append(None)
        asked.update(range(len(hosts)))

    watch = SlowRankWatch(dict(enumerate(hosts)), gpus or {}, time_ends)
    texts: dict[str, str] = {}
    for rank, report, at in reports:
        sent = report if rank in asked else replace(report, timed={})
        asked.discard(rank)
        if (found := watch.hear(rank, sent, at)) is not None:
            texts.setdefault(*found)
    assert len(requests) <= max_timings
    return texts


def slow(seconds: float) -> Lateness:
    """Rank 1 is late at each step; all ranks are late by chance."""
    return lambda rank, _, chance: (seconds if rank == 1 else 0.0) + chance.uniform(0.0, 0.003)


@pytest.mark.parametrize("buckets", [1, 3])
def test_the_slow_rank_is_named_with_what_the_gang_waits_and_where_it_is(buckets: int) -> None:
    first, *_ = told(reports_of(slow(0.03), buckets=buckets))
    assert first.startswith("rank 1 (a) is slow: it enters collectives ")
    _, late, share = (int(word) for word in first.split() if word.isdigit())
    assert 27 <= late <= 31
    assert 25 <= share <= 36
    assert first.endswith("Its main thread was mostly at train.py:7 (train).")


def test_a_busy_core_is_the_cause_if_the_ranks_threads_wait_for_it() -> None:
    """Their waits also delay the ends of collectives in this rank, or at least the look for these ends."""

    def told_if_queued(*shares: float) -> str:
        reports = reports_of(slow(0.03), link=0.03)
        return told((rank, replace(each, queued=shares[rank] * each.time), at) for rank, each, at in reports)[0]

    text = told_if_queued(0.1, 0.5, 0.0)
    assert text.startswith("rank 1 (a) is slow")
    assert "Its main thread waits for busy cores 50 % of its time, the others at most 10 %." in text
    assert told_if_queued(0.5, 0.5, 0.5).startswith("a network link to rank 1")


def test_a_core_that_gets_busy_later_is_the_cause_too() -> None:
    def reports() -> Iterable[tuple[int, Entered, float]]:
        pairs = zip(reports_of(slow(0.0), 40), reports_of(slow(0.03), 40, link=0.03), strict=True)
        for before, after in pairs:
            rank, report, at = before if before[1].window <= 30 else after
            yield rank, replace(report, queued=0.4 * max(0.0, report.time - 300) * (rank == 1)), at

    assert "busy cores" in told(reports())[0]


def test_timings_of_an_earlier_time_do_not_count() -> None:
    """Rank 1 is slow while it is timed, and later its link."""

    def reports() -> Iterable[tuple[int, Entered, float]]:
        several = [reports_of(slow(0.03), 13), reports_of(slow(0.0), 13), reports_of(slow(0.03), 13, link=0.03)]
        for own, fast, late in zip(*several, strict=True):
            window = own[1].window
            rank, report, at = own if window <= 3 else fast if window <= 8 else late
            yield rank, replace(report, timed=own[1].timed) if window == 4 else report, at

    assert told(reports())[0].startswith("a network link to rank 1")


def test_a_rank_that_cannot_be_judged_leaves_timings_for_the_others() -> None:
    """Half of rank 1's delay is its own work, and all of rank 2's."""

    def reports() -> Iterable[tuple[int, Entered, float]]:
        unclear, clear = reports_of(slow(0.03), 12, link=0.015), reports_of(lambda rank, *_: 0.03 * (rank == 2), 12)
        for first, second in zip(unclear, clear, strict=True):
            yield first if first[1].window <= 8 else second

    assert told(reports(), max_timings=MAX_TIMINGS + 1)[0].startswith("rank 2 (a) is slow")


def test_a_rank_is_not_timed_again_after_its_hint() -> None:
    assert told(reports_of(slow(0.03), 20), max_timings=1)


def test_timings_of_several_windows_add_up_where_steps_are_long() -> None:
    """In each ten seconds, three collectives are timed, and the first has none before it."""

    def reports() -> Iterable[tuple[int, Entered, float]]:
        for rank, report, at in reports_of(slow(0.6), 6, length=2.0):
            timed = {number: each for number, each in report.timed.items() if each.entered % 10.0 >= 4.0}
            yield rank, replace(report, timed=timed), at

    assert told(reports())[0].startswith("rank 1 (a) is slow")


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_a_rank_whose_collectives_end_late_is_not_blamed_but_its_link(hosts: str) -> None:
    [text, *_] = told(reports_of(slow(0.03), link=0.03, clocks={1: 4.0} if hosts == "abc" else None), hosts)
    assert text.startswith("a network link to rank 1 (")
    assert text.endswith("Less than half of the delay is its own work.")


@pytest.mark.parametrize("how", [{"link": 0.015}, {"resolution": 0.06}])
def test_a_delay_of_unclear_origin_names_nobody(how: dict[str, float]) -> None:
    """Half of the delay is the rank's own, or the ends of collectives are known too roughly."""
    assert not told(reports_of(slow(0.03), num_windows=10, **how))


def test_it_is_named_once_three_windows_after_the_first_agree() -> None:
    assert not told(reports_of(slow(0.03), num_windows=3))
    assert len(told(reports_of(slow(0.03), num_windows=4))) == 1


def test_clocks_of_several_hosts_are_allowed_for() -> None:
    clocks = {0: 0.0, 1: -3.0, 2: 5.0}
    [text, *_] = told(reports_of(slow(0.05), clocks=clocks, num_windows=6), hosts="abc")
    assert text.startswith("rank 1 (b)")
    assert not told(reports_of(slow(0.0), clocks=clocks, num_windows=6), hosts="abc")


def test_a_clock_that_is_set_names_nobody() -> None:
    """After two windows, host c's clock is set back by 60 ms."""

    def reports() -> Iterable[tuple[int, Entered, float]]:
        for rank, report, at in reports_of(slow(0.0), num_windows=10):
            off = 0.06 if rank == 2 and report.window <= 2 else 0.0
            times = {number: entered + off for number, entered in report.times.items()}
            yield rank, replace(report, time=report.time + off, times=times), at

    assert not told(reports(), hosts="abc")


def test_delays_of_messages_name_nobody() -> None:
    chance = random.Random(2)
    reports = ((rank, report, at + chance.uniform(0.0, 0.1)) for rank, report, at in reports_of(slow(0.0), 200))
    assert not told(reports, hosts="abc")


@pytest.mark.parametrize(
    ("why", "lateness"),
    [
        ("each is late by chance", lambda _rank, _step, chance: chance.expovariate(100.0)),
        ("the last rank changes", lambda rank, step, _: 0.05 if step % NUM_RANKS == rank else 0.0),
        ("rank 0 evaluates after 50 steps", lambda rank, step, _: 9.0 if rank == 0 and step % 50 == 0 else 0.0),
        ("too little to be felt", slow(0.004)),
        ("less than a tenth of the time", slow(0.008)),
        ("two are slow", lambda rank, _, chance: 0.0 if rank == 0 else 0.05 + chance.uniform(0.0, 0.001)),
    ],
)
def test_nobody_is_named(why: str, lateness: Lateness) -> None:
    assert not told(reports_of(lateness, num_windows=10)), why


def test_a_rank_that_goes_on_alone_after_the_others_inputs_have_ended_is_not_named() -> None:
    reports = (
        (rank, report if rank == 1 else replace(report, num_steps=100), at)
        for rank, report, at in reports_of(slow(0.03))
    )
    assert not told(reports)


@pytest.mark.parametrize("change", [{"is_partial": True}, {"num_steps": 0}, {"times": {}}])
def test_pipelines_evaluations_and_waits_name_nobody(change: dict[str, object]) -> None:
    assert not told((rank, replace(report, **change), at) for rank, report, at in reports_of(slow(0.03)))


def test_the_data_loader_is_the_cause_if_the_rank_waits_for_it_longer_than_the_others() -> None:
    def told_if_waiting(*shares: float) -> str:
        reports = reports_of(slow(0.03))
        [text] = told((rank, replace(each, data=shares[rank] * each.time), at) for rank, each, at in reports)
        return text

    assert "It waits for its data loader 40 % of its time, the others at most 15 %." in told_if_waiting(0.1, 0.4, 0.15)
    assert "data loader" not in told_if_waiting(0.2, 0.2, 0.2)


def test_each_cause_is_told_once_though_it_comes_and_goes() -> None:
    """The loader is slow in every other three minutes, and the GPU at other times."""

    def reports() -> Iterable[tuple[int, Entered, float]]:
        waited = dict.fromkeys(range(NUM_RANKS), 0.0)
        for rank, report, at in reports_of(slow(0.03), 90):
            is_loader, is_guilty = report.window // 18 % 2 == 0, rank == 1
            waited[rank] += 3.0 * (is_loader and is_guilty)
            clock = 1000 if is_guilty and not is_loader else 2000
            yield rank, replace(report, data=waited[rank], gpu_clock=clock), at

    loader, gpu = told(reports(), max_timings=2)
    assert "data loader" in loader
    assert "Its GPU runs at 1000 MHz" in gpu


def test_a_rank_that_is_slow_on_another_host_after_a_restart_is_told_again() -> None:
    [here], [there] = (told_by_kind(reports_of(slow(0.05), num_windows=6), hosts) for hosts in ("abc", "adc"))
    assert here != there


def on_gpus(clocks: Mapping[int, int | None], degrees: Mapping[int, int | None]) -> str:
    """Hint about rank 1, whose GPU is the second of its host."""
    reports = (
        (rank, replace(report, gpu_clock=clocks[rank], gpu_temperature=degrees[rank]), at)
        for rank, report, at in reports_of(slow(0.03))
    )
    return told(reports, gpus={0: "0", 1: "1", 2: "0"})[0]


def test_a_gpu_is_named_with_its_clock_and_temperature_if_they_differ() -> None:
    text = on_gpus({0: 1980, 1: 1005, 2: 1965}, {0: 60, 1: 91, 2: 62})
    assert text.startswith("rank 1 (a, GPU 1) is slow")
    assert text.endswith(
        "Its GPU runs at 1005 MHz, the others' at 1965 MHz or more. Its GPU is at 91 °C, the others' at 62 °C or less."
    )


@pytest.mark.parametrize(
    ("clocks", "degrees"),
    [
        ({0: 1980, 1: 1900, 2: 1965}, {0: 60, 1: 65, 2: 62}),
        ({0: 1980, 1: 1005, 2: 990}, {0: 60, 1: 91, 2: 90}),
        ({0: 1980, 1: 1005, 2: None}, {0: 60, 1: 91, 2: None}),
        ({0: 1980, 1: None, 2: 1965}, {0: 60, 1: None, 2: 62}),
    ],
)
def test_a_gpu_like_the_others_or_unknown_is_no_cause(
    clocks: Mapping[int, int | None], degrees: Mapping[int, int | None]
) -> None:
    assert "Its GPU" not in on_gpus(clocks, degrees)


@pytest.mark.parametrize("has_cuda", [True, False])
def test_a_rank_reports_clock_and_temperature_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_cuda: bool
) -> None:
    """Torch's CUDA, the recorder and NVML are simulated."""
    fake_gpus.install(tmp_path, monkeypatch, {"GPU-1": {"is": 1, "clock": 1005, "degrees": 91}})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_cuda)
    monkeypatch.setattr(flight_recorder, "newest", lambda: flight_recorder.Newest({1: 0.0}, {1}, is_partial=False))
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    reports: list[Entered] = []
    Entries(Ledger(), reports.append, "1").look()
    [report] = reports
    assert (report.gpu_clock, report.gpu_temperature) == ((1005, 91) if has_cuda else (None, None))


def test_a_rank_reports_the_time_that_its_main_thread_waits_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread makes the report, as in a rank. The times of all threads together could exceed the wall time."""
    monkeypatch.setattr(flight_recorder, "newest", lambda: flight_recorder.Newest({1: 0.0}, {1}, is_partial=False))
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    reports: list[Entered] = []
    schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def waited() -> float:
        return int(schedstat.read_text().split()[1]) / 1e9

    before = waited()
    reporter = threading.Thread(target=Entries(Ledger(), reports.append).look)
    reporter.start()
    reporter.join()
    assert before <= reports[0].queued <= waited()


@pytest.mark.timeout(60)
def test_one_thread_times_the_ends_though_it_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "newest", lambda: flight_recorder.Newest({}, set(), is_partial=False))
    own, before = Entries(Ledger(), [].append), set(threading.enumerate())
    own.time_ends()
    own.time_ends()
    [thread] = set(threading.enumerate()) - before
    monkeypatch.setattr(flight_recorder, "newest", lambda: None)
    thread.join()


@pytest.mark.timeout(60)
def test_timing_ends_where_a_look_is_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look finds the end of one more collective. Later looks take a second of processor time."""
    num_looks, reports = itertools.count(), list[Entered]()

    def newest() -> flight_recorder.Newest:
        numbers = range(next(num_looks) + 1)
        return flight_recorder.Newest(dict.fromkeys(numbers, 0.0), set(numbers), is_partial=False)

    monkeypatch.setattr(flight_recorder, "newest", newest)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    used = itertools.chain([0.0] * 6, itertools.count())
    own = Entries(Ledger(), reports.append)
    with monkeypatch.context() as patched:
        patched.setattr(time, "thread_time", lambda: next(used))
        own.time_ends()
        assert own._timing is not None
        own._timing.join()
    own.look()
    assert reports[0].timed.keys() == {1, 2, 3}


def looked_around_another_group() -> tuple[flight_recorder.Newest | None, flight_recorder.Newest | None, int]:
    """The recorder's newest before and after collectives of another group, and the number of reports."""
    reports: list[Entered] = []
    entries.WINDOW, entries.TIMING = entries.INTERVAL, 0.01  # each look reports
    dist.all_reduce(torch.zeros(1))
    before, group = flight_recorder.newest(), dist.new_group()
    for _ in range(5):
        dist.all_reduce(torch.zeros(1), group=group)
    own = Entries(Ledger(), reports.append)
    own.time_ends()
    assert own._timing is not None
    own._timing.join()
    own.look()
    return before, flight_recorder.newest(), len(reports)


def test_collectives_of_other_groups_are_not_compared(client: Client) -> None:
    before, after, num_reports = dispatch.run(client, looked_around_another_group)[0].result()
    assert before is not None
    assert after is not None
    assert before.entered == after.entered
    assert num_reports == 1


def test_without_the_recorder_a_rank_reports_and_times_nothing(client: Client) -> None:
    gang = Gang(environment={"TORCH_FR_BUFFER_SIZE": "0"})
    assert dispatch.run(client, looked_around_another_group, gang=gang)[0].result() == (None, None, 0)


def recorded() -> tuple[flight_recorder.Newest, Mapping[int, Timed], float]:
    """Rank 1 enters 40 collectives last: the recorder's newest, the timed ends, and when this began."""
    began_at, reports = time.time(), list[Entered]()
    entries.WINDOW, entries.MAX_LOOK = entries.INTERVAL, 60.0  # each look reports
    newest, is_timing = flight_recorder.newest, threading.Event()

    def look() -> flight_recorder.Newest | None:
        found = newest()
        is_timing.set()
        return found

    flight_recorder.newest = look
    own = Entries(Ledger(), reports.append)
    dist.all_reduce(torch.zeros(1))
    own.time_ends()
    is_timing.wait()
    for _ in range(40):
        time.sleep(0.01 * dist.get_rank())
        dist.all_reduce(torch.zeros(1))
    found = flight_recorder.newest()
    assert found is not None
    while not (reports and reports[-1].timed):
        time.sleep(0.1)
        own.look()
    return found, reports[-1].timed, began_at


def test_ranks_read_the_times_of_their_newest_collectives(client: Client) -> None:
    (newest, timed, began_at), (others, timed_there, _) = dispatch.run(client, recorded).result()
    assert not newest.is_partial
    assert newest.entered.keys() == others.entered.keys()
    assert newest.entered.keys() - newest.ended <= {max(newest.entered)}  # a wait may return before torch notes the end
    assert len(newest.entered) == MAX_COLLECTIVES
    assert all(began_at <= at <= time.time() for at in newest.entered.values())
    both = timed.keys() & timed_there.keys()
    assert len(both) >= MIN_TIMED
    for number in both:  # an all-reduce ends nowhere before all ranks have entered
        for each in (timed[number], timed_there[number]):
            assert each.seen_in < each.seen_out
            assert each.seen_out > max(timed[number].entered, timed_there[number].entered)


def work(seconds: float) -> None:
    """Use a core for this long."""
    ends_at = time.thread_time() + seconds
    while time.thread_time() < ends_at:
        pass


def train(guilty: int, where: str) -> None:
    """Train for 60 s. One rank is slow in its backward, in reading its data, or by a busy core of its own."""
    is_guilty = current_rank().rank == guilty
    if where == "core":
        os.sched_setaffinity(0, {core_of(current_rank().rank)})  # of this thread, which ends with the rank

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if is_guilty and where == "backward":
                time.sleep(0.1)  # most samples of its line are here, on a busy machine, too
            return gradient

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> torch.Tensor:
            if is_guilty and where == "data":
                time.sleep(0.1)
            return torch.randn(64)

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ends_at, stop = time.time() + 60, torch.zeros(1)
    for batch in torch.utils.data.DataLoader(Data(), batch_size=1):
        work(0.02 if where == "core" else 0.0)
        optimizer.zero_grad()
        Slow.apply(model(batch)).square().mean().backward()
        optimizer.step()
        stop.fill_(time.time() > ends_at)
        dist.all_reduce(stop)
        if stop:
            break


def core_of(rank: int) -> int:
    """A core of its own for each of two ranks."""
    return sorted(os.sched_getaffinity(0))[rank]


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """Around a block, keep a core busy. Linux shares a core among sessions, and each rank has a session of its own."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        for _ in range(6):  # the other rank's core may have other users
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
            stack.callback(process.kill)
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guilty", "where", "told"),
    [(1, "backward", "(backward)"), (0, "data", "its data loader"), (1, "core", "waits for busy cores")],
)
def test_a_real_rank_that_is_slow_is_named_with_the_cause(client: Client, guilty: int, where: str, told: str) -> None:
    if where == "core" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("on one core, all ranks wait for it alike")
    notes = Notes()
    with busy(core_of(guilty)) if where == "core" else contextlib.nullcontext():
        dispatch.run(client, train, guilty, where, gang=Gang(observers=(lambda: notes,))).result()
    [hint] = [text for text in notes.texts if "is slow" in text]
    assert f"rank {guilty} (" in hint
    assert told in hint
