"""Gangs on Dask: the cluster, the agents on its workers, and Dask clients in ranks.

Runs in the driver and in Dask workers. `in_rank` also runs in ranks that use Dask. `dispatch`, `task`, `flyte` and
`sweep` call this package. May import `driver` and all layers below.
"""
