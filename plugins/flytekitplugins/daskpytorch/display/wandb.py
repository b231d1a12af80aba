"""Weights & Biases: one run per gang, opened and fed in rank 0. Which run, with which key, is decided in the driver."""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from flytekitplugins.daskpytorch.display.training import run_config, run_id
from flytekitplugins.daskpytorch.display.wandb_run import RUN_IS, RunSettings, Tracker
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.streams import without_secrets
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape
from flytekitplugins.daskpytorch.settings import WANDB_MODES, Wandb

__all__ = ["WandbObserver", "console_link", "model_settings", "settings", "sweep_settings"]

LINK_TYPE = "wandb-daskpytorch"
"""Names the console link in Flyte's configuration; its template ends in {{ .executionName }}-{{ .nodeId }}."""
MAX_ID_PART = 60
"""Characters of each of the two parts of a model's run id, which may have 128."""


class WandbObserver(Observer):
    """Has rank 0 feed a run: the same one in all attempts of the gang."""

    def __init__(self, run: RunSettings, inputs: Mapping[str, Any]) -> None:
        self._run = run
        self._inputs = inputs
        self.where: str | None = None
        """The run's page, or the command that sends it; None until rank 0 has opened it."""

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Note where the run is, when rank 0 says so."""
        for line in lines:
            if rank == 0 and line.startswith(RUN_IS):
                self.where = line.removeprefix(RUN_IS)

    def places(self) -> Mapping[str, str]:
        """The run."""
        return {"Weights & Biases": self.where} if self.where is not None else {}

    def placed(self, shape: Shape) -> None:
        """Add the inputs and the gang's shape to the run's configuration; the user's own and the first shape stay."""
        self._run = dataclasses.replace(self._run, config={**run_config(self._inputs, shape), **self._run.config})

    def for_rank(self) -> Callable[[], Tracker]:
        """What opens the run."""
        return functools.partial(Tracker, self._run)


def api_key(wandb: Wandb) -> str | None:
    """The API key: from the Flyte secret where one is named, else from `WANDB_API_KEY` or the user's netrc."""
    if wandb.secret is not None:
        return current_execution().secret(wandb.secret)
    if key := os.environ.get("WANDB_API_KEY"):
        return key
    import netrc

    with contextlib.suppress(OSError, netrc.NetrcParseError):
        host = re.sub(r"^https?://", "", os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
        login = netrc.netrc().authenticators(host)
        return login[2] if login else None
    return None


def settings(wandb: Wandb, *, task: str, execution: str | None) -> RunSettings:
    """Decide id, mode and key; prints one line where there is no key."""
    key = None if wandb.mode in ("offline", "disabled") else api_key(wandb)
    from_environment = os.environ.get("WANDB_MODE")
    mode = wandb.mode or (from_environment if from_environment in WANDB_MODES else "online" if key else "offline")
    if mode == "offline" and not (wandb.mode or from_environment):
        say(
            "Weights & Biases: no API key found, so the run stays offline; set WANDB_API_KEY, or send it later "
            "with `wandb sync`.",
        )
    short = task.rpartition(".")[2]
    return RunSettings(
        wandb=dataclasses.replace(wandb, secret=None),  # an object of flytekit's, which a rank may do without
        id=wandb.id or run_id(execution, short),
        name=wandb.name or short,
        mode=mode,  # type: ignore[arg-type] # one of WANDB_MODES
        key=key,
        config=without_secrets(wandb.config),
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
    return settings(dataclasses.replace(wandb, group=group), task=function, execution=execution)


def model_settings(shared: RunSettings, *, index: int, key: str) -> RunSettings:
    """One model's own run; the key names it among all of its task, alike in every attempt."""
    id_ = f"{shared.id[:MAX_ID_PART]}-{key[-MAX_ID_PART:]}"
    return dataclasses.replace(shared, id=id_, name=f"{shared.name}-{index}")


def console_link(wandb: Wandb) -> dict[str, str]:
    """The entries of the task's `config` from which Flyte's console makes the link to the run."""
    link = {"project": wandb.project, "host": wandb.host, "link_type": LINK_TYPE}
    if wandb.entity:
        link["entity"] = wandb.entity
    if wandb.id:
        link["id"] = wandb.id
    return link
