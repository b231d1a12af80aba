"""Weights & Biases: one run per gang, opened and fed in rank 0. The driver decides the run's settings and key."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from flytekitplugins.daskpytorch.display.training import run_config, run_id
from flytekitplugins.daskpytorch.display.wandb_answers import Asking
from flytekitplugins.daskpytorch.display.wandb_run import RUN_IS, RunSettings, Tracker
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.streams import without_secrets
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape
from flytekitplugins.daskpytorch.settings import Wandb

KEYLESS = ("offline", "disabled")
"""Modes without an API key."""
OLD_MODES = {"dryrun": "offline", "run": "online"}
"""Current names of wandb's modes, by their old names."""
TOKEN_FILES = ("identity_token_file", "credentials_file")
LINK_TYPE = "wandb-daskpytorch"
"""Name of the console link in Flyte's configuration. Its template ends in {{ .executionName }}-{{ .nodeId }}."""
MAX_ID_PART = 60
"""Maximum number of characters of each of the two parts of a model's run id. wandb allows 128 characters for an id."""


class WandbObserver(Observer):
    """Observer that makes rank 0 feed a run. All attempts of the gang share the run."""

    def __init__(self, run: Callable[[], RunSettings], inputs: Mapping[str, Any]) -> None:
        self._run = run
        self._inputs = inputs
        self._shape: Shape | None = None
        """Shape of the gang in its first attempt. None before."""
        self.where: str | None = None
        """URL of the run, or the command that uploads an offline run. None until rank 0 has opened the run."""

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Read the run's URL from rank 0's output."""
        for line in lines:
            if rank == 0 and line.startswith(RUN_IS):
                self.where = line.removeprefix(RUN_IS)

    def places(self) -> Mapping[str, str]:
        """Return the run's URL or upload command, once known."""
        return {"Weights & Biases": self.where} if self.where is not None else {}

    def placed(self, shape: Shape) -> None:
        """Keep the shape of the first attempt for the run's configuration."""
        self._shape = self._shape or shape

    def for_rank(self) -> Callable[[], Tracker]:
        """Return the function that opens the run in rank 0.

        The run's configuration has the inputs, the gang's shape and the user's values.
        """
        run = self._run()
        if self._shape is not None:
            run = dataclasses.replace(run, config={**run_config(self._inputs, self._shape), **run.config})
        return functools.partial(Tracker, run)


def begin(wandb: Wandb, *, task: str, execution: str | None) -> Callable[[], RunSettings]:
    """Begin to read wandb's settings, and return the function that waits for them.

    The function decides the run's id, name, mode and key.

    Raises:
        ValueError: The Flyte secret does not exist.
    """
    needs_key = wandb.secret is not None and wandb.mode not in KEYLESS
    key = current_execution().secret(wandb.secret) if needs_key else None
    asking, notes = Asking(wandb.mode), os.environ.get("FLYTE_EXECUTION_URL")
    return functools.cache(functools.partial(_settled, wandb, asking, key, task, execution, notes))


def _settled(
    wandb: Wandb, asking: Asking, secret: str | None, task: str, execution: str | None, notes: str | None
) -> RunSettings:
    """Return the settings of the run: the user's values first, then wandb's settings, then the task's defaults."""
    try:
        found = dict(asking.answers())
        missing = "no API key found; set WANDB_API_KEY or call `wandb login`"
    except OSError as error:
        found, missing = {}, str(error)
    key, mode = secret or found.pop("api_key", None), wandb.mode or found.pop("mode", "online")
    mode = OLD_MODES.get(mode, mode)
    if wandb.mode is None and mode not in KEYLESS and not (key or "identity_token_file" in found):
        mode = "offline"
        say(f"Weights & Biases: {missing}. The run stays offline; `wandb sync` sends it later.")
    short = task.rpartition(".")[2]
    id_, name = found.pop("run_id", None), found.pop("run_name", None)
    hidden = {"api_key", "mode", *(() if "identity_token_file" in found and secret is None else TOKEN_FILES)}
    return RunSettings(
        wandb=dataclasses.replace(wandb, secret=None),  # flytekit's object, which a rank does not need
        id=wandb.id or id_ or run_id(execution, short),
        name=wandb.name or name or short,
        mode=mode,
        key=None if mode in KEYLESS else key,
        config=without_secrets(wandb.config),
        notes=None if "run_notes" in found else notes,
        given={name: value for name, value in found.items() if name not in hidden},
    )


def sweep_settings(wandb: Wandb, *, function: str, execution: str | None) -> Callable[[], RunSettings]:
    """Begin to read wandb's settings for many models, whose runs share the settings and a group.

    Raises:
        ValueError: `wandb` has an id, but only one run can have an id.
    """
    if wandb.id is not None:
        raise ValueError(
            f"Wandb(id={wandb.id!r}): must be left out for many models, since each has a run of its own; "
            "Wandb(group=...) names the group of these runs"
        )
    is_named = execution and execution != "local"
    name = wandb.name or function.rpartition(".")[2]
    group = wandb.group or f"{name}-{execution if is_named else os.urandom(4).hex()}"
    return begin(dataclasses.replace(wandb, group=group), task=function, execution=execution)


def model_settings(runs: Callable[[], RunSettings], *, index: int, key: str) -> RunSettings:
    """Return the settings of one model's run. The model's key identifies the run in all attempts of the task."""
    shared = runs()
    id_ = f"{shared.id[:MAX_ID_PART]}-{key[-MAX_ID_PART:]}"
    return dataclasses.replace(shared, id=id_, name=f"{shared.name}-{index}")


def console_link(wandb: Wandb) -> dict[str, str]:
    """Return the entries of the task's `config` for the link from Flyte's console to the run."""
    link = {"project": wandb.project, "host": wandb.host, "link_type": LINK_TYPE}
    if wandb.entity:
        link["entity"] = wandb.entity
    if wandb.id:
        link["id"] = wandb.id
    return link
