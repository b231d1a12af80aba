"""The same workflows with Flyte 2's SDK."""
