"""One node of a gang: the agent, and the fork server that starts its ranks.

Runs in a Dask worker, or in the task itself; knows neither. Called by `dask`, on workers, and by `flyte`, for the
task's own node. May import `rank`, which the fork server forks into, and all below.
"""
