"""Imports all modules that ranks of Flyte 2's tasks need, in the fork server. The imports take seconds."""

import flyte.types  # noqa: F401

from flyteplugins.daskpytorch.rank import put_to_sleep

put_to_sleep()
