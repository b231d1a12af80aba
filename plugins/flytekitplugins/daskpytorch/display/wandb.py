"""Weights & Biases: one run per gang. The driver decides its settings; rank 0 opens and feeds it.

The driver never imports wandb, so a session of the user stays unchanged. Rank 0 imports this file, too: it imports no
display, whose 47 modules would take 64 ms there.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flytekitplugins.daskpytorch.display.training import LINK_VARIABLE, run_config, run_id
from flytekitplugins.daskpytorch.process.streams import Screen, say, without_secrets
from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.protocol.observer import Observer, RankObserver
from flytekitplugins.daskpytorch.records import Goodput, Histogram, LogRecord
from flytekitplugins.daskpytorch.settings import Wandb

LABEL = "Weights & Biases"
RUN_IS = f"{LABEL} run: "

KEY, MODE, NOTES, INIT_TIMEOUT = "WANDB_API_KEY", "WANDB_MODE", "WANDB_NOTES", "WANDB_INIT_TIMEOUT"
OTHERS = ("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_TAGS")
KEYLESS = ("offline", "dryrun", "disabled")
NO_KEY = "no API key found. Call `wandb login`, or name a Flyte secret: Wandb(secret=...)"
OFFLINE = "The run is recorded offline, for `wandb sync`. A pod's run is lost, unless Wandb(dir=...) is on a volume."
LOST = "The run takes nothing after wandb.finish(). `wandb sync` sends what is in rank 0's folder wandb."
DEFAULTS = {
    INIT_TIMEOUT: "15",
    "WANDB_FINISH_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT_RAISES": "true",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
}
"""Variables of rank 0, also for the user's own calls of wandb there. Timeouts are in seconds."""


def variables_of(wandb: Wandb) -> dict[str, str]:
    """Return the variables that rank 0 gets from this process. ValueError: the Flyte secret does not exist."""
    known = {NOTES: os.environ.get(LINK_VARIABLE, ""), **os.environ}
    found = {name: known[name] for name in (KEY, MODE, NOTES, *OTHERS) if known.get(name)}
    if wandb.mode is not None:
        found[MODE] = wandb.mode
    if wandb.secret is not None and found.get(MODE) not in KEYLESS:
        found[KEY] = current_execution().secret(wandb.secret)
    return found


class WandbObserver(Observer):
    """Makes rank 0 feed a Weights & Biases run, which all attempts of the gang share."""

    def __init__(self, wandb: Wandb, variables: Mapping[str, str], execution: str | None) -> None:
        self._wandb, self._variables, self._execution = wandb, variables, execution
        self._places: dict[str, str] = {}
        """URL of the run, or the command that uploads an offline run. Empty until rank 0 has opened it."""

    def on_event(self, event: journal.Event) -> None:
        match event:
            case journal.Began(training=training):
                self._training = training
            case journal.Placed(shape=shape):
                self._shape = shape
            case journal.Wrote(rank=0, lines=lines):
                self._places.update((LABEL, line.removeprefix(RUN_IS)) for line in lines if line.startswith(RUN_IS))

    def places(self) -> Mapping[str, str]:
        return self._places

    def for_rank(self) -> Callable[[], RankRun]:
        """The user's values come first, then wandb's variables, then the training's own."""
        wandb, training = self._wandb, self._training
        short = training.name.rpartition(".")[2]
        name = wandb.name or os.environ.get("WANDB_NAME") or short
        if training.index is None:
            id_ = wandb.id or os.environ.get("WANDB_RUN_ID") or run_id(self._execution, short)
        else:
            id_, name = training.id, f"{name}-{training.index}"
        config = {**run_config(training, self._shape), **without_secrets(wandb.config)}
        # flytekit's object for the secret stays here: a rank does not need it.
        settings = replace(wandb, secret=None, id=id_, name=name, group=wandb.group or training.group, config=config)
        return functools.partial(RankRun, settings, self._variables)


# ---- In rank 0


class RankRun(RankObserver):
    """Opens a Weights & Biases run in a thread of rank 0, beside the gang's start. wandb's own queue takes the records.

    The user's `wandb.init()` returns this run, as by wandb's default outside of notebooks.
    """

    def __init__(self, wandb: Wandb, variables: Mapping[str, str]) -> None:
        os.environ.update({**DEFAULTS, **os.environ, **variables})
        self._timeout = float(os.environ[INIT_TIMEOUT]) + 15.0  # wandb's import, too
        self._said: set[type[Exception]] = set()
        self._opening = in_thread(functools.partial(_open, wandb), "daskpytorch-wandb")

    def on_begin(self) -> None:
        """Wait until the run is open, so that the user's function finds the run in `wandb.run`."""
        self._opening.result(self._timeout)

    def on_log(self, record: LogRecord) -> None:
        self._send(f"the record of step {record.step}", lambda run: run.log(_row(record)))

    def on_goodput(self, goodput: Goodput) -> None:
        account = {"share": goodput.share, **goodput.as_dict(), **goodput.bill}
        self._send("the goodput", lambda run: run.summary.update({"goodput": account}))

    def on_end(self, exit_code: int, stopped_early: str | None = None) -> None:
        if stopped_early is not None:
            self._send("the reason of its end", lambda run: run.summary.update({"stopped_early": stopped_early}))
        self._send("the end", lambda run: run.finish(exit_code))
        _tear_down(exit_code)  # `finish` may return before the run's file is complete

    def _send(self, what: str, send: Callable[[Any], object]) -> None:
        try:
            send(self._opening.result(self._timeout))
        except Exception as error:  # also a TimeoutError of the end, if the server does not answer
            if type(error) not in self._said:
                self._said.add(type(error))
                say(f"{LABEL} has not taken {what} ({error!r}). {LOST}")


def _open(asked: Wandb) -> Any:
    import wandb

    given = {name: getattr(asked, name) for name in ("project", "entity", "id", "name", "group", "dir", "config")}
    begin = functools.partial(wandb.init, **given, tags=asked.tags or None, resume="allow")
    try:
        if wandb.setup().settings.mode not in KEYLESS and not wandb.login(prompt=False, verify=False):
            raise LookupError(NO_KEY)  # noqa: TRY301 - one way of going offline
        run = begin()
    except Exception as error:
        say(f"{LABEL}: {error}. {OFFLINE}")
        _tear_down(0)
        os.environ[MODE] = "offline"
        run = begin()
    run.define_metric("*", step_metric="step")
    if not run.disabled:
        where = f"wandb sync {run.settings.sync_dir}" if run.offline else run.url
        print(f"{RUN_IS}{where}", file=Screen(), flush=True)
    return run


def _tear_down(exit_code: int) -> None:
    """End wandb's own process. If that fails, wandb raises an error or calls `sys.exit`. Neither may end the rank."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown(exit_code)


def _row(record: LogRecord) -> dict[str, Any]:
    import wandb

    row: dict[str, Any] = {"step": record.step, **record.metrics}
    for name, drawing in record.drawings.items():
        if isinstance(drawing, Histogram):
            row[name] = wandb.Histogram(np_histogram=(list(drawing.counts), list(drawing.edges)))
        else:
            row[name] = wandb.Image(drawing.image(), caption=drawing.caption or None)
    return row
