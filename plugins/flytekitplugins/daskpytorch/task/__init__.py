"""Parts that task types for flytekit and Flyte 2 share. Runs in the task's process, and imports neither adapter."""
