"""Finds a rank that enters collectives later than all others, for which the gang waits. Runs in the driver.

In synchronous training, each step takes as long on every rank as on the slowest one. The ranks differ only in the times
at which they enter a collective. Every ten seconds, each rank reports these times for the newest collectives of the
default process group. A rank is suspect if the others have waited for this rank in each of the last windows.

Then all ranks time the ends of some collectives. A rank is slow if its own work between collectives takes longer, or if
its main thread waits for a core. If the rank's collectives end later instead, a network link to the rank is slow. A
hint needs one of these proofs.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from flytekitplugins.daskpytorch.protocol.reports import Entered, Timed

NUM_WINDOWS = 3
"""Number of windows in a row in which the gang has to wait for the same rank."""
MIN_COLLECTIVES = 10
"""Minimum number of collectives in these windows together."""
MIN_SHARE = 0.1
"""Minimum share of each window's time that the gang waits for the rank."""
MIN_LATENESS, MIN_LATENESS_BETWEEN_HOSTS = 0.005, 0.02
"""Minimum number of seconds by which the rank is late. The clocks of several hosts are compared less exactly."""
MIN_REGULARITY = 0.2
"""Minimum share of the collectives in which the rank is late. A model with many buckets has several for each step."""
MAX_CLOCK_SHARE, MIN_DEGREES = 0.9, 10
"""Limits of a GPU that stands out: share of the other GPUs' slowest clock, and degrees above their hottest."""
DOMINANCE = 4.0
"""Minimum wait for the rank, as a multiple of the wait for any other rank."""

MIN_TIMED = 3
"""Minimum number of late collectives whose delay is split into the rank's own work and the end of the one before."""
MAX_TIMINGS = 3
"""Maximum number of requests for ends of collectives in an attempt for one suspect rank and cause."""


@dataclass(frozen=True)
class _Window:
    """Waits of the gang during the collectives that all ranks have reported for one window."""

    seconds: float
    """Time between the first and the last of the collectives."""
    num_collectives: int
    waits: Mapping[int, float]
    """Seconds that all other ranks waited for a rank."""
    lateness: Mapping[int, Sequence[float]]
    """Seconds by which a rank came after the last of the others, for each collective that it was the last to enter."""
    clocks: Mapping[str, float]
    """Seconds by which each host's clock is behind the driver's."""
    before: Mapping[int, Entered]
    """Reports of all ranks at the window's beginning."""
    reports: Mapping[int, Entered]
    """Reports of all ranks at the window's end."""

    def guilty(self, least: float) -> int | None:
        """Return the rank for which the gang has waited. None: no rank stands out.

        Args:
            least: Minimum number of seconds by which the rank is late.
        """
        first, *others = sorted(self.waits, key=self.waits.__getitem__, reverse=True)
        late = [seconds for seconds in self.lateness[first] if seconds >= least]
        is_slow = (
            self.waits[first] >= MIN_SHARE * self.seconds
            and self.waits[first] >= DOMINANCE * max((self.waits[rank] for rank in others), default=0.0)
            and len(late) >= MIN_REGULARITY * self.num_collectives
        )
        return first if is_slow and late else None


class SlowRankWatch:
    """Watches the times at which the ranks of one attempt enter collectives."""

    def __init__(self, hosts: Mapping[int, str], gpus: Mapping[int, str], time_ends: Callable[[], None]) -> None:
        """Begin an attempt.

        Args:
            hosts: Name of each rank's host. Ranks of one host share a clock.
            gpus: Name of the rank's own GPU on its host, for each rank with a GPU.
            time_ends: Requests the ends of collectives in all ranks' next reports.
        """
        self._hosts, self._gpus, self._time_ends = hosts, gpus, time_ends
        self._num_timings: Counter[tuple[int, str]] = Counter()
        """Number of requests for ends of collectives for each suspect rank and cause. `MAX_TIMINGS` after a hint."""
        self._least = MIN_LATENESS if len(set(hosts.values())) == 1 else MIN_LATENESS_BETWEEN_HOSTS
        self._reported: dict[int, tuple[Entered, float]] = {}
        """Newest report of each rank, and the time of its arrival."""
        self._newest: dict[int, Entered] = {}
        """Newest reports of all ranks for the same window."""
        self._seen = 0
        """Number of the newest collective that was judged."""
        self._windows: deque[_Window] = deque(maxlen=NUM_WINDOWS)

    def hear(self, rank: int, entered: Entered, arrived_at: float) -> tuple[str, str] | None:
        """Note a rank's report. Return a hint's kind and text, if the report completes the proof.

        Kinds differ in rank, place and cause: after a restart, the same rank may be on another host.

        Args:
            rank: The reporting rank.
            entered: The report.
            arrived_at: Time of the arrival, in seconds since the epoch.
        """
        self._reported[rank] = entered, arrived_at
        if len(self._reported) < len(self._hosts) or len({each.window for each, _ in self._reported.values()}) > 1:
            return None
        offsets = self._clocks()
        before, self._newest = self._newest, {rank: each for rank, (each, _) in self._reported.items()}
        self._reported = {}
        window = self._window(before, self._newest, offsets)
        has_trained = all(
            rank in before and each.num_steps > before[rank].num_steps for rank, each in self._newest.items()
        )
        if window is None or not has_trained:  # warm-up, an evaluation, or a step that takes longer
            return None
        self._windows.append(window)
        return self._verdict()

    def _clocks(self) -> Mapping[str, float]:
        """Return how far each host's clock is behind the driver's, in seconds, with the shortest delay of a message."""
        delays: dict[str, list[float]] = defaultdict(list)
        for rank, (entered, arrived_at) in self._reported.items():
            delays[self._hosts[rank]].append(arrived_at - entered.time)
        return {host: min(found) for host, found in delays.items()}

    def _window(
        self, before: Mapping[int, Entered], reported: Mapping[int, Entered], clocks: Mapping[str, float]
    ) -> _Window | None:
        """Return the waits in the collectives that all ranks have newly reported. None: fewer than two, or unknown."""
        if any(each.is_partial for each in reported.values()):
            return None
        numbers = sorted(set.intersection(*(set(each.times) for each in reported.values())))
        numbers = [number for number in numbers if number > self._seen]
        if len(numbers) < 2:
            return None
        self._seen = numbers[-1]
        rows = [
            {rank: each.times[number] + clocks[self._hosts[rank]] for rank, each in reported.items()}
            for number in numbers
        ]
        waits: dict[int, float] = dict.fromkeys(reported, 0.0)
        lateness: dict[int, list[float]] = defaultdict(list)
        ends_at = min(rows[0].values())
        for row in rows:
            *_, second, last = sorted(row, key=row.__getitem__)
            lateness[last].append(row[last] - row[second])
            waits[last] += max(0.0, row[last] - max(row[second], ends_at))
            ends_at = max(ends_at, row[last])
        seconds = max(rows[-1].values()) - min(rows[0].values())
        return _Window(seconds, len(numbers), waits, lateness, clocks, before, reported)

    def _verdict(self) -> tuple[str, str] | None:
        windows = self._windows
        rank, *others = {window.guilty(self._least) for window in windows}
        if rank is None or others or len(windows) < NUM_WINDOWS - 1:
            return None
        share = sum(window.waits[rank] for window in windows) / sum(window.seconds for window in windows)
        queued, _ = self._excess(rank, lambda report: report.queued)
        doings = list(self._doings(rank))
        cause = next((cause for cause, _ in doings if cause), "")
        is_own = True if queued >= max(share / 2, MIN_SHARE) else self._is_own_work(rank)
        if is_own is None and self._num_timings[rank, cause] < MAX_TIMINGS:
            self._num_timings[rank, cause] += 1
            self._time_ends()
        if is_own is None or len(windows) < NUM_WINDOWS:
            return None
        if sum(window.num_collectives for window in windows) < MIN_COLLECTIVES or not self._are_clocks_known():
            return None
        self._num_timings[rank, cause] = MAX_TIMINGS  # one hint for each cause
        late = median(each for window in windows for each in window.lateness[rank] if each >= self._least)
        place = f"{self._hosts[rank]}, GPU {self._gpus[rank]}" if rank in self._gpus else self._hosts[rank]
        waits = f"and the gang waits {100 * share:.0f} % of its time for it"
        if not is_own:
            return f"slow link to rank {rank} ({place})", (
                f"a network link to rank {rank} ({place}) is slow: its collectives end later than the others', and its "
                f"next ones begin {1000 * late:.0f} ms later, {waits}. Less than half of the delay is its own work."
            )
        doing = "".join(f" {sentence}." for _, sentence in doings)
        return f"slow rank {rank} ({place}): {cause}", (
            f"rank {rank} ({place}) is slow: it enters collectives {1000 * late:.0f} ms after the last of "
            f"the others, {waits}.{doing}"
        )

    def _is_own_work(self, rank: int) -> bool | None:
        """Return True if the rank is late by its own work, and False if its collectives end later. None: unknown."""
        shares = [each for window in self._windows for each in self._shares_of_own_work(rank, window)]
        if len(shares) < MIN_TIMED:
            return None
        least, most = (median(each) for each in zip(*shares, strict=True))
        return least >= 0.5 if least >= 0.5 or most < 0.5 else None

    def _shares_of_own_work(self, rank: int, window: _Window) -> Iterator[tuple[float, float]]:
        """Yield the least and the greatest share of own work in each timed delay of the rank in a window."""
        all_timed = {each: report.timed for each, report in window.reports.items()}
        common = set.intersection(*map(set, all_timed.values()))
        for number in common:
            entered = {
                each: timed[number].entered + window.clocks[self._hosts[each]] for each, timed in all_timed.items()
            }
            *_, second, last = sorted(entered, key=entered.__getitem__)
            late, both = entered[last] - entered[second], (all_timed[rank], all_timed[second])
            before = [each for each in common if each < number and _has_ended(each, number, both)]
            if last == rank and late >= self._least and before:
                (least, most), (least_of_other, most_of_other) = (_work(timed, before, number) for timed in both)
                yield (least - most_of_other) / late, (most - least_of_other) / late

    def _are_clocks_known(self) -> bool:
        """Return True if the difference between any host's clock and the first one's is the same in all windows."""
        clocks = [window.clocks for window in self._windows]
        first = self._hosts[0]
        differences = [[each[host] - each[first] for each in clocks] for host in clocks[0]]
        return all(max(found) - min(found) <= self._least / 2 for found in differences)

    def _share(self, rank: int, seconds: Callable[[Entered], float]) -> float:
        """Return the share of a rank's time in the windows by which a count of seconds in its reports grew."""
        ends = [(each.before[rank], each.reports[rank]) for each in self._windows]
        grown = sum(seconds(end) - seconds(begin) for begin, end in ends)
        return grown / max(sum(end.time - begin.time for begin, end in ends), 1.0)

    def _excess(self, rank: int, seconds: Callable[[Entered], float]) -> tuple[float, str]:
        """Return by how much a rank's share exceeds the greatest of the others', and a text with both shares."""
        shares = {each: self._share(each, seconds) for each in self._hosts}
        own, greatest = shares.pop(rank), max(shares.values())
        return own - greatest, f"{100 * own:.0f} % of its time, the others at most {100 * greatest:.0f} %"

    def _doings(self, rank: int) -> Iterator[tuple[str, str]]:
        """Yield sentences about what the slow rank does while the others wait, each with a cause.

        The cause of a line of the user's code is empty, so that a rank has at most five causes.
        """
        waits: dict[str, tuple[str, Callable[[Entered], float]]] = {
            "loader": ("It waits for its data loader", lambda report: report.data),
            "cores": ("Its main thread waits for busy cores", lambda report: report.queued),
        }
        for cause, (what, seconds) in waits.items():
            excess, shares = self._excess(rank, seconds)
            if excess >= MIN_SHARE:
                yield cause, f"{what} {shares}"
        lines = [each.reports[rank].line for each in self._windows if each.reports[rank].line]
        if lines and lines.count(lines[-1]) == len(lines):
            yield "", f"Its main thread was mostly at {lines[-1]}"
        yield from self._differences_of_gpu(rank)

    def _differences_of_gpu(self, rank: int) -> Iterator[tuple[str, str]]:
        """Yield causes and sentences about a rank's GPU, if it is slower or hotter than others in all windows."""
        own = [each.reports[rank] for each in self._windows]
        others = [report for each in self._windows for other, report in each.reports.items() if other != rank]
        clocks, clocks_of_others = (_known(each.gpu_clock for each in reports) for reports in (own, others))
        if clocks and clocks_of_others and max(clocks) < MAX_CLOCK_SHARE * min(clocks_of_others):
            yield "clock", f"Its GPU runs at {max(clocks)} MHz, the others' at {min(clocks_of_others)} MHz or more"
        degrees, degrees_of_others = (_known(each.gpu_temperature for each in reports) for reports in (own, others))
        if degrees and degrees_of_others and min(degrees) >= max(degrees_of_others) + MIN_DEGREES:
            hottest = max(degrees_of_others)
            yield "temperature", f"Its GPU is at {min(degrees)} °C, the others' at {hottest} °C or less"


def _has_ended(earlier: int, number: int, all_timed: Iterable[Mapping[int, Timed]]) -> bool:
    """Return True if a collective had ended in these ranks before they entered a later one."""
    return all(timed[earlier].seen_in < timed[number].entered for timed in all_timed)


def _work(timed: Mapping[int, Timed], before: Iterable[int], number: int) -> tuple[float, float]:
    """Return the least and the greatest number of seconds between the ends of earlier collectives and a later one."""
    entered = timed[number].entered
    least = entered - max(min(timed[each].seen_out, entered) for each in before)
    return least, entered - max(timed[each].seen_in for each in before)


def _known(values: Iterable[int | None]) -> list[int]:
    """Return the values. Empty if one is unknown."""
    found = list(values)
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) else []
