"""The driver of a gang, in the process that asked for it: one thread a gang, whose `brain` decides.

Called by `dispatch`, `flyte`, `dask` and `sweep`. May import `node`, for what its own machine has, and all below.
"""
