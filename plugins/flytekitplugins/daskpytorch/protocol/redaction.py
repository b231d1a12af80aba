"""What is a secret by its name, and shown to nobody: not in logs, nor in Weights & Biases. Runs in the driver."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["without_secrets"]

SECRET = re.compile(
    r"(?i)^token$|(^|_)(secret|password|passwd|credentials?|storage_options"
    r"|(api|access|secret|private)_?key(_id)?|(api|auth|access|session|bearer|hf)_?token)$"
)
"""Not the names of hyper-parameters such as num_tokens or pad_token."""
HIDDEN = "(hidden)"


def without_secrets(value: Any) -> Any:
    """The same, with `(hidden)` in place of whatever a dictionary in it has under such a name."""
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, dict):
        return {name: HIDDEN if SECRET.search(str(name)) else without_secrets(item) for name, item in value.items()}
    return value
