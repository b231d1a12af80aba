"""A rank's side of sharded checkpoints: each rank writes and reads its own part. Runs in a rank.

save: planned and copied by all ranks together --in a thread--> storage --reported--> the driver, which commits.
load: the newest undamaged checkpoint from which this attempt may start, straight from storage.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import ShardedCheckpoint, Sharding, WrittenShards, folder_name
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.rank.checkpoint_files import gathered
from flytekitplugins.daskpytorch.rank.shard_writer import ShardWriter

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.rank.shard_plan import SavePlans, Staged
    from flytekitplugins.daskpytorch.rank.shard_reader import ShardReader


@dataclass(frozen=True)
class View:
    """Progress of a rank in writing sharded checkpoints."""

    started: int
    """Number of the newest `save_sharded` call whose write the rank has begun, from 0. -1: the rank has begun none."""
    is_settled: bool
    """True after the driver has committed save number `started` or given it up, and before the first save."""


class SaveSlots:
    """Holds at most two sharded saves of this rank: one in flight until its commit, and one that waits.

    A newer save replaces the waiting one. The driver tells each rank separately about a settled save, so some ranks
    begin the waiting save before others. At the next save, all ranks exchange their progress, and the ranks behind
    catch up.
    """

    def __init__(self, start: Callable[[Staged], None], on_replaced: Callable[[Staged], None]) -> None:
        self._start_writing = start
        self._on_replaced = on_replaced
        """Called with a waiting save that a newer save replaces."""
        self._changed = threading.Condition()
        self._view = View(-1, is_settled=True)
        self._waiting: Staged | None = None
        self._settled = -1
        """Number of the save that the driver has committed or given up last. -1: none."""
        self._is_placing = False
        """True in a `placing` block, in which the ranks exchange their progress. `_settled` then counts after it."""

    @contextlib.contextmanager
    def placing(self) -> Iterator[View]:
        """Yield this rank's progress, and keep it unchanged during a `with` block in which ranks exchange theirs."""
        with self._changed:
            self._is_placing = True
        try:
            yield self._view
        finally:
            with self._changed:
                self._is_placing = False
                self._heed_settled()

    def catch_up(self, views: Sequence[View]) -> None:
        """Begin the waiting save if another rank has begun it, else drop it, so that all ranks are at the same save.

        Args:
            views: Progress of all ranks.
        """
        newest = max(view.started for view in views)
        with self._changed:
            waiting, self._waiting = self._waiting, None
            if waiting is not None and waiting.number <= newest:
                self._start(waiting)
            elif waiting is not None:
                waiting.drop()
                self._on_replaced(waiting)
            # A rank with no waiting save left has learned that the save in flight is settled.
            self._view = View(newest, is_settled=any(view.is_settled for view in views if view.started == newest))

    def put(self, save: Staged) -> None:
        """Begin to write a save, or let it wait until the driver has committed or given up the save in flight."""
        with self._changed:
            if self._view.is_settled:
                self._start(save)
            else:
                self._waiting = save

    def settle(self, number: int) -> None:
        """Record that the driver has committed or given up the save in flight, and begin the waiting save.

        Args:
            number: Number of the save. Ignored unless this save is in flight.
        """
        with self._changed:
            self._settled = number
            if not self._is_placing:
                self._heed_settled()

    def close(self) -> None:
        """Drop the waiting save, since the driver will commit no more saves."""
        with self._changed:
            self._waiting = None
            self._changed.notify_all()

    def flush(self, timeout: float | None) -> None:
        """Wait until no save waits, or for `timeout` seconds. None: no limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None, timeout)

    def _heed_settled(self) -> None:
        if self._settled != self._view.started or self._view.is_settled:
            return
        self._view = View(self._settled, is_settled=True)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._start(waiting)

    def _start(self, save: Staged) -> None:
        self._view = View(save.number, is_settled=False)
        self._changed.notify_all()
        self._start_writing(save)


MAX_TOLD = 8
"""Maximum number of keys in rank 0's message about values of a checkpoint that no rank has loaded."""


@dataclass(frozen=True)
class _Said:
    """Message that each rank sends to all other ranks before a sharded save."""

    step: int
    view: View
    has_new_plan: bool
    problem: str | None


class ShardedCheckpoints:
    """Saves and loads this rank's part of sharded states, together with the other ranks."""

    def __init__(
        self,
        sharding: Sharding,
        *,
        attempt: int,
        rank: int,
        report: Callable[[WrittenShards], None],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._sharding = sharding
        self._attempt = attempt
        self._rank = rank
        self._report = report
        self._moved = moved
        """Called repeatedly during a write or read, as a sign of life, since a large state takes longer than a step."""
        self._worker = Worker(name="sharded")
        self._slots: SaveSlots = SaveSlots(self._start, self._tell_replaced)
        self._num_saves = 0
        self._plans: SavePlans | None = None
        self._files: Any = None

    def save(self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> None:
        """Copy this rank's part of a state, and queue the write of the copy to storage. Call on all ranks together.

        Raises:
            Exception: A rank cannot save its part. Raised on all ranks.
        """
        number, self._num_saves = self._num_saves, self._num_saves + 1
        with self._slots.placing() as view:
            has_new_plan, error = False, None
            try:
                plans = self._opened()
                has_new_plan = plans.look_at(state)
            except Exception as failure:  # raised after the exchange: the other ranks wait for this rank's message
                error = failure
            heard = gathered(_Said(step, view, has_new_plan, None if error is None else _text(error)))
            if error is not None:
                raise error
            _check(heard)
            if any(other.has_new_plan for other in heard):
                plans.agree()
            self._slots.catch_up([other.view for other in heard])
            self._slots.put(plans.stage(number, step, metrics))

    def load(self, state: dict[str, Any], chosen: ShardedCheckpoint | None = None) -> int | None:
        """Fill a state with a sharded checkpoint. Call on all ranks together.

        Args:
            state: State with the keys and shapes of the checkpoint.
            chosen: The checkpoint. None: the newest undamaged one from which this attempt may start.

        Returns:
            The checkpoint's step. None: no undamaged checkpoint exists.

        Raises:
            OSError: Storage does not answer, `chosen` is damaged, or damaged checkpoints have changed the state.
            ValueError: Keys or shapes of the state differ from the saved ones.
            TypeError: A tensor of the state cannot be written to.
        """
        from flytekitplugins.daskpytorch.rank.shard_reader import ShardReader

        checkpoints, is_touched = self._sharding.start if chosen is None else (chosen,), False
        for checkpoint in checkpoints:
            files = current_execution().filesystem(checkpoint.uri)
            reader = ShardReader(files, checkpoint, state, moved=self._moved)
            if not self._together(checkpoint, functools.partial(self._prepare, reader)):
                continue
            is_touched = True
            if self._together(checkpoint, reader.read):
                self._tell_unread(checkpoint, frozenset.intersection(*gathered(reader.unread)))
                return checkpoint.step
        if is_touched:
            raise OSError(
                f"the sharded checkpoints of steps {', '.join(str(each.step) for each in checkpoints)} are damaged, "
                "and reading them has changed the state. Rank 0's log names the damaged files. Delete these "
                "checkpoints to start afresh."
            )
        if chosen is not None:
            raise OSError(
                f"the sharded checkpoint of step {chosen.step} is damaged; rank 0's log says how. Load another step of "
                "those in checkpoint.list()"
            )
        if checkpoints:
            steps = ", ".join(str(each.step) for each in checkpoints)
            self._say(f"no sharded checkpoint is whole (steps {steps}); the training starts afresh")
        return None

    def settle(self, number: int) -> None:
        """Record that the driver has committed or given up save `number`."""
        self._slots.settle(number)

    def close(self) -> None:
        """Drop the save that waits to be written, since the driver commits no more saves."""
        self._slots.close()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until this rank has written its part of the newest save, or for `timeout` seconds. None: no limit."""
        until = None if timeout is None else time.monotonic() + timeout
        self._slots.flush(timeout)
        self._worker.flush(None if until is None else until - time.monotonic())

    def _opened(self) -> SavePlans:
        from flytekitplugins.daskpytorch.rank.shard_plan import SavePlans

        if self._plans is None:
            self._check_place()
            self._files = current_execution().filesystem(self._sharding.base)
            self._plans = SavePlans()
        return self._plans

    def _prepare(self, reader: ShardReader) -> None:
        self._check_place()
        reader.prepare()

    def _check_place(self) -> None:
        token = self._sharding.token
        if token is not None and not Path(token).exists():
            raise RuntimeError(
                f"rank {self._rank} does not see {self._sharding.base}, where the shards are kept: it is a folder of "
                "the driver's machine. Name a storage that all ranks reach: Gang(checkpoint_uri=...), with a shared "
                "folder or a URL such as s3://bucket/folder."
            )

    def _start(self, save: Staged) -> None:
        self._worker.submit(functools.partial(self._write, save))

    def _write(self, save: Staged) -> None:
        folder = f"{self._sharding.base}/{folder_name(self._attempt, self._sharding.nonce, save.step, save.number)}"
        written = WrittenShards(attempt=self._attempt, number=save.number, step=save.step)
        try:
            writer = ShardWriter(self._files, folder, rank=self._rank, step=save.step, moved=self._moved)
            parts, items = writer.write(save.pieces)
            written = replace(written, parts=tuple(parts), items=tuple(items), state=save.state, metrics=save.metrics)
        except BaseException as error:  # any error of a store's client
            written = replace(written, failure=_text(error))
        finally:
            save.drop()
        self._report(written)

    def _together(self, checkpoint: ShardedCheckpoint, act: Callable[[], object]) -> bool:
        """Call `act` on all ranks together. Return False if a rank has found the checkpoint damaged.

        Raises:
            OSError: A rank cannot read the checkpoint.
            ValueError: Keys or shapes of the state differ from the saved ones.
            TypeError: A tensor of the state cannot be written to.
        """
        from flytekitplugins.daskpytorch.rank.shard_plan import TensorKindError
        from flytekitplugins.daskpytorch.rank.shard_reader import DamagedError, DiffersError

        error: Exception | None = None
        problem: tuple[type[Exception], str] | None = None
        try:
            act()
        except (DamagedError, DiffersError, TensorKindError) as found:
            problem = type(found), str(found)
        except Exception as found:  # any error of a store's client: the other ranks wait for this rank's message
            error, problem = found, (OSError, _text(found))
        heard = [(rank, *said) for rank, said in enumerate(gathered(problem)) if said is not None]
        firsts = {kind: f"{text} (rank {rank})" for rank, kind, text in reversed(heard)}
        where = f"the sharded checkpoint of step {checkpoint.step} at {checkpoint.uri}"
        if OSError in firsts:
            raise OSError(f"{where} cannot be read: {firsts[OSError]}. Check the rank's access to storage") from error
        if DamagedError in firsts:
            self._say(f"{where} is damaged: {firsts[DamagedError]}")
            return False
        if DiffersError in firsts:
            raise ValueError(
                f"{where} differs from the state that was to be filled: {firsts[DiffersError]}. Make the state with "
                "the saved keys and shapes, or load another step"
            )
        if TensorKindError in firsts:
            raise TypeError(f"{where} cannot be loaded: {firsts[TensorKindError]}")
        return True

    def _tell_replaced(self, save: Staged) -> None:
        if save.metrics:  # perhaps the best save
            metrics = ", ".join(f"{name} {value:g}" for name, value in save.metrics.items())
            self._say(
                f"the sharded checkpoint of step {save.step} ({metrics}) was not written: a newer save came while "
                "an earlier one was still being written. Save less often if every checkpoint counts."
            )

    def _tell_unread(self, checkpoint: ShardedCheckpoint, unread: frozenset[str]) -> None:
        if unread:
            more = " ..." if len(unread) > MAX_TOLD else ""
            self._say(
                f"the sharded checkpoint of step {checkpoint.step} has values that no rank's state has a place for: "
                f"{', '.join(sorted(unread)[:MAX_TOLD])}{more}. They are not loaded: add their keys to the state if "
                "the training needs them"
            )

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(text, file=sys.stderr)


def _check(heard: Sequence[_Said]) -> None:
    for rank, said in enumerate(heard):
        if said.problem is not None:
            raise RuntimeError(f"rank {rank} cannot save its part: {said.problem}")
    if len({said.step for said in heard}) > 1:
        steps = ", ".join(f"rank {rank} step {said.step}" for rank, said in enumerate(heard))
        raise ValueError(f"save_sharded needs the same step on all ranks, but the ranks gave {steps}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
