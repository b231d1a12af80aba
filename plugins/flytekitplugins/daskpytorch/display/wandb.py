"""Weights & Biases: one run per gang. The driver decides its settings; rank 0 opens and feeds it.

The driver never imports wandb, so a session of the user stays unchanged. Rank 0 imports this file, too: it imports no
display, whose 47 modules would take 64 ms there.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flytekitplugins.daskpytorch.display.training import LINK_VARIABLE, run_config, run_id
from flytekitplugins.daskpytorch.process.streams import Screen, say, without_secrets
from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.protocol.observer import Observer, RankObserver
from flytekitplugins.daskpytorch.records import Goodput, Histogram, LogRecord, Picture
from flytekitplugins.daskpytorch.settings import Wandb

LABEL = "Weights & Biases"
RUN_IS = f"{LABEL} run: "

KEY, MODE, NOTES = "WANDB_API_KEY", "WANDB_MODE", "WANDB_NOTES"
OTHERS = ("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_TAGS")
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


def variables_of(wandb: Wandb) -> dict[str, str]:
    """Return the variables that rank 0 gets from this process. ValueError: the Flyte secret does not exist."""
    known = {NOTES: os.environ.get(LINK_VARIABLE, ""), **os.environ}
    found = {name: known[name] for name in (KEY, MODE, NOTES, *OTHERS) if known.get(name)}
    if wandb.mode is not None:
        found[MODE] = wandb.mode
    if found.get(MODE) in KEYLESS:
        found.pop(KEY, None)
    elif wandb.secret is not None:
        found[KEY] = current_execution().secret(wandb.secret)
    return found


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    wandb: Wandb
    variables: Mapping[str, str] = field(repr=False)


class WandbObserver(Observer):
    """Makes rank 0 feed a Weights & Biases run, which all attempts of the gang share."""

    def __init__(self, wandb: Wandb, variables: Mapping[str, str], execution: str | None) -> None:
        self._wandb, self._variables, self._execution = wandb, variables, execution
        self.where: str | None = None
        """URL of the run, or the command that uploads an offline run. None until rank 0 has opened it."""

    def on_event(self, event: journal.Event) -> None:
        match event:
            case journal.Began(training=training):
                self._training = training
            case journal.Placed(shape=shape):
                self._shape = shape
            case journal.Wrote(rank=0, lines=lines):
                said = [line.removeprefix(RUN_IS) for line in lines if line.startswith(RUN_IS)]
                self.where = said[-1] if said else self.where

    def places(self) -> Mapping[str, str]:
        return {LABEL: self.where} if self.where is not None else {}

    def for_rank(self) -> Callable[[], RankRun]:
        return functools.partial(RankRun, RunSettings(wandb=self._own(), variables=self._variables))

    def _own(self) -> Wandb:
        """The user's values come first, then wandb's variables, then the training's own."""
        wandb, training = self._wandb, self._training
        short = training.name.rpartition(".")[2]
        name = wandb.name or os.environ.get("WANDB_NAME") or short
        if training.index is None:
            id_ = wandb.id or os.environ.get("WANDB_RUN_ID") or run_id(self._execution, short)
        else:
            id_, name = training.id, f"{name}-{training.index}"
        return replace(
            wandb,
            secret=None,  # flytekit's object, which a rank does not need
            id=id_,
            name=name,
            group=wandb.group or training.group,
            config={**run_config(training, self._shape), **without_secrets(wandb.config)},
        )


# ---- In rank 0


class RankRun(RankObserver):
    """Opens a Weights & Biases run in a thread of rank 0, beside the gang's start. wandb's own queue takes the records.

    The user's `wandb.init()` returns this run, since `reinit` is `return_previous`.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._has_lost = False
        self._opening = in_thread(self._open, "daskpytorch-wandb")

    def on_begin(self) -> None:
        """Wait until the run is open, so that the user's function finds the run in `wandb.run`."""
        self._opening.result(OPEN_TIMEOUT)

    def on_log(self, record: LogRecord) -> None:
        try:
            shown = {name: _shown(value) for name, value in record.metrics.items()}
            self._opening.result().log({"step": record.step, **shown})
        except Exception as error:  # also after the user's `wandb.finish()`
            if not self._has_lost:
                self._has_lost = True
                say(
                    f"{LABEL} refused the record of step {record.step} ({type(error).__name__}: {error}). The run has "
                    "no refused records, and nothing after wandb.finish()."
                )

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
        common = _common_settings()
        if common.mode not in KEYLESS and not wandb.login(prompt=False, verify=False):
            say(f"{LABEL}: no API key found. Call `wandb login`, or name a Flyte secret: Wandb(secret=...). {OFFLINE}")
            common.mode = "offline"
        try:
            run = self._init()
        except Exception as error:
            say(f"{LABEL}: {error!r}. {OFFLINE}")
            _tear_down(0)
            os.environ[MODE] = "offline"
            _common_settings()
            run = self._init()
        run.define_metric("*", step_metric="step")
        if not run.disabled:
            where = f"wandb sync {run.settings.sync_dir}" if run.offline else run.url
            print(f"{RUN_IS}{where}", file=Screen(), flush=True)
        return run

    def _init(self) -> Any:
        import wandb

        asked = self._settings.wandb
        return wandb.init(
            **{name: getattr(asked, name) for name in ("project", "entity", "id", "name", "group", "dir")},
            tags=list(asked.tags) or None,
            config=dict(asked.config),
            resume="allow",
        )


def _common_settings() -> Any:
    """Set what also holds for the user's own calls of wandb in this process, and return wandb's settings."""
    import wandb

    limits = {"init_timeout": INIT_TIMEOUT, "finish_timeout": FINISH_TIMEOUT, "finish_timeout_raises": True}
    common = wandb.Settings(silent=True, console="off", reinit="return_previous", **limits)
    return wandb.setup(common).settings


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
