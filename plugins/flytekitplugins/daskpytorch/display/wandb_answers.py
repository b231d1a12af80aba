"""Reader of wandb's settings from files, environment variables and logins. Runs for the driver.

wandb reads the settings in a separate process, which runs this module and prints the settings as JSON. The driver
therefore never imports wandb, and a session of the user stays unchanged.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

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
"""Settings of a run, by wandb's own names (0.19 to 0.31)."""
MARK = "ANSWERS "
"""Beginning of the line with the settings. wandb may write other lines."""
TIMEOUT = 60.0
"""Timeout, in seconds, for the settings. The import of wandb takes a second on a quiet machine."""


class Asking:
    """Request for wandb's settings, which begins with the object's creation."""

    def __init__(self, mode: str | None) -> None:
        """Start the process that reads the settings.

        Args:
            mode: Mode of the user's `Wandb(...)`. None: wandb's own settings decide.
        """
        self._answers: Future[Mapping[str, Any]] = Future()
        threading.Thread(target=self._ask, args=(mode,), name="daskpytorch-wandb-asks", daemon=True).start()

    def answers(self) -> Mapping[str, Any]:
        """Wait for wandb's settings, and return all that have a value.

        Raises:
            OSError: The process with wandb has failed or timed out.
        """
        return self._answers.result()

    def _ask(self, mode: str | None) -> None:
        command = [sys.executable, "-m", __name__, mode or ""]
        try:
            asked = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
            answers = json.loads(asked.stdout.rpartition(MARK)[2]) if asked.returncode == 0 else None
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._answers.set_exception(OSError(f"wandb's settings could not be read ({error})"))
            return
        if answers is not None:
            self._answers.set_result(answers)
        else:
            why = asked.stderr.strip().rpartition("\n")[2] or f"exit code {asked.returncode}"
            self._answers.set_exception(OSError(f"wandb's settings could not be read ({why})"))


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
