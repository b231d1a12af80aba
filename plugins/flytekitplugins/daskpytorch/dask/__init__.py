"""Dask as the host: the cluster, agents on its workers, what workers hold for ranks.

Runs in the driver and beside Dask workers; `in_rank` in ranks whose function imports Dask. Called by `dispatch`,
`flyte` and `sweep`. May import `driver` and all below.
"""
