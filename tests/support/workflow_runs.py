"""Runs the repository's workflows by the real `pyflyte`, each in a folder of its own."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pages import REPOSITORY
from processes import SCRIPTS, nothing_left_behind, run_program


@dataclass
class Run:
    """One run of a workflow, with what it left in its folder."""

    done: subprocess.CompletedProcess[str]
    folder: Path

    @property
    def has_trained(self) -> bool:
        """True if ranks were started. False if Flyte's cache had the result."""
        assert self.done.returncode == 0, self.done.stdout + self.done.stderr
        return "train: starting" in self.done.stderr

    @classmethod
    def of(cls, workflow: str, folder: Path, name: str, *flags: str, env: Mapping[str, str] | None = None) -> Self:
        """Run a workflow, with the home directory that all runs of the folder share, and so Flyte's cache."""
        own = folder / name
        (own / "tmp").mkdir(parents=True)
        places = {"HOME": str(folder), "TORCH_HOME": str(folder), "WANDB_DIR": str(own), "TMPDIR": str(own / "tmp")}
        command = [SCRIPTS / "pyflyte", "run", REPOSITORY / "workflows" / f"{workflow}.py", workflow, *flags]
        with nothing_left_behind():
            done = run_program(command, cwd=own, env={"WANDB_MODE": "offline", **places, **(env or {})})
        return cls(done=done, folder=own)
