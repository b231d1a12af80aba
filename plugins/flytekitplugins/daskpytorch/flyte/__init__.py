"""Adapter for flytekit: task configs and types, its context in driver and ranks, outputs, the early start.

Runs in the task's process, and `rank` runs in ranks. Called by flytekit. May import all but the command line.
"""
