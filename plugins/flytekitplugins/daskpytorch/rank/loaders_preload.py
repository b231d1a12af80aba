"""Makes `multiprocessing`'s fork server in a rank ignore SIGTERM, as soon as the fork server imports this module.

`multiprocessing.set_forkserver_preload` can only name modules to import.
"""

from flytekitplugins.daskpytorch.process import signals

signals.leave_sigterm_to_parent()
# With torch imported in the fork server, a worker sets its SIGTERM handler within milliseconds, not seconds.
import torch.utils.data  # noqa: E402, F401
