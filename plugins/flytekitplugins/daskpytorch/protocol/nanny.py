"""The variables that a Dask nanny sets for its workers, told from those that the user has set."""

import os
from collections.abc import Mapping
from pathlib import Path

MARK = "MALLOC_TRIM_THRESHOLD_"
"""Nobody but a nanny sets it, as a rule."""
SETTINGS = {MARK: "65536", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""`distributed.nanny.pre-spawn-environ` up to distributed 2026.8. A nanny keeps what its own environment has."""


def without_nannys(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment less what a nanny has set.

    A nanny sets the variables in its own process, too: in the program that makes a `LocalCluster`. So the user's are
    those with other values, and those that the program or its nanny was started with.
    """
    if MARK not in environment:
        return dict(environment)
    at_start = _before_nanny()
    return {
        name: value for name, value in environment.items() if value != SETTINGS.get(name) or at_start.get(name) == value
    }


def _before_nanny() -> Mapping[str, str]:
    """Return what the nearest process that no nanny has started was started with: this one or one above it."""
    pid = os.getpid()
    while pid > 1:
        try:
            at_start = _at_start(pid)
            if MARK not in at_start:
                return at_start
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # another user's, or it has ended
            break
    return {}


def _at_start(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    return {name: value for name, _, value in (variable.partition("=") for variable in variables)}
