"""Imported by the fork server before it forks ranks of Flyte 2's tasks: all that these need, which takes seconds."""

import flyte.types  # noqa: F401

from flyteplugins.daskpytorch.rank import put_to_sleep

put_to_sleep()
