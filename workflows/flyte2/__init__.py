"""Workflows for Flyte 2's SDK. They train the same models as the workflows for flytekit."""
