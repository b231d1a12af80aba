"""Code for one node of a gang: the agent, and the fork server that starts its ranks.

Runs in a Dask worker or in the task's process, called by `dask` or `task`, and depends on neither Dask nor Flyte. May
import `rank`, for forked ranks, and all layers below.
"""
