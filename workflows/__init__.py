"""Workflows, each a story of its own; its docstring says how to run it."""
