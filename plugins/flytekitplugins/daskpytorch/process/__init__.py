"""Services within one process: streams, log, signals and scratch folders.

Runs in all processes. Imports only `errors` of this package.
"""
