"""One rank of a gang: a process that the fork server has forked.

Called by `node`. May import `protocol` and all below.
"""
