"""What a process of ours does for itself: streams, log, signals, scratch folders.

Runs in all processes. Imports nothing of ours but errors.
"""
