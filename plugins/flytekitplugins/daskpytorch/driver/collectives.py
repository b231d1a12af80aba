"""Finds mismatches in the collectives that the ranks' flight recorders hold. Free of state and I/O. Runs in the driver.

All ranks of a process group must call the same collective under the same number.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from flytekitplugins.daskpytorch.protocol.failure import NOT_THE_USERS, Collective, Failure, Recalled

UNEVEN = ("scatter", "all_to_all", "alltoall")
"""Prefixes of operations in which ranks may pass different shapes."""
MAX_USERS_FRAMES = 3
FRAME = re.compile(r'File "(.+)", line (\d+),? in (\S+)')
"""Matches a frame of a traceback, or of a list by `faulthandler` or torch, which has no comma."""
WAITING_FILES = re.compile(r"torch/(distributed/|autograd/graph\.py|nn/parallel/distributed\.py)")
"""Frames of a rank that waits for others. During `backward` these are hooks of DistributedDataParallel."""
MAX_NAMED = 8
MAX_SHAPES = 4


@dataclass(frozen=True)
class Difference:
    rank: int
    what: str
    shown: str


@dataclass(frozen=True)
class _Calls:
    group: str
    number: int
    by_rank: Mapping[int, Collective]

    @property
    def waiting(self) -> list[int]:
        return [rank for rank, collective in self.by_rank.items() if not collective.is_done]

    @property
    def name(self) -> str:
        return f"collective {self.number} of {self.group}"


def compare(recalled: Mapping[int, Recalled], failed: Collection[int] = ()) -> Difference | None:
    """Return a mismatch in the ranks' collectives. None: the records agree or hold too little.

    Mismatches in the order of search:

    1. different calls under one number, which cause later mismatches
    2. a rank that others wait for, and that does not wait itself
    3. ranks that wait for each other in different process groups

    The newest collective of `failed` ranks has failed, although their recorder may count it as done.
    """
    recalled = {
        rank: _with_newest_open(recalled[rank]) if rank in failed else recalled[rank] for rank in sorted(recalled)
    }
    calls = list(_by_number(recalled))
    return _mismatch(calls) or _absence(calls, recalled)


def _with_newest_open(recalled: Recalled) -> Recalled:
    if not recalled.collectives:
        return recalled
    *others, newest = recalled.collectives
    return replace(recalled, collectives=[*others, replace(newest, is_done=False)])


def _by_number(recalled: Mapping[int, Recalled]) -> Iterator[_Calls]:
    calls: dict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for rank, each in recalled.items():
        for collective in each.collectives:
            calls[collective.group, collective.number][rank] = collective
    for (group, number), by_rank in sorted(calls.items()):
        yield _Calls(group, number, by_rank)


# ---- Different calls under one number


def _mismatch(all_calls: Iterable[_Calls]) -> Difference | None:
    for calls in all_calls:
        alike: dict[object, list[int]] = defaultdict(list)
        for rank, collective in calls.by_rank.items():
            alike[_essence(collective, with_shapes=bool(calls.waiting))].append(rank)
        if len(alike) > 1:
            most, *_, least = sorted(alike.values(), key=len, reverse=True)
            theirs, others = (in_words(calls.by_rank[ranks[0]]) for ranks in (least, most))
            what = f"{named(least)} called {theirs} as {calls.name}, {named(most)} {others}"
            return Difference(least[0], what, _shown(calls))
    return None


def _essence(collective: Collective, *, with_shapes: bool) -> object:
    if not with_shapes or collective.operation.startswith(UNEVEN):
        return collective.operation
    return collective.operation, tuple(map(tuple, collective.inputs)), tuple(collective.dtypes)


# ---- A call that is missing


def _absence(all_calls: Iterable[_Calls], recalled: Mapping[int, Recalled]) -> Difference | None:
    awaited: dict[int, _Calls] = {}
    waiting: set[int] = set()
    for calls in all_calls:
        absent = [rank for rank, each in recalled.items() if _lacks(each, calls)]
        if absent and calls.waiting:
            waiting.update(calls.waiting)
            awaited |= {rank: awaited.get(rank, calls) for rank in absent}
    free = [rank for rank in awaited if rank not in waiting]
    if not awaited:
        return None
    rank = (free or list(awaited))[0]
    calls = awaited[rank]
    called = in_words(calls.by_rank[calls.waiting[0]])
    wait = f"{named(calls.waiting)} {'waits' if len(calls.waiting) == 1 else 'wait'}"
    what = f"rank {rank} has not called {calls.name}, {called}, in which {wait}"
    if not free:
        what += ", but waits for others itself, in another group: the ranks wait in a circle"
    return Difference(rank, what, "\n".join([_shown(calls), _shown_last(rank, recalled[rank])]))


def _lacks(recalled: Recalled, calls: _Calls | Collective) -> bool:
    return recalled.groups.get(calls.group, calls.number) < calls.number


# ---- A rank that has returned


def awaits_returned(recalled: Mapping[int, Recalled | None], running: Iterable[int]) -> tuple[int, str] | None:
    """Return a running rank whose NCCL collective can never end, as a rank of its group is over without the call.

    Also returns the proof in words.
    """
    over = {rank: each for rank, each in recalled.items() if each is not None and each.is_over}
    for rank in sorted(running):
        own = recalled.get(rank)
        for each in own.collectives if own is not None else ():
            gone = [other for other, left in over.items() if _lacks(left, each)]
            if gone and not each.is_done and each.group.endswith("nccl)"):
                place = next(map(FRAME.match, users_frames(each.frames)), None)
                at = f" at {PurePath(place[1]).name}:{place[2]}" if place else ""
                call = f"{in_words(each)}{at}, collective {each.number} of {each.group}"
                return rank, f"{named(gone)} returned; rank {rank} was still in {call}"
    return None


def left_waiting(rank: int, failure: Failure, returned: Mapping[int, Recalled | None]) -> str:
    """Say which ranks have returned while `rank`, whose collective has `failed`, waited for them. "": it did not wait.

    `returned` has the last collectives of each rank whose function has returned. None: unknown.
    """
    newest = failure.recalled.collectives[-1:] if failure.recalled is not None else ()
    groups = {each.group for each in newest}
    gone = [other for other, each in returned.items() if each is None or not each.groups or groups <= {*each.groups}]
    frames = FRAME.findall(failure.traceback)
    users = [index for index, (file, _, _) in enumerate(frames) if not NOT_THE_USERS.match(file)]
    inner = frames[users[-1] + 1 :] if users else []
    if not gone or not any(WAITING_FILES.search(file) for file, _, _ in inner):
        return ""
    call = next((name for _, _, name in inner if name != "wrapper" and not name.startswith("_")), inner[-1][2])
    file, line, _ = frames[users[-1]]
    return f"{named(gone)} returned; rank {rank} was still in {call} at {PurePath(file).name}:{line}"


# ---- In words


def in_words(collective: Collective) -> str:
    shapes = collective.inputs or collective.outputs
    if not shapes:
        return collective.operation
    kinds = sorted(set(collective.dtypes))
    told = ", ".join(str(list(shape)) for shape in shapes[:MAX_SHAPES])
    return f"{collective.operation} of {' and '.join(kinds)} {told}{', ...' if len(shapes) > MAX_SHAPES else ''}"


def named(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    more = f", ... ({len(numbers)} in all)" if len(numbers) > MAX_NAMED else ""
    return f"ranks {', '.join(numbers[:MAX_NAMED])}{more}"


def _shown(calls: _Calls) -> str:
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, collective in calls.by_rank.items():
        alike[_in_full(collective)].append(rank)
    lines = [f"  {named(ranks)}: {told}" for told, ranks in alike.items()]
    return "\n".join([f"C{calls.name[1:]}, as torch's flight recorder has it:", *lines])


def _shown_last(rank: int, recalled: Recalled) -> str:
    if not recalled.collectives:
        return f"  rank {rank}: not called, nor any other before"
    last = recalled.collectives[-1]
    return f"  rank {rank}: not called; its last was collective {last.number} of {last.group}, {_in_full(last)}"


def _in_full(collective: Collective) -> str:
    frames = "".join(f"\n    {frame}" for frame in users_frames(collective.frames)[:MAX_USERS_FRAMES])
    state = "done" if collective.is_done else "waiting"
    return f"{in_words(collective)}, {state}{', called from:' if frames else ''}{frames}"


def users_frames(frames: Iterable[str]) -> list[str]:
    return [frame for frame in frames if not NOT_THE_USERS.match(frame)]
