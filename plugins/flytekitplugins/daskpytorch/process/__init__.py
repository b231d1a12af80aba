"""Services within one process: streams, log, signals, scratch folders and a thread for slow work.

Runs in all processes. Imports only `errors` of this package.
"""
