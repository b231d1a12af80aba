"""Features of a gang, each a `Part` in one file: the core imports none of them, and none imports another.

The order of a gang's parts decides who ends an attempt first: a request to stop, a hang, more workers.
"""
