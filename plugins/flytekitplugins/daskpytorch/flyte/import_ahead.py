"""Imported by the fork server before it forks ranks of Flyte tasks: all that these need, which takes seconds."""

from flytekitplugins.daskpytorch.flyte.rank import finish_imports

finish_imports()
