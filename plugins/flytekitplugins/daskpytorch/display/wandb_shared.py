"""Rank 0's run as the user's own wandb calls meet it: `wandb.init` joins it, `wandb.finish` loses nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self


class SharedRun:
    """A run that the task has opened, and that code of the user's may use."""

    def __init__(self, wandb: Any, run: Any, drain: Callable[[], object]) -> None:
        """Share a run.

        Args:
            wandb: The module, whose `init` joins the run from now on.
            run: The run.
            drain: Waits until all that was logged by now is in the run.
        """
        self.is_finished = False
        """The user's code has finished the run."""
        self._wandb = wandb
        self._run = run
        self._drain = drain
        self._init = wandb.init
        wandb.init = functools.wraps(wandb.init)(functools.partial(self._join))
        # `finish()` and the end of `with wandb.init()` both call this (wandb 0.19 to 0.31).
        self._finish = run._finish  # noqa: SLF001
        run._finish = self._finish_for_user  # noqa: SLF001

    def __enter__(self) -> Self:
        """Share the run until the end of the `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave wandb as it was: the process may go on, as in debug mode."""
        self._wandb.init = self._init

    def finish(self, exit_code: int) -> None:
        """Finish the run, for the task."""
        if not self.is_finished:
            self._finish(exit_code)

    def _finish_for_user(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_finished:
            self._drain()
            self.is_finished = True
        self._finish(*args, **kwargs)

    def _join(self, *args: Any, **kwargs: Any) -> Any:
        """Return the run, with the configuration, name, notes and tags of this `wandb.init` added.

        Raises:
            ValueError: Another project, entity or id is asked for.
        """
        given = inspect.signature(self._init).bind_partial(*args, **kwargs).arguments
        settings = given.get("settings") or {}
        asked = {**(settings if isinstance(settings, Mapping) else vars(settings)), **given}
        if self.is_finished or asked.get("reinit") in (True, "finish_previous", "create_new"):
            return self._init(*args, **kwargs)
        self._refuse_other(asked)
        if given.get("config"):
            self._run.config.update(given["config"], allow_val_change=True)
        for name in ("name", "notes"):
            if given.get(name):
                setattr(self._run, name, given[name])
        if given.get("tags"):
            self._run.tags = tuple(dict.fromkeys((*(self._run.tags or ()), *given["tags"])))
        return self._run

    def _refuse_other(self, asked: Mapping[str, Any]) -> None:
        for name, mine in {"project": self._run.project, "entity": self._run.entity, "id": self._run.id}.items():
            wanted = asked.get(name) or (asked.get("run_id") if name == "id" else None)
            if mine and wanted and wanted != mine:
                raise ValueError(
                    f"wandb.init({name}={wanted!r}): the task has opened a run with {name}={mine!r}, which wandb.init "
                    f"joins. Leave {name} out of wandb.init, or give Wandb({name}={wanted!r}) in the task's config. "
                    "wandb.init(reinit='create_new') opens another run beside the task's."
                )
