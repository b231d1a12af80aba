"""Gangs on Dask: the cluster, and the agents on its workers.

Runs in the driver and in Dask workers. `dispatch`, `task`, `flyte` and `sweep` call this package. May import `driver`
and all layers below.
"""
