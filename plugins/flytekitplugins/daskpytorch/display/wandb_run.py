"""Weights & Biases run, opened and fed in rank 0. The user's own wandb calls in rank 0 join this run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.display.feeder import Feeder, knock
from flytekitplugins.daskpytorch.media import Histogram, Picture
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.streams import Screen
from flytekitplugins.daskpytorch.protocol.observer import RankObserver
from flytekitplugins.daskpytorch.records import Goodput, LogRecord
from flytekitplugins.daskpytorch.settings import Wandb

if TYPE_CHECKING:
    import torch


LABEL = "Weights & Biases"
RUN_IS = f"{LABEL} run: "
"""Start of the output line in which rank 0 writes the open run's URL or upload command."""

LATER = "The run is recorded offline; send it later with `wandb sync`"
IN_POD = "The run is recorded offline, and is lost with the pod unless Wandb(dir=...) is a folder on a volume"

INIT_TIMEOUT = float(os.environ.get("WANDB_INIT_TIMEOUT", "15"))
"""Timeout, in seconds, for wandb's server when a run is opened. After the timeout, the run is recorded offline."""
STOPPED_EARLY = "stopped_early"
"""Name of the entry in a Weights & Biases run's summary with the reason for early stopping."""
GOODPUT = "goodput"
"""Name of the entry in a Weights & Biases run's summary with the account of the gang's time."""
OPEN_TIMEOUT = INIT_TIMEOUT + 15.0
"""Maximum time, in seconds, that rank 0's function waits until wandb is imported and the run is open."""
CLOSE_TIMEOUT = 60.0
"""Timeout, in seconds, for sending the queued records when a Weights & Biases run is closed."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings with which rank 0 opens its Weights & Biases run."""

    wandb: Wandb
    id: str
    name: str
    mode: str
    """Mode of wandb: online, offline, disabled or shared."""
    key: str | None = field(repr=False)
    in_pod: bool = False
    """True in a task on Flyte's backend, whose pods take their files with them when they end."""
    config: Mapping[str, Any]
    """Configuration of the run: hyper-parameters and the gang's shape."""
    notes: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of wandb on the driver's machine, by wandb's own names, such as the API key's server."""


def _shown(value: Any) -> Any:
    """Return histograms and pictures as wandb's types, and other values unchanged.

    The feeder's thread imports wandb, so the training never waits for the import.
    """
    if isinstance(value, Histogram):
        import wandb

        return wandb.Histogram(np_histogram=(list(value.counts), list(value.edges)))
    if isinstance(value, Picture):
        import wandb
        from PIL import Image

        return wandb.Image(Image.open(io.BytesIO(value.png)), caption=value.caption or None)
    return value


class Tracker(RankObserver):
    """Observer in rank 0 that feeds a Weights & Biases run from a thread. No error reaches the training.

    Only `begins` and `close` wait for the thread.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._shared: SharedRun | None = None
        self._histograms: dict[str, Histogram] = {}
        """Newest histograms of gradients since the last log record, by metric name."""
        self._num_late = 0
        """Number of records that came after the user's code had called `wandb.finish()`, and are lost."""
        self._has_refused = False
        self._feeder = Feeder(LABEL)
        self._feeder.start(self._open)

    def begins(self) -> None:
        """Wait until the run is open, so that the user's function finds the run in `wandb.run`."""
        if not self._feeder.has_begun.wait(OPEN_TIMEOUT):
            say(
                f"{LABEL}: the run is not open after {OPEN_TIMEOUT:g} s, so the server may be slow. The training "
                "begins with wandb.run = None, and its records wait for the run."
            )

    def logged(self, record: LogRecord) -> None:
        """Queue a record, together with the newest histograms of gradients."""
        if self._histograms:
            record = dataclasses.replace(record, metrics={**record.metrics, **self._histograms})
            self._histograms = {}
        self._feeder.offer(functools.partial(self._record, record))

    def watch(self, model: torch.nn.Module, log_freq: int) -> None:
        """Take histograms of the model's gradients before every `log_freq`-th step of its optimizer.

        `wandb.watch` is no alternative. wandb logs from inside the backward pass, sees only one rank's gradients, and
        raises its errors in the training.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        names = {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}
        num_steps = itertools.count(1)

        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p in names]
            if parameters and next(num_steps) % log_freq == 0:
                self._histograms |= {
                    f"gradients/{names[p]}": Histogram.of(p.grad) for p in parameters if p.grad is not None
                }

        register_optimizer_step_pre_hook(look)

    def accounted(self, goodput: Goodput) -> None:
        """Queue the account of the gang's time for the run's summary."""
        self._feeder.put(functools.partial(self._sum_up, GOODPUT, {"share": goodput.share, **goodput.as_dict()}))

    def close(self, exit_code: int, stopped_early: str | None = None) -> None:
        """Close the run.

        Args:
            exit_code: Exit code that the run records. 0 means success.
            stopped_early: Reason for early stopping, for the run's summary. None: not stopped early.
        """
        self._feeder.end(functools.partial(self._end, exit_code, stopped_early), CLOSE_TIMEOUT)

    # ---- in the thread

    def _sum_up(self, name: str, value: Any) -> None:
        if self._shared is not None and not self._shared.is_finished:
            self._shared.run.summary[name] = value

    def _end(self, exit_code: int, stopped_early: str | None) -> None:
        import wandb

        if self._shared is None:
            return
        self._shared.close()
        if self._settings.mode != "disabled" and not self._shared.run.offline:
            knock(self._shared.run.settings.base_url)  # `finish` would wait for the server without a limit
        if stopped_early is not None:
            self._sum_up(STOPPED_EARLY, stopped_early)
        self._shared.finish(exit_code)
        wandb.teardown(exit_code)  # `finish` may return before the run's file is complete
        if self._num_late:
            say(
                f"{LABEL}: wandb.finish() had ended the run; {self._num_late} records that were logged after it are "
                "not in it. Remove the call of wandb.finish(): the run ends with the task."
            )

    def _record(self, record: LogRecord) -> None:
        if self._shared is None or self._shared.is_finished:
            self._num_late += 1
            return
        run = self._shared.run
        try:
            run.log({"step": record.step, **{name: _shown(value) for name, value in record.metrics.items()}})
        except Exception as error:
            if not self._has_refused:
                say(
                    f"{LABEL} refused the record of step {record.step} ({type(error).__name__}: {error}). The run has "
                    "only the numbers of refused records. Log names and values that wandb.log accepts."
                )
            self._has_refused = True
            with contextlib.suppress(Exception):  # a metric's name may be the problem
                run.log({"step": record.step, **record.numbers})

    def _open(self) -> None:
        import wandb

        if self._settings.key is not None:  # key and its server, for the user's `wandb.Api()`
            os.environ["WANDB_API_KEY"] = self._settings.key
            if "base_url" in self._settings.given:
                os.environ["WANDB_BASE_URL"] = self._settings.given["base_url"]
        try:
            run = self._init(self._settings.mode)
        except Exception as error:
            if self._settings.mode in ("offline", "disabled"):
                raise
            say(f"{LABEL}: {error!r}. {IN_POD if self._settings.in_pod else LATER}.")
            wandb.teardown(0)
            run = self._init("offline")
        run.define_metric("*", step_metric="step")
        if self._settings.mode != "disabled":
            print(f"{RUN_IS}{self._where(run)}", file=Screen(), flush=True)
        self._shared = SharedRun(wandb, run, functools.partial(self._feeder.drain, CLOSE_TIMEOUT))

    def _where(self, run: Any) -> str:
        if not run.offline:
            return str(run.url)
        if self._settings.in_pod and not (self._settings.wandb.dir or os.environ.get("WANDB_DIR")):
            return f"offline, and lost with the pod {socket.gethostname()}: Wandb(secret=...) records online"
        return f"wandb sync {run.settings.sync_dir}"

    def _init(self, mode: str) -> Any:
        import wandb

        asked, given = self._settings, dict(self._settings.given)
        if asked.key is not None and mode != "offline":
            given["api_key"] = asked.key
        return wandb.init(
            project=asked.wandb.project,
            entity=asked.wandb.entity,
            id=asked.id,
            name=asked.name,
            group=asked.wandb.group,
            tags=list(asked.wandb.tags) or None,
            notes=asked.notes,
            config=dict(asked.config),
            mode=mode,  # type: ignore[arg-type] # wandb's own word
            dir=asked.wandb.dir,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT, **given),
        )


class SharedRun:
    """Open run of the task, which the user's own calls of wandb join."""

    def __init__(self, wandb: Any, run: Any, drain: Callable[[], object]) -> None:
        """Make `wandb.init` join the run.

        Args:
            wandb: Module wandb, whose `init` is replaced.
            run: Open run of wandb.
            drain: Waits until the run has all queued records.
        """
        self.is_finished = False
        """True if the user's code has finished the run."""
        self.run = run
        self._wandb = wandb
        self._drain = drain
        self._init = wandb.init
        wandb.init = functools.wraps(wandb.init)(functools.partial(self._join))
        run.__class__ = _with_end(type(run), self._end)

    def close(self) -> None:
        """Restore wandb's own `init`, since the process may outlive the run, as in debug mode."""
        self._wandb.init = self._init

    def finish(self, exit_code: int) -> None:
        """Finish the run, unless the user's code has finished the run."""
        if not self.is_finished:
            self.is_finished = True
            self.run.finish(exit_code)

    def _end(self) -> None:
        if not self.is_finished:
            self._drain()
            self.is_finished = True

    def _join(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `wandb.init`: add the call's configuration, name, notes and tags to the open run, and return it.

        After the run's end, or if the call's `reinit` asks for another run, call wandb's own `init`.

        Raises:
            ValueError: The call names another project, entity or id.
        """
        given = inspect.signature(self._init).bind_partial(*args, **kwargs).arguments
        settings = given.get("settings") or {}
        asked = {**(settings if isinstance(settings, Mapping) else vars(settings)), **given}
        if self.is_finished or asked.get("reinit") in (True, "finish_previous", "create_new"):
            return self._init(*args, **kwargs)
        self._refuse_other(asked)
        if given.get("config"):
            self.run.config.update(given["config"], allow_val_change=True)
        for name in ("name", "notes"):
            if given.get(name):
                setattr(self.run, name, given[name])
        if given.get("tags"):
            self.run.tags = tuple(dict.fromkeys((*(self.run.tags or ()), *given["tags"])))
        return self.run

    def _refuse_other(self, asked: Mapping[str, Any]) -> None:
        for name, mine in {"project": self.run.project, "entity": self.run.entity, "id": self.run.id}.items():
            wanted = asked.get(name) or (asked.get("run_id") if name == "id" else None)
            if mine and wanted and wanted != mine:
                raise ValueError(
                    f"wandb.init({name}={wanted!r}): the task has opened a run with {name}={mine!r}, which wandb.init "
                    f"joins. Leave {name} out of wandb.init, or give Wandb({name}={wanted!r}) in the task's config. "
                    "wandb.init(reinit='create_new') opens another run beside the task's."
                )


def _with_end(kind: type[Any], end: Callable[[], object]) -> type[Any]:
    """Return a subclass of the class of wandb's runs, which calls `end` before a run finishes."""

    class Run(kind):  # type: ignore[misc]
        def finish(self, *args: Any, **kwargs: Any) -> None:
            end()
            super().finish(*args, **kwargs)

        def __exit__(self, *error: object) -> None:
            end()
            super().__exit__(*error)

    return Run
