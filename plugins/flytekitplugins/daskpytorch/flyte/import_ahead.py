"""Imports all modules that ranks of Flyte tasks need, in the fork server. The imports take seconds."""

from flytekitplugins.daskpytorch.flyte.rank import finish_imports

finish_imports()
