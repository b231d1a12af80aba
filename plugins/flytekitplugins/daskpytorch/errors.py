"""The errors that a gang raises. Ranks and users import this module, so it imports no heavy library."""

import functools
from typing import ClassVar, Literal

__all__ = [
    "GangError",
    "GangHungError",
    "GangStartError",
    "NoDebuggerError",
    "PreemptedError",
    "StoppedEarlyError",
    "WorkerLostError",
]


Kind = Literal["exception", "memory", "signal", "exit", "lost", "hang", "desync", "preempted", "start", "closed"]
"""Kinds of a gang's failures, described at `GangError.kind`."""


class GangError(RuntimeError):
    """A gang failed. The fields name the failed rank, its host and the cause.

    If the failed rank raised an exception that can be rebuilt, the driver raises that exception, with the `GangError`
    as its `__cause__`.

    Examples:
        >>> from flytekitplugins.daskpytorch import current_rank, dispatch
        >>> def train() -> float:
        ...     return 1 / (1 - current_rank().rank)
        >>> try:
        ...     dispatch.run(client, train).result()
        ... except ZeroDivisionError as error:
        ...     print(f"rank {error.__cause__.rank}: {error}")
        rank 1: division by zero
    """

    _usual_kind: ClassVar[Kind] = "exception"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        worker: str | None = None,
        host: str | None = None,
        cause: str | None = None,
        step: int | None = None,
        time: float | None = None,
        rank_traceback: str = "",
        log_tail: str = "",
        is_repeated: bool = False,
        exit_code: int | None = None,
        kind: Kind | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind or self._usual_kind
        """Kind of the failure:

        - `exception`: the rank raised an exception, such as a collective's error after a lost connection
        - `memory`: the rank was killed for memory, or raised an error of too little memory on the host or the GPU
        - `signal`: a signal ended the rank, such as SIGSEGV or SIGKILL
        - `exit`: the rank ended with an exit code of its own
        - `lost`: the rank was lost with its worker, agent or GPU, or NCCL's watchdog aborted the rank
        - `hang`: ranks gave no sign of life
        - `desync`: the ranks called different collectives, or one rank left others in a collective
        - `preempted`: the task or a worker was told to end
        - `start`: the gang could not start
        - `closed`: a call came after `StayingGang.close`
        """
        self.rank = rank
        """Rank to which the failure is attributed. None if no rank failed."""
        self.worker = worker
        """Address of the failed rank's Dask worker. Without Dask: name of its node."""
        self.host = host
        """Name of the host on which the failed rank ran."""
        self.cause = cause
        """The failed rank's end in one line, such as its exit code or exception."""
        self.step = step
        """Newest training step that the failed rank passed to `log` or to a checkpoint."""
        self.time = time
        """Time of the failure, in seconds since the epoch."""
        self.rank_traceback = rank_traceback
        """Traceback of the failed rank's exception, as text. Empty if the rank raised no exception."""
        self.log_tail = log_tail
        """Last lines that the failed rank wrote. The task's log has all its lines, marked with the rank's number."""
        self.is_repeated = is_repeated
        """True if the previous failure was the same error at the same step. A retry of the task would fail again."""
        self.exit_code = exit_code
        """Exit code that the failed rank would have as a program: 1 after an exception, the code of `sys.exit`, or the
        negative number of the signal that ended it. None: unknown, the rank hung, or no rank failed."""


class NoDebuggerError(RuntimeError):
    """A rank called `breakpoint()`, and no terminal has attached to its debugger in time.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, dispatch
        >>> from flytekitplugins.daskpytorch.errors import NoDebuggerError
        >>> def train() -> None:
        ...     breakpoint()  # `daskpytorch attach 0` opens pdb here
        >>> isinstance(dispatch.run(client, train, gang=Gang(attach_timeout=0.1)).exception(), NoDebuggerError)
        True
    """


class WorkerLostError(GangError):
    """A worker, the scheduler, a rank's process or its GPU was lost. The infrastructure failed, not the user's code.

    Has the fields of `GangError`.

    Examples:
        >>> import os
        >>> from flytekitplugins.daskpytorch import Gang, WorkerLostError, current_rank, dispatch
        >>> def train() -> None:
        ...     if current_rank().rank == 1:
        ...         os.kill(os.getpid(), 9)  # as Kubernetes would
        >>> try:
        ...     dispatch.run(client, train, gang=Gang(max_restarts=0)).result()
        ... except WorkerLostError as error:
        ...     print(f"rank {error.rank} was lost")
        rank 1 was lost
    """

    _usual_kind: ClassVar[Kind] = "lost"


class PreemptedError(WorkerLostError):
    """The task or one of its workers was told to end, for example by SIGTERM. The next attempt resumes the training.

    Has the fields of `GangError`. Flyte retries the task. Without Flyte, call `dispatch.run` in a loop, as in the
    example.

    Examples:
        >>> import tempfile
        >>> from flytekitplugins.daskpytorch import Gang, PreemptedError, dispatch
        >>> def train_to_the_end(folder: str) -> list[str]:
        ...     while True:
        ...         try:
        ...             return dispatch.run(client, lambda: "trained", gang=Gang(checkpoint_uri=folder)).result()
        ...         except PreemptedError as error:
        ...             print(f"on with other workers: {error}")
        >>> train_to_the_end(tempfile.mkdtemp())
        ['trained', 'trained']
    """

    _usual_kind: ClassVar[Kind] = "preempted"


class GangCancelledError(Exception):
    """The user cancelled the gang."""


class GangHungError(GangError):
    """Ranks of a gang wait for each other for ever, or gave no sign of life for longer than `hang_timeout` allows.

    The message has the stack of each rank.

    Has the fields of `GangError`.

    Examples:
        >>> import time
        >>> from flytekitplugins.daskpytorch import Gang, GangHungError, current_rank, dispatch
        >>> def train() -> None:
        ...     if current_rank().rank == 1:
        ...         time.sleep(3600)
        >>> try:
        ...     dispatch.run(client, train, gang=Gang(hang_timeout=0.5, max_restarts=0)).result()
        ... except GangHungError as error:
        ...     print(f"rank {error.rank}")
        rank 1
    """

    _usual_kind: ClassVar[Kind] = "hang"


class GangStartError(GangError):
    """A gang could not start: workers or ranks did not arrive within `start_timeout`, or no Dask scheduler answered.

    Has the fields of `GangError`.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, GangStartError, dispatch
        >>> try:
        ...     dispatch.run(client, print, "hello", gang=Gang(min_workers=100))
        ... except GangStartError as error:
        ...     print(error)
        the cluster at ... has 2 workers, but needs 100. Start workers, or wait for them...
    """

    _usual_kind: ClassVar[Kind] = "start"


class StoppedEarlyError(Exception):
    """A model of a sweep (`dispatch.map`) was stopped early because other models were better. The model did not fail.

    An observer that raises this error from its method `on_log` ends its gang, as in the example.

    Examples:
        >>> import itertools, time
        >>> from flytekitplugins.daskpytorch import (
        ...     Gang, LogRecord, Observer, StoppedEarlyError, current_rank, dispatch
        ... )
        >>> class Enough(Observer):
        ...     def on_log(self, record: LogRecord) -> None:
        ...         if (loss := record.numbers["loss"]) < 0.1:
        ...             raise StoppedEarlyError("good enough", epoch=record.step, metric="loss", value=loss)
        >>> def train() -> None:
        ...     for step in itertools.count(start=1):
        ...         current_rank().log({"loss": 1 / step}, step=step)
        ...         time.sleep(0.01)
        >>> stopped = dispatch.run(client, train, gang=Gang(observers=(Enough,))).exception()
        >>> f"{stopped} after {stopped.epoch} steps"
        'good enough after 11 steps'
    """

    def __init__(self, message: str, *, epoch: int, metric: str, value: float) -> None:
        super().__init__(message)
        self.epoch = epoch
        """Epoch, counted from 1, at which the model was compared with other models and stopped."""
        self.metric = metric
        """Metric by which the model was compared."""
        self.value = value
        """Value of the metric in that epoch."""

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = functools.partial(type(self), epoch=self.epoch, metric=self.metric, value=self.value)
        return (rebuild, (self.args[0],))
