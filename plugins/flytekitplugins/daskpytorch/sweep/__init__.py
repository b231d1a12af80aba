"""Many models at once on one cluster: which gets workers when, which is stopped early, what a user sees of it.

Runs in the driver. Called by `dispatch.map`. May import `dask` and all below.
"""
