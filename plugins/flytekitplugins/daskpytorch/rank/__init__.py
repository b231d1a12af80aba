"""One rank of a gang: a process that the fork server has forked. `node` calls this package.

May import `protocol` and all below. `driver`, `task` and `data` use parts in other processes.
"""
