"""A gang's driver, in the user's process. Each gang has one thread, where its `brain` decides.

`dispatch`, `task`, `sweep`, `display`, `results` and `doctor` call the driver. The driver may import `node`, which
describes this machine, and packages below `node`.
"""
