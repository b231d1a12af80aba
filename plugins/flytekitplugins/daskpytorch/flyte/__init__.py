"""Adapter for flytekit: task configs and types, context, outputs and the early start. Only `rank` runs in ranks."""
