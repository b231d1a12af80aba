"""What a process of ours does for itself: streams, signals, scratch folders.

Runs in all processes. Imports nothing of ours.
"""
