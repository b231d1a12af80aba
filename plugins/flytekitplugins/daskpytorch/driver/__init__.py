"""The driver of a gang, in the process that asked for the gang. Each gang has one thread, where its `brain` decides.

`dispatch`, `flyte`, `dask` and `sweep` call the driver. The driver may import `node`, which describes its own machine,
and all packages below `node`.
"""
