"""Shared parts of all hosts' task types: a gang as a task, checkpoints of local runs, results, a live page, signals.

Runs in the task's process. Called by the hosts' adapters, and imports no adapter. May import all lower layers.
"""
