"""Example workflows. The docstring of each file says how to run the workflow."""
