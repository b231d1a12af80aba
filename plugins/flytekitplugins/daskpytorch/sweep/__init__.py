"""Training of many models at once on one cluster: scheduling, early stopping, storage and display.

Runs in the driver. Called by `dispatch.map`. May import `dask` and all below.
"""
