"""Adapter for flytekit: task configs and types, context, outputs, Deck and the early start."""
