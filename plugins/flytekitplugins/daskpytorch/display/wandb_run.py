"""Weights & Biases run, opened and fed in rank 0.

Apart from the driver's file, since rank 0 would import the driver's `RunState` and pages: 47 modules, 64 ms.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.process.streams import Screen, say
from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol.observer import RankObserver
from flytekitplugins.daskpytorch.records import Goodput, Histogram, LogRecord, Picture
from flytekitplugins.daskpytorch.settings import Wandb

if TYPE_CHECKING:
    import torch


LABEL = "Weights & Biases"
RUN_IS = f"{LABEL} run: "

MODE = "WANDB_MODE"
KEYLESS = ("offline", "dryrun", "disabled")
OFFLINE = (
    "The run is recorded offline, for `wandb sync`. In a pod, the run is lost with the pod, unless Wandb(dir=...) is a "
    "folder on a volume."
)

INIT_TIMEOUT = float(os.environ.get("WANDB_INIT_TIMEOUT", "15"))
"""Seconds for wandb's server when a run is opened. The run is then recorded offline."""
OPEN_TIMEOUT = INIT_TIMEOUT + 15.0
"""Seconds that rank 0's function waits until wandb is imported and the run is open."""
FINISH_TIMEOUT = 30.0


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    wandb: Wandb
    variables: Mapping[str, str] = field(repr=False)


class RankRun(RankObserver):
    """Opens a Weights & Biases run in a thread of rank 0, beside the gang's start. wandb's own queue takes the records.

    The user's `wandb.init()` returns this run, since `reinit` is `return_previous`.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._histograms: dict[str, Histogram] = {}
        self._has_lost = False
        self._opening = in_thread(self._open, "daskpytorch-wandb")

    def on_begin(self) -> None:
        """Wait until the run is open, so that the user's function finds the run in `wandb.run`."""
        self._opening.result(OPEN_TIMEOUT)

    def on_log(self, record: LogRecord) -> None:
        metrics = {**record.metrics, **self._histograms}
        self._histograms = {}
        try:
            shown = {name: _shown(value) for name, value in metrics.items()}
            self._opening.result().log({"step": record.step, **shown})
        except Exception as error:  # also after the user's `wandb.finish()`
            if not self._has_lost:
                self._has_lost = True
                say(
                    f"{LABEL} refused the record of step {record.step} ({type(error).__name__}: {error}). The run has "
                    "no refused records, and nothing after wandb.finish()."
                )

    def on_watch(self, model: torch.nn.Module, log_freq: int) -> None:
        """Take histograms of the model's gradients before every `log_freq`-th step of its optimizer.

        `wandb.watch` is no alternative: it logs from inside the backward pass, sees only one rank's gradients, and
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

    def on_goodput(self, goodput: Goodput) -> None:
        if _is_open(run := self._opening.result()):
            run.summary["goodput"] = {"share": goodput.share, **goodput.as_dict(), **goodput.bill}

    def on_end(self, exit_code: int, stopped_early: str | None = None) -> None:
        try:
            if _is_open(run := self._opening.result(OPEN_TIMEOUT)):
                if stopped_early is not None:
                    run.summary["stopped_early"] = stopped_early
                run.finish(exit_code)
        except Exception as error:  # a TimeoutError, if the server does not answer
            say(f"{LABEL}: {error!r}. Records may be missing: `wandb sync` sends those in rank 0's folder wandb.")
        _tear_down(exit_code)  # `finish` may return before the run's file is complete

    # ---- in a thread

    def _open(self) -> Any:
        import wandb

        os.environ.update(self._settings.variables)  # also for the user's own `wandb.Api()`
        common = self._common_settings()
        if common.mode not in KEYLESS and not wandb.login(prompt=False, verify=False):
            say(f"{LABEL}: no API key found. Call `wandb login`, or name a Flyte secret: Wandb(secret=...). {OFFLINE}")
            common.mode = "offline"
        try:
            run = self._init()
        except Exception as error:
            say(f"{LABEL}: {error!r}. {OFFLINE}")
            _tear_down(0)
            os.environ[MODE] = "offline"
            self._common_settings()
            run = self._init()
        run.define_metric("*", step_metric="step")
        if not run.disabled:
            where = f"wandb sync {run.settings.sync_dir}" if run.offline else run.url
            print(f"{RUN_IS}{where}", file=Screen(), flush=True)
        return run

    def _common_settings(self) -> Any:
        """Set what also holds for the user's own calls of wandb in this process, and return wandb's settings."""
        import wandb

        limits = {"init_timeout": INIT_TIMEOUT, "finish_timeout": FINISH_TIMEOUT, "finish_timeout_raises": True}
        common = wandb.Settings(silent=True, console="off", reinit="return_previous", **limits)
        return wandb.setup(common).settings

    def _init(self) -> Any:
        import wandb

        asked = self._settings.wandb
        return wandb.init(
            **{name: getattr(asked, name) for name in ("project", "entity", "id", "name", "group", "dir")},
            tags=list(asked.tags) or None,
            config=dict(asked.config),
            resume="allow",
        )


def _tear_down(exit_code: int) -> None:
    """End wandb's own process. If that fails, wandb raises an error or calls `sys.exit`. Neither may end the rank."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown(exit_code)


def _is_open(run: Any) -> bool:
    import wandb

    return wandb.run is run


def _shown(value: Any) -> Any:
    import wandb

    if isinstance(value, Histogram):
        return wandb.Histogram(np_histogram=(list(value.counts), list(value.edges)))
    if isinstance(value, Picture):
        return wandb.Image(value.image(), caption=value.caption or None)
    return value
