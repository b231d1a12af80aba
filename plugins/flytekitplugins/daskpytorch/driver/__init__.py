"""A gang's driver, in the user's process. Each gang has one thread, where its `brain` decides.

May import `node`, which describes this machine, and packages below `node`.
"""
