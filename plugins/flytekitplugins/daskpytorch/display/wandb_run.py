"""A Weights & Biases run, fed from rank 0 by a thread, so that a slow server never slows the training."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.display.wandb_shared import SharedRun
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.media import Histogram, Picture
from flytekitplugins.daskpytorch.process.streams import Screen
from flytekitplugins.daskpytorch.protocol.observer import RankObserver
from flytekitplugins.daskpytorch.settings import Wandb

if TYPE_CHECKING:
    import torch


RUN_IS = "Weights & Biases run: "
"""Begins the line that rank 0 writes once its run is open, and that says where that is."""

INIT_TIMEOUT = float(os.environ.get("WANDB_INIT_TIMEOUT", "15"))
"""Seconds for the server to answer when the run is opened; after that the run is recorded offline."""
STOPPED_EARLY = "stopped_early"
"""In the summary of such a run: why."""
GOODPUT = "goodput"
"""In the summary: the seconds of each kind, and which part of all went into steps."""
OPEN_TIMEOUT = INIT_TIMEOUT + 15.0
"""Seconds that the function waits for the run: wandb's import and its own process take some, too."""
CLOSE_TIMEOUT = 60.0
"""Seconds for what is queued when the run is closed."""
MAX_WAITING = 10_000
"""Records that wait for Weights & Biases before further ones are dropped, with a notice."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that rank 0 needs to open the run."""

    wandb: Wandb
    id: str
    name: str
    mode: str
    """wandb's own: online, offline, disabled, shared."""
    key: str | None = field(repr=False)
    config: Mapping[str, Any]
    """Hyper-parameters and the gang's shape."""
    notes: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """wandb's settings as the driver's machine has them, by wandb's own names: the key's server among them."""


def _shown(value: Any) -> Any:
    """What is drawn, as wandb's own; its import the training need not wait for."""
    if isinstance(value, Histogram):
        import wandb

        return wandb.Histogram(np_histogram=(list(value.counts), list(value.edges)))
    if isinstance(value, Picture):
        import wandb
        from PIL import Image

        return wandb.Image(Image.open(io.BytesIO(value.png)), caption=value.caption or None)
    return value


@dataclass(frozen=True, kw_only=True)
class _End:
    exit_code: int
    reason: str | None
    """Why a training that did not fail ends early."""


class Tracker(RankObserver):
    """Rank 0's run. Calls return at once; a thread opens the run and feeds it; no failure reaches the training."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._waiting: queue.Queue[LogRecord | Goodput | _End | threading.Event] = queue.Queue()
        self._histograms: dict[str, Histogram] = {}
        """Of gradients, since the last record."""
        self._num_dropped = 0
        self._num_late = 0
        """Records after the user's own `wandb.finish()`."""
        self._has_refused = False
        self._is_settled = threading.Event()
        """Set once the run is open, or could not be opened."""
        self._finishing = threading.Lock()
        self._thread = threading.Thread(target=self._feed, name="daskpytorch-wandb", daemon=True)
        self._thread.start()

    def begins(self) -> None:
        """Wait for the run, so that the function finds it in `wandb.run`."""
        if not self._is_settled.wait(OPEN_TIMEOUT):
            _say(f"the run is not open after {OPEN_TIMEOUT:g} s. The training begins without it.")

    def logged(self, record: LogRecord) -> None:
        """Queue a record."""
        if self._waiting.qsize() >= MAX_WAITING:
            self._num_dropped += 1
            return
        if self._histograms:
            record = dataclasses.replace(record, metrics={**record.metrics, **self._histograms})
            self._histograms = {}
        self._waiting.put(record)

    def watch(self, model: torch.nn.Module, log_freq: int) -> None:
        """Take histograms of the model's gradients before every so many steps of its optimizer.

        Not by `wandb.watch`, which logs from inside the backward pass: it sees one rank's gradients only, and an error
        of its own becomes the training's.
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
        """Have it in the run's summary."""
        self._waiting.put(goodput)

    def close(self, exit_code: int, stopped_early: str | None = None) -> None:
        """Close the run with this exit code; where the training was stopped early, with the reason in its summary."""
        if self._finishing.acquire(blocking=False):  # the first to call decides; a stop order may come meanwhile
            self._waiting.put(_End(exit_code=exit_code, reason=stopped_early))
        self._thread.join(CLOSE_TIMEOUT)

    def _drain(self) -> None:
        """Wait until all that is queued is in the run."""
        is_drained = threading.Event()
        self._waiting.put(is_drained)
        is_drained.wait(CLOSE_TIMEOUT)

    def _feed(self) -> None:
        end: _End | None = None
        try:
            import wandb

            run = self._open()
            with SharedRun(wandb, run, self._drain) as shared:
                self._is_settled.set()
                end = self._take_all(run, shared)
                if end.reason is not None and not shared.is_finished:
                    run.summary[STOPPED_EARLY] = end.reason
                shared.finish(end.exit_code)
            wandb.teardown(end.exit_code)  # `finish` may return before the run's file is whole
        except Exception as error:
            self._is_settled.set()
            _say(f"{type(error).__name__}: {error}. The training goes on.")
            while end is None:
                if isinstance(item := self._waiting.get(), threading.Event):
                    item.set()
                elif isinstance(item, _End):
                    end = item
        if self._num_dropped:
            _say(f"too slow; {self._num_dropped} records were dropped.")
        if self._num_late:
            _say(
                f"wandb.finish() had ended the run; {self._num_late} records that were logged after it are not in it. "
                "Leave it out: the run ends with the task."
            )

    def _take_all(self, run: Any, shared: SharedRun) -> _End:
        """Feed the run until its end."""
        while not isinstance(item := self._waiting.get(), _End):
            if isinstance(item, threading.Event):
                item.set()
            elif shared.is_finished:
                self._num_late += isinstance(item, LogRecord)
            elif isinstance(item, Goodput):
                run.summary[GOODPUT] = {"share": item.share, **item.as_dict()}
            else:
                self._record(run, item)
        return item

    def _record(self, run: Any, record: LogRecord) -> None:
        try:
            run.log({"step": record.step, **{name: _shown(value) for name, value in record.metrics.items()}})
        except Exception as error:
            if not self._has_refused:
                _say(f"{error}. Of such records only the numbers are kept.")
            self._has_refused = True
            with contextlib.suppress(Exception):  # it may be a name
                run.log({"step": record.step, **record.numbers})

    def _open(self) -> Any:
        import wandb

        if self._settings.key is not None:  # for the user's own `wandb.Api()`; with the server that the key is for
            os.environ["WANDB_API_KEY"] = self._settings.key
            if "base_url" in self._settings.given:
                os.environ["WANDB_BASE_URL"] = self._settings.given["base_url"]
        try:
            run = self._init(self._settings.mode)
        except Exception as error:
            if self._settings.mode in ("offline", "disabled"):
                raise
            _say(f"{type(error).__name__}: {error}. The run is recorded offline; send it later with `wandb sync`.")
            wandb.teardown(0)
            run = self._init("offline")
        run.define_metric("*", step_metric="step")
        if self._settings.mode != "disabled":
            where = f"wandb sync {run.settings.sync_dir}" if run.offline else run.url
            print(f"{RUN_IS}{where}", file=Screen(), flush=True)
        return run

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


def _say(text: str) -> None:
    print(f"Weights & Biases: {text}", file=Screen())
