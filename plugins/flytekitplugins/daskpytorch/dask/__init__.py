"""Dask as the host: the cluster, agents on its workers, the way from ranks to both.

Runs in the driver and beside Dask workers; `in_rank` in ranks that use Dask, too. Called by `dispatch`,
`flyte` and `sweep`. May import `driver` and all below.
"""
