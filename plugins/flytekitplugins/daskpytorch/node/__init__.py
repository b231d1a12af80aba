"""Code for one node of a gang: the agent, and the fork server that starts its ranks.

Runs in a Dask worker or in the task's process, and depends on neither Dask nor Flyte. `dask` calls the agent on
workers, and `task` calls the agent on the task's own node. May import `rank`, for forked ranks, and all layers below.
"""
