"""What a gang's failure looks like to its caller. Imports nothing of ours."""

import functools

__all__ = [
    "GangError",
    "GangHungError",
    "GangStartError",
    "NoDebuggerError",
    "PreemptedError",
    "StoppedEarlyError",
    "WorkerLostError",
]


class GangError(RuntimeError):
    """A gang failed: who, where and why.

    Where the failing rank raised an exception that can be rebuilt, the driver raises that exception, and this one is
    its `__cause__`.
    """

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
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first in earnest; None where no rank did."""
        self.worker = worker
        """The address of its Dask worker, or the name of its node."""
        self.host = host
        """The name of its host."""
        self.cause = cause
        """How it ended, in a line."""
        self.step = step
        """The newest step that it had named, to `log` or to a checkpoint."""
        self.time = time
        """When it failed, in seconds since the epoch."""
        self.rank_traceback = rank_traceback
        """The traceback of the exception it raised, or an empty string."""
        self.log_tail = log_tail
        """The last lines that it wrote; its whole log stands in the task's own log, marked with its rank."""
        self.is_repeated = is_repeated
        """The same error had come at the same step before, so that another attempt of the task would end so, too."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args[0], {k: v for k, v in vars(self).items() if k != "__notes__"}))


class NoDebuggerError(RuntimeError):
    """A debugger was called for in a rank, and nobody can talk to it there."""


class WorkerLostError(GangError):
    """A worker, the scheduler or a rank's process was taken away: the infrastructure failed, not the user's code."""


class PreemptedError(WorkerLostError):
    """The task, or one of its workers, was told to end; the next attempt goes on from the newest checkpoint."""


class GangHungError(GangError):
    """Ranks stood still for longer than `hang_timeout` allows; the message says what each was doing."""


class GangStartError(GangError):
    """The gang could not be formed: workers or ranks did not come in time."""


class StoppedEarlyError(Exception):
    """A model of `dispatch.map` was not trained to its end, because others were better: nothing has failed."""

    def __init__(self, message: str, *, epoch: int, metric: str, value: float) -> None:
        super().__init__(message)
        self.epoch = epoch
        """The last epoch that counted."""
        self.metric = metric
        """The name of what was compared."""
        self.value = value
        """Its value after that epoch."""

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = functools.partial(type(self), epoch=self.epoch, metric=self.metric, value=self.value)
        return (rebuild, (self.args[0],))


def _rebuild(cls: type[GangError], message: str, fields: dict[str, object]) -> GangError:
    error = cls(message)
    vars(error).update(fields)
    return error
