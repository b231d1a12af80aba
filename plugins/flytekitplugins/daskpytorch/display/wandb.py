"""Weights & Biases: one run per gang, fed in rank 0 by `wandb_run`. The driver decides its settings.

The driver never imports wandb, so a session of the user stays unchanged.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping

from flytekitplugins.daskpytorch.display.run_state import RunState, View
from flytekitplugins.daskpytorch.display.training import LINK_VARIABLE, run_config, run_id
from flytekitplugins.daskpytorch.display.wandb_run import KEYLESS, LABEL, MODE, RUN_IS, RankRun, RunSettings
from flytekitplugins.daskpytorch.process.streams import without_secrets
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.settings import Wandb

KEY, NOTES = "WANDB_API_KEY", "WANDB_NOTES"
OTHERS = ("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_TAGS")
NO_LINK = "none"
"""A link without a template. Flyte tells tasks with any type of link the address of their execution's page."""
LINK_TYPE = "wandb-daskpytorch"
"""Type of the console's link to a run in Flyte's configuration, where the template ends in {{ .executionName }}-{{
.nodeId }}."""


class WandbObserver(View):
    """Makes rank 0 feed a Weights & Biases run, which all attempts of the gang share."""

    def __init__(self, wandb: Wandb, variables: Mapping[str, str], execution: str | None) -> None:
        self.state = RunState()
        self._wandb, self._variables, self._execution = wandb, variables, execution
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
        return functools.partial(RankRun, self._settings())

    def _settings(self) -> RunSettings:
        """The user's values come first, then wandb's variables, then the training's own."""
        wandb, training, shape = self._wandb, self.state.training, self.state.shape
        assert training is not None and shape is not None  # noqa: PT018, S101 - ranks start after `Placed`
        short = training.name.rpartition(".")[2]
        name = wandb.name or os.environ.get("WANDB_NAME") or short
        if training.index is None:
            id_ = wandb.id or os.environ.get("WANDB_RUN_ID") or run_id(self._execution, short)
        else:
            id_, name = training.id, f"{name}-{training.index}"
        own = dataclasses.replace(
            wandb,
            secret=None,  # flytekit's object, which a rank does not need
            id=id_,
            name=name,
            group=wandb.group or training.group,
            config={**run_config(training, shape), **without_secrets(wandb.config)},
        )
        return RunSettings(wandb=own, variables=self._variables)


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


def console_link(wandb: Wandb) -> dict[str, str]:
    """Return the entries of the task's `config` for the link from Flyte's console to the run.

    Empty if Flyte's template cannot name the run: without an entity, or with the user's own id. Offline and disabled
    runs have no page.
    """
    if wandb.entity is None or wandb.id is not None or wandb.mode in KEYLESS:
        return {"link_type": NO_LINK}
    return {"project": wandb.project, "entity": wandb.entity, "host": wandb.host, "link_type": LINK_TYPE}
