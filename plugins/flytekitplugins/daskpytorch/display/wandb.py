"""Weights & Biases: one run per gang, fed in rank 0 by `wandb_run`. The driver decides its settings and key.

The driver never imports wandb, so a session of the user stays unchanged.
"""

import configparser
import contextlib
import dataclasses
import functools
import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from flytekitplugins.daskpytorch.display.run_state import RunState, View
from flytekitplugins.daskpytorch.display.training import LINK_VARIABLE, run_config, run_id
from flytekitplugins.daskpytorch.display.wandb_run import LABEL, OFFLINE, RUN_IS, RankRun, RunSettings
from flytekitplugins.daskpytorch.process.streams import say, without_secrets
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.settings import Wandb

KEYLESS = ("offline", "dryrun", "disabled")
KEY, MODE, SERVER, TOKEN = "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"
NOTES, OTHERS = "WANDB_NOTES", ("WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_TAGS")
VARIABLES = (KEY, MODE, SERVER, TOKEN, NOTES, *OTHERS)
SERVERS = ("https://api.wandb.ai", "https://api.forge.coreweave.com")
"""Their stored key is used if no server is named. The second one is the default of wandb 0.31."""
NO_LINK = "none"
"""A link without a template. Flyte tells tasks with any type of link the address of their execution's page."""
LINK_TYPE = "wandb-daskpytorch"
"""Type of the console's link to a run in Flyte's configuration, where the template ends in {{ .executionName }}-{{
.nodeId }}."""
MAX_ID_PART = 60
"""Characters of the sweep's id, and of the model's key, in a run's id. wandb allows 128 in all."""


class WandbObserver(View):
    """Makes rank 0 feed a Weights & Biases run, which all attempts of the gang share."""

    def __init__(self, run: RunSettings) -> None:
        self.state = RunState()
        self._run = run
        self.where: str | None = None
        """URL of the run, or the command that uploads an offline run. None until rank 0 has opened it."""

    def on_event(self, event: journal.Event) -> None:
        if isinstance(event, journal.Wrote) and event.rank == 0:
            for line in event.lines:
                if line.startswith(RUN_IS):
                    self.where = line.removeprefix(RUN_IS)

    def places(self) -> Mapping[str, str]:
        return {LABEL: self.where} if self.where is not None else {}

    def for_rank(self) -> Callable[[], RankRun]:
        training, shape = self.state.training, self.state.shape
        given = {} if training is None or shape is None else run_config(training, shape)
        wandb = dataclasses.replace(self._run.wandb, config={**given, **self._run.wandb.config})
        return functools.partial(RankRun, dataclasses.replace(self._run, wandb=wandb))


def begin(wandb: Wandb, *, task: str, execution: str | None) -> RunSettings:
    """The user's values come first, then wandb's variables, then the task's defaults.

    ValueError: the Flyte secret with the API key does not exist.
    """
    variables = _variables(wandb)
    if not variables.keys() & {KEY, MODE, TOKEN}:
        variables[MODE] = "offline"
        say(f"{LABEL}: no API key found. Call `wandb login`, or name a Flyte secret: Wandb(secret=...). {OFFLINE}")
    short = task.rpartition(".")[2]
    own = dataclasses.replace(
        wandb,
        secret=None,  # flytekit's object, which a rank does not need
        id=wandb.id or os.environ.get("WANDB_RUN_ID") or run_id(execution, short),
        name=wandb.name or os.environ.get("WANDB_NAME") or short,
        config=without_secrets(wandb.config),
    )
    return RunSettings(wandb=own, variables=variables)


def _variables(wandb: Wandb) -> dict[str, str]:
    known = {NOTES: os.environ.get(LINK_VARIABLE, "")} | _settings_files() | os.environ
    found = {name: known[name] for name in VARIABLES if known.get(name)}
    if wandb.mode is not None:
        found[MODE] = wandb.mode
    if found.get(MODE) in KEYLESS:
        found.pop(KEY, None)
    elif wandb.secret is not None:
        found[KEY] = current_execution().secret(wandb.secret)
    elif not found.keys() & {KEY, TOKEN}:
        found |= _login(found.get(SERVER))
    return found


def _settings_files() -> dict[str, str]:
    files = configparser.ConfigParser(interpolation=None)
    files.read_dict({"default": {}})
    folder = os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):  # wandb ignores such files, too
        files.read([Path(folder, "settings").expanduser(), Path("wandb", "settings")])
    return {f"WANDB_{name.upper()}": value for name, value in files["default"].items()}


def _login(server: str | None) -> dict[str, str]:
    """Return the server and its key that `wandb login` has stored, as variables. None: wandb's own server."""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        stored = netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser())
        for url in SERVERS if server is None else (server,):
            if (found := stored.authenticators(urlsplit(url).netloc)) and found[2]:
                return {SERVER: url, KEY: found[2]}
    return {}


def sweep_settings(wandb: Wandb, *, function: str, execution: str | None) -> RunSettings:
    if wandb.id is not None:
        raise ValueError(
            f"Wandb(id={wandb.id!r}): must be left out for many models, since each has a run of its own; "
            "Wandb(group=...) names the group of these runs"
        )
    is_named = execution and execution != "local"
    name = wandb.name or function.rpartition(".")[2]
    group = wandb.group or f"{name}-{execution if is_named else os.urandom(4).hex()}"
    return begin(dataclasses.replace(wandb, group=group), task=function, execution=execution)


def model_settings(shared: RunSettings, *, index: int, key: str) -> RunSettings:
    wandb = shared.wandb
    id_ = f"{str(wandb.id)[:MAX_ID_PART]}-{key[-MAX_ID_PART:]}"
    return dataclasses.replace(shared, wandb=dataclasses.replace(wandb, id=id_, name=f"{wandb.name}-{index}"))


def console_link(wandb: Wandb) -> dict[str, str]:
    """Return the entries of the task's `config` for the link from Flyte's console to the run.

    Empty if Flyte's template cannot name the run: without an entity, or with the user's own id. Offline and disabled
    runs have no page.
    """
    if wandb.entity is None or wandb.id is not None or wandb.mode in KEYLESS:
        return {"link_type": NO_LINK}
    return {"project": wandb.project, "entity": wandb.entity, "host": wandb.host, "link_type": LINK_TYPE}
