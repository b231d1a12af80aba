"""One rank of a gang: a process that the fork server has forked.

Called by `node`. The driver's gang for debugging, `task` and `data` use parts in other processes. May import `protocol`
and all below.
"""
