"""What the task types of all hosts share: a gang as a task, checkpoints of local runs, results, a live page, signals.

Runs in the task's process. Called by the hosts' adapters; knows none of them. May import all below it.
"""
