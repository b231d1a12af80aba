"""Weights & Biases: one run per gang, fed from rank 0 by a thread, so that a slow server never slows the training."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.process.screen import Screen
from flytekitplugins.daskpytorch.protocol.observer import Shape
from flytekitplugins.daskpytorch.protocol.redaction import without_secrets
from flytekitplugins.daskpytorch.settings import WANDB_MODES, Wandb

if TYPE_CHECKING:
    import torch

__all__ = [
    "RunSettings",
    "Tracker",
    "api_key",
    "console_link",
    "model_settings",
    "run_config",
    "run_id",
    "settings",
    "sweep_settings",
]

logger = logging.getLogger("flytekitplugins.daskpytorch")

LINK_TYPE = "wandb-daskpytorch"
"""Names the console link in Flyte's configuration; its template ends in {{ .executionName }}-{{ .nodeId }}."""
INIT_TIMEOUT = float(os.environ.get("WANDB_INIT_TIMEOUT", "15"))
"""Seconds for the server to answer when the run is opened; after that the run is recorded offline."""
MAX_CONFIG_ITEMS = 20
"""Longer lists among a task's inputs go to the run's configuration as their lengths."""
MAX_ID_PART = 60
"""Characters of each of the two parts of a model's run id, which may have 128."""
STOPPED_EARLY = "stopped_early"
"""In the summary of such a run: why."""
NUM_BINS = 64
"""Of a histogram, as wandb has them."""
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


def api_key(wandb: Wandb) -> str | None:
    """The API key: from the Flyte secret where one is named, else from `WANDB_API_KEY` or the user's netrc."""
    if wandb.secret is not None:
        import flytekit

        secret = wandb.secret
        return str(flytekit.current_context().secrets.get(secret.group, secret.key, secret.group_version))
    if key := os.environ.get("WANDB_API_KEY"):
        return key
    import netrc

    with contextlib.suppress(OSError, netrc.NetrcParseError):
        host = re.sub(r"^https?://", "", os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
        login = netrc.netrc().authenticators(host)
        return login[2] if login else None
    return None


def run_id(execution: str | None, task: str) -> str:
    """An id that all attempts of one node share.

    The job-runner's pod is named after execution, node and attempt (`f3a-n0-1-runner`): the attempt goes. Elsewhere
    the execution and the task make the id; without an execution each run is new.
    """
    attempt = os.environ.get("FLYTE_ATTEMPT_NUMBER")
    if attempt is not None:
        pod = re.fullmatch(rf"(.+)-{re.escape(attempt)}(-runner)?", os.environ.get("HOSTNAME", ""))
        if pod and execution and pod[1].startswith(execution):
            return pod[1]
    if not execution or execution == "local":
        return os.urandom(4).hex()
    return re.sub(r"[^\w-]", "-", f"{execution}-{task}")[:120]


def settings(wandb: Wandb, *, task: str, execution: str | None, config: Mapping[str, Any]) -> RunSettings:
    """Decide id, mode and key, in the driver; prints one line where there is no key."""
    key = None if wandb.mode in ("offline", "disabled") else api_key(wandb)
    from_environment = os.environ.get("WANDB_MODE")
    mode = wandb.mode or (from_environment if from_environment in WANDB_MODES else "online" if key else "offline")
    if mode == "offline" and not (wandb.mode or from_environment):
        print(
            "Weights & Biases: no API key found, so the run stays offline; set WANDB_API_KEY, or send it later "
            "with `wandb sync`.",
            file=Screen(),
        )
    short = task.rpartition(".")[2]
    return RunSettings(
        wandb=wandb,
        id=wandb.id or run_id(execution, short),
        name=wandb.name or short,
        mode=mode,  # type: ignore[arg-type] # one of WANDB_MODES
        key=key,
        config={**config, **without_secrets(wandb.config)},
        notes=os.environ.get("FLYTE_EXECUTION_URL"),
    )


def sweep_settings(wandb: Wandb, *, function: str, execution: str | None) -> RunSettings:
    """What the runs of many models share, as `settings` decides it once for all, and the group that they are in.

    Raises:
        ValueError: `wandb` has an id, which only one run can have.
    """
    if wandb.id is not None:
        raise ValueError(
            f"Wandb(id={wandb.id!r}): must be left out for many models, since each has a run of its own; "
            "Wandb(group=...) names what holds them together"
        )
    is_named = execution and execution != "local"
    name = wandb.name or function.rpartition(".")[2]
    group = wandb.group or f"{name}-{execution if is_named else os.urandom(4).hex()}"
    return settings(dataclasses.replace(wandb, group=group), task=function, execution=execution, config={})


def model_settings(shared: RunSettings, *, index: int, key: str, experiment: Any, shape: Shape) -> RunSettings:
    """One model's own run.

    Args:
        shared: From `sweep_settings`.
        index: The model's place among the experiments.
        key: Names it among all of its task, alike in every attempt.
        experiment: Becomes the configuration: a dictionary's items, a dataclass's fields, or `experiment`.
        shape: Its gang's.
    """
    if isinstance(experiment, Mapping):
        inputs = {str(name): value for name, value in experiment.items()}
    elif dataclasses.is_dataclass(experiment) or isinstance(experiment, (str, int, float)):
        inputs = {"experiment": experiment}
    else:
        inputs = {"experiment": repr(experiment)}
    return dataclasses.replace(
        shared,
        id=f"{shared.id[:MAX_ID_PART]}-{key[-MAX_ID_PART:]}",
        name=f"{shared.name}-{index}",
        config={**run_config(inputs, shape), **without_secrets(shared.wandb.config)},
    )


def run_config(inputs: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The run's configuration: a task's inputs, and the gang's shape."""
    gang = {
        "world_size": shape.world_size,
        "num_workers": len(shape.nodes),
        "backend": shape.backend,
        "hosts": [node.host for node in shape.nodes],
        "gpus": [gpu for node in shape.nodes for gpu in node.gpu_names],
    }
    return {**_plain(inputs), "gang": gang}


def _plain(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A task's inputs as Weights & Biases can show them: numbers, strings, dataclasses as dictionaries; no secrets."""
    plain: dict[str, Any] = {}
    for name, value in without_secrets(dict(inputs)).items():
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, os.PathLike)):  # a FlyteFile is both
            plain |= _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        elif isinstance(value, (str, int, float, bool, type(None))):
            plain[name] = value
        elif isinstance(value, (list, tuple, dict, set)) and len(value) > MAX_CONFIG_ITEMS:
            plain[f"num_{name}"] = len(value)
        else:
            plain[name] = str(value)
    return plain


def console_link(wandb: Wandb) -> dict[str, str]:
    """The entries of the task's `config` from which Flyte's console makes the link to the run."""
    link = {"project": wandb.project, "host": wandb.host, "link_type": LINK_TYPE}
    if wandb.entity:
        link["entity"] = wandb.entity
    if wandb.id:
        link["id"] = wandb.id
    return link


def _wait_until_written(exit_code: int) -> None:
    """End the process that writes for Weights & Biases: a run's `finish` may return before its file is whole."""
    import wandb

    wandb.teardown(exit_code)


@dataclass(frozen=True, kw_only=True)
class _Histogram:
    """How a tensor's values are spread; not yet a `wandb.Histogram`, whose import the training need not wait for."""

    counts: list[float]
    edges: list[float]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Histogram:
        """Count the finite values of a tensor."""
        values = tensor.detach().to_dense().float().flatten().cpu()
        counts, edges = values[values.isfinite()].histogram(NUM_BINS)
        return cls(counts=counts.tolist(), edges=edges.tolist())


def _shown(value: Any) -> Any:
    if not isinstance(value, _Histogram):
        return value
    import wandb

    return wandb.Histogram(np_histogram=(value.counts, value.edges))


@dataclass(frozen=True, kw_only=True)
class _End:
    """Closes the queue, and the run."""

    exit_code: int
    reason: str | None
    """Why a training that did not fail ends early."""


class Tracker:
    """Rank 0's run. Calls return at once; a thread opens the run and feeds it; no failure reaches the training."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._waiting: queue.Queue[LogRecord | _End] = queue.Queue()
        self._histograms: dict[str, _Histogram] = {}
        """Of gradients, since the last record."""
        self._num_dropped = 0
        self._has_refused = False
        self._finishing = threading.Lock()
        self._thread = threading.Thread(target=self._feed, name="daskpytorch-wandb", daemon=True)
        self._thread.start()

    def log(self, record: LogRecord) -> None:
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
                    f"gradients/{names[p]}": _Histogram.of(p.grad) for p in parameters if p.grad is not None
                }

        register_optimizer_step_pre_hook(look)

    def finish(self, exit_code: int, stopped_early: str | None = None, timeout: float = 60.0) -> None:
        """Close the run with this exit code, waiting at most `timeout` seconds for what is queued.

        Where the training was stopped early, say why, for the run's summary.
        """
        if self._finishing.acquire(blocking=False):  # the first to call decides; a stop order may come meanwhile
            self._waiting.put(_End(exit_code=exit_code, reason=stopped_early))
        self._thread.join(timeout)

    def _feed(self) -> None:
        item: LogRecord | _End | None = None
        try:
            run = self._open()
            while not isinstance(item := self._waiting.get(), _End):
                self._record(run, item)
            if item.reason is not None:
                run.summary[STOPPED_EARLY] = item.reason
            run.finish(exit_code=item.exit_code)
            _wait_until_written(item.exit_code)
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
