"""Parts that task types for flytekit and Flyte 2 share: gangs as tasks, local checkpoints, results, live page, signals.

Runs in the task's process. Called by the adapters for flytekit and Flyte 2, and imports none of them. May import all
lower layers.
"""
