"""Whose a frame of a stack is. Pure; runs in the driver."""

import re
from collections.abc import Iterable

NOT_THE_USERS = re.compile(
    r'File "(<frozen |<string>|.*(/(site|dist)-packages/|/lib/python3\.\d+/|/flytekitplugins/daskpytorch/))'
)
"""Frames of Python, of what is installed, of ours, and of the text that an interpreter was started with."""


def users_frames(frames: Iterable[str]) -> list[str]:
    """Those of the user's own files."""
    return [frame for frame in frames if not NOT_THE_USERS.search(frame)]
