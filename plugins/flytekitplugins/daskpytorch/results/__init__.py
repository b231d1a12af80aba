"""Files that ranks submit, and that the driver writes below a folder.

Runs in ranks, which submit, and in the driver. Called by users and by `task`. May import `driver` and all below.
"""

from flytekitplugins.daskpytorch.results.handler import DaskResultsHandler, ResultPathError

__all__ = ["DaskResultsHandler", "ResultPathError"]
