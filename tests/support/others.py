"""Other users of this machine, as far as a test can have them."""

import os
from pathlib import Path

import pytest

NOBODY = 65534


def give_away(path: Path, who: str) -> None:
    """Have another user own a path, or let others write to it."""
    if who == "can write to":
        path.chmod(0o777)
        return
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, NOBODY, NOBODY)
