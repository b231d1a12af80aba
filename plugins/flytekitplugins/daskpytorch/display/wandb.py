"""Weights & Biases: one run per gang, opened and fed in rank 0. The driver decides the run's settings and key.

The driver never imports wandb, so a session of the user stays unchanged. A separate process runs this module, reads
wandb's settings from files, environment variables and logins, and prints the settings as JSON.
"""

import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from flytekitplugins.daskpytorch.display.training import gang_config, run_id
from flytekitplugins.daskpytorch.display.wandb_run import IN_POD, LATER, RUN_IS, RunSettings, Tracker
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.streams import without_secrets
from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape, Training
from flytekitplugins.daskpytorch.settings import Wandb

KEYLESS = ("offline", "disabled")
"""Modes of wandb that need no API key."""
OLD_MODES = {"dryrun": "offline", "run": "online"}
"""Current names of wandb's modes, by their old names."""
TOKEN_FILES = ("identity_token_file", "credentials_file")
NO_LINK = "none"
"""Type of a link without a template. Flyte tells tasks with any type of link the address of their execution's page."""
LINK_TYPE = "wandb-daskpytorch"
"""Type of the link from Flyte's console to a Weights & Biases run, as Flyte's configuration names this type.

The link's template in this configuration ends in {{ .executionName }}-{{ .nodeId }}.
"""
ANSWERED = (
    "mode",
    "base_url",
    "api_key",
    "identity_token_file",
    "credentials_file",
    "entity",
    "run_id",
    "run_name",
    "run_group",
    "run_job_type",
    "run_notes",
    "run_tags",
)
"""Names of the wandb settings (0.19 to 0.31) that the driver reads for a run."""
MARK = "ANSWERS "
"""Start of the output line with wandb's settings as JSON. wandb may write other lines before."""
TIMEOUT = 60.0
"""Timeout, in seconds, for the process that reads wandb's settings. The import of wandb alone takes about a second."""
MAX_ID_PART = 60
"""Maximum number of characters of each part of a model's run id: the sweep's id and the model's key. wandb allows 128
characters."""


class WandbObserver(Observer):
    """Observer in the driver that makes rank 0 feed a Weights & Biases run, which all attempts of the gang share."""

    def __init__(self, run: Callable[[], RunSettings]) -> None:
        self._run = run
        self._inputs: Mapping[str, Any] = {}
        self._shape: Shape | None = None
        """Shape of the gang in its first attempt. None before."""
        self.where: str | None = None
        """URL of the run, or the command that uploads an offline run. None until rank 0 has opened the run."""

    def begins(self, training: Training) -> None:
        """Keep the training's inputs for the run's configuration."""
        self._inputs = training.inputs

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Read the run's URL from rank 0's output."""
        for line in lines:
            if rank == 0 and line.startswith(RUN_IS):
                self.where = line.removeprefix(RUN_IS)

    def places(self) -> Mapping[str, str]:
        """Return the run's URL, or the command that uploads an offline run. Empty until rank 0 has opened the run."""
        return {"Weights & Biases": self.where} if self.where is not None else {}

    def placed(self, shape: Shape) -> None:
        """Keep the gang's shape in its first attempt for the run's configuration."""
        self._shape = self._shape or shape

    def for_rank(self) -> Callable[[], Tracker]:
        """Return the function with which rank 0 opens the Weights & Biases run.

        The run's configuration has the inputs, the gang's shape and the user's values.
        """
        run = self._run()
        if self._shape is not None:
            config = {**self._inputs, "gang": gang_config(self._shape), **run.config}
            run = dataclasses.replace(run, config=config)
        return functools.partial(Tracker, run)


def begin(wandb: Wandb, *, task: str, execution: str | None) -> Callable[[], RunSettings]:
    """Start a process that reads wandb's own settings, and return a function that waits for the run's settings.

    Args:
        wandb: The user's settings, which go before wandb's own.
        task: Name of the task or function, for the run's name and id.
        execution: Name of the Flyte execution, for the run's id. None: a random id.

    Raises:
        ValueError: The Flyte secret with the API key does not exist.
    """
    needs_key = wandb.secret is not None and wandb.mode not in KEYLESS
    key = current_execution().secret(wandb.secret) if needs_key else None
    # An executor's thread would delay the exit of a driver that fails early.
    asking = in_thread(functools.partial(_ask, wandb.mode), "daskpytorch-wandb")
    notes = os.environ.get("FLYTE_EXECUTION_URL")
    return functools.cache(functools.partial(_settled, wandb, asking, key, task, execution, notes))


def _settled(
    wandb: Wandb,
    asking: Future[dict[str, Any]],
    secret: str | None,
    task: str,
    execution: str | None,
    notes: str | None,
) -> RunSettings:
    """Return the settings of the run: the user's values first, then wandb's settings, then the task's defaults."""
    in_pod = execution is not None and execution != "local"
    try:
        found = dict(asking.result())
        remedy = "name its Flyte secret, Wandb(secret=...)" if in_pod else "set WANDB_API_KEY or call `wandb login`"
        missing = f"no API key found; {remedy}"
    except OSError as error:
        found, missing = {}, str(error)
    key, mode = secret or found.pop("api_key", None), wandb.mode or found.pop("mode", "online")
    mode = OLD_MODES.get(mode, mode)
    if wandb.mode is None and mode not in KEYLESS and not (key or "identity_token_file" in found):
        mode = "offline"
        say(f"Weights & Biases: {missing}. {IN_POD if in_pod else LATER}.")
    short = task.rpartition(".")[2]
    id_, name = found.pop("run_id", None), found.pop("run_name", None)
    hidden = {"api_key", "mode", *(() if "identity_token_file" in found and secret is None else TOKEN_FILES)}
    return RunSettings(
        wandb=dataclasses.replace(wandb, secret=None),  # flytekit's object, which a rank does not need
        id=wandb.id or id_ or run_id(execution, short),
        name=wandb.name or name or short,
        mode=mode,
        key=None if mode in KEYLESS else key,
        in_pod=in_pod,
        config=without_secrets(wandb.config),
        notes=None if "run_notes" in found else notes,
        given={name: value for name, value in found.items() if name not in hidden},
    )


def sweep_settings(wandb: Wandb, *, function: str, execution: str | None) -> Callable[[], RunSettings]:
    """Start a process that reads wandb's own settings. Return a function that waits for the settings of a sweep's runs.

    All models' runs share these settings and a group.

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
    """Return the settings of one model's run. The run's id contains the model's key, the same in all attempts."""
    shared = runs()
    id_ = f"{shared.id[:MAX_ID_PART]}-{key[-MAX_ID_PART:]}"
    return dataclasses.replace(shared, id=id_, name=f"{shared.name}-{index}")


def console_link(wandb: Wandb) -> dict[str, str]:
    """Return the entries of the task's `config` for the link from Flyte's console to the run.

    There is no link if Flyte's template cannot name the run: without an entity, or with the user's own id. Offline and
    disabled runs have no page.
    """
    if wandb.entity is None or wandb.id is not None or wandb.mode in KEYLESS:
        return {"link_type": NO_LINK}
    return {"project": wandb.project, "entity": wandb.entity, "host": wandb.host, "link_type": LINK_TYPE}


# ---- wandb's settings


def _ask(mode: str | None) -> dict[str, Any]:
    """Return wandb's own settings, without unset ones, as a separate process reads them.

    Args:
        mode: Mode of the user's `Wandb(...)`. None: wandb's own settings decide.

    Raises:
        OSError: The process that reads the settings has failed or timed out.
    """
    command = [sys.executable, "-m", __name__, mode or ""]
    try:
        asked = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=True
        )
        answers: dict[str, Any] = json.loads(asked.stdout.rpartition(MARK)[2])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = error.stderr.strip().rpartition("\n")[2] if isinstance(error, subprocess.CalledProcessError) else ""
        raise OSError(
            f"wandb's settings could not be read ({said or error}): check the WANDB_* variables and wandb's "
            "settings files"
        ) from error
    return answers


def _answers(mode: str | None) -> dict[str, Any]:
    import wandb

    changes: dict[str, Any] = {"silent": True} | ({"mode": mode} if mode is not None else {})
    settings = wandb.setup(wandb.Settings(**changes)).settings
    if settings.mode not in ("offline", "dryrun", "disabled"):
        if "prompt" in inspect.signature(wandb.login).parameters:
            wandb.login(prompt=False, verify=False)  # stores credentials in the settings
        elif (key := wandb.api.api_key) is not None:  # wandb < 0.31, where login always prompts
            settings.api_key = key
    found = {name: getattr(settings, name, None) for name in ANSWERED}
    return {name: value for name, value in found.items() if value not in (None, "", ())}


if __name__ == "__main__":
    print(MARK + json.dumps(_answers(sys.argv[1] or None)))
