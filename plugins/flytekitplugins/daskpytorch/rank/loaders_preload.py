"""Has the fork server of `multiprocessing` in a rank survive SIGTERM to all processes; importing it there does it.

For `multiprocessing.set_forkserver_preload`, which has no other way.
"""

from flytekitplugins.daskpytorch.process import sigterm

sigterm.leave_to_parent()
# With torch at hand a worker says in milliseconds, not seconds, that it leaves SIGTERM to its rank.
from flytekitplugins.daskpytorch.rank import loaders  # noqa: E402, F401
