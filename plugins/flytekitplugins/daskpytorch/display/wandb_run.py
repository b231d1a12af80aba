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
from typing import TYPE_CHECKING, Any, Literal

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.media import Histogram, Picture
from flytekitplugins.daskpytorch.process.streams import Screen
from flytekitplugins.daskpytorch.protocol.observer import RankObserver
from flytekitplugins.daskpytorch.settings import Wandb

if TYPE_CHECKING:
    import torch

__all__ = ["RUN_IS", "RunSettings", "Tracker"]

RUN_IS = "Weights & Biases run: "
"""Begins the line that rank 0 writes once its run is open, and that says where that is."""

INIT_TIMEOUT = float(os.environ.get("WANDB_INIT_TIMEOUT", "15"))
"""Seconds for the server to answer when the run is opened; after that the run is recorded offline."""
STOPPED_EARLY = "stopped_early"
"""In the summary of such a run: why."""
GOODPUT = "goodput"
"""In the summary: the seconds of each kind, and which part of all went into steps."""
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
    mode: Literal["online", "offline", "disabled"]
    key: str | None = field(repr=False)
    config: Mapping[str, Any]
    """Hyper-parameters and the gang's shape."""
    notes: str | None = None


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
        self._waiting: queue.Queue[LogRecord | Goodput | _End] = queue.Queue()
        self._histograms: dict[str, Histogram] = {}
        """Of gradients, since the last record."""
        self._num_dropped = 0
        self._has_refused = False
        self._finishing = threading.Lock()
        self._thread = threading.Thread(target=self._feed, name="daskpytorch-wandb", daemon=True)
        self._thread.start()

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

    def _feed(self) -> None:
        item: LogRecord | Goodput | _End | None = None
        try:
            import wandb

            run = self._open()
            while not isinstance(item := self._waiting.get(), _End):
                if isinstance(item, Goodput):
                    run.summary[GOODPUT] = {"share": item.share, **item.as_dict()}
                else:
                    self._record(run, item)
            if item.reason is not None:
                run.summary[STOPPED_EARLY] = item.reason
            run.finish(exit_code=item.exit_code)
            wandb.teardown(item.exit_code)  # `finish` may return before the run's file is whole
        except Exception as error:
            print(f"Weights & Biases: {type(error).__name__}: {error}. The training goes on.", file=Screen())
            while not isinstance(item, _End):
                item = self._waiting.get()
        if self._num_dropped:
            print(f"Weights & Biases: too slow; {self._num_dropped} records were dropped.", file=Screen())

    def _record(self, run: Any, record: LogRecord) -> None:
        try:
            run.log({"step": record.step, **{name: _shown(value) for name, value in record.metrics.items()}})
        except Exception as error:
            if not self._has_refused:
                print(f"Weights & Biases: {error}. Of such records only the numbers are kept.", file=Screen())
            self._has_refused = True
            with contextlib.suppress(Exception):  # it may be a name
                run.log({"step": record.step, **record.numbers})

    def _open(self) -> Any:
        import wandb

        if self._settings.key is not None:
            os.environ["WANDB_API_KEY"] = self._settings.key
        try:
            run = self._init(self._settings.mode)
        except Exception as error:
            if self._settings.mode != "online":
                raise
            print(
                f"Weights & Biases: {type(error).__name__}: {error}. The run is recorded offline; send it later with "
                "`wandb sync`.",
                file=Screen(),
            )
            wandb.teardown(0)
            run = self._init("offline")
        run.define_metric("*", step_metric="step")
        if self._settings.mode != "disabled":
            where = f"wandb sync {run.settings.sync_dir}" if run.offline else run.url
            print(f"{RUN_IS}{where}", file=Screen(), flush=True)
        return run

    def _init(self, mode: Literal["online", "offline", "disabled"]) -> Any:
        import wandb

        asked = self._settings
        return wandb.init(
            project=asked.wandb.project,
            entity=asked.wandb.entity,
            id=asked.id,
            name=asked.name,
            group=asked.wandb.group,
            tags=list(asked.wandb.tags),
            notes=asked.notes,
            config=dict(asked.config),
            mode=mode,
            dir=asked.wandb.dir,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT),
        )
