"""Workflows for Flyte 2's SDK. The models are those of the workflows for flytekit."""
