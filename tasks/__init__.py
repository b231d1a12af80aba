"""Reusable parts of the workflows: data, models and plain training loops."""
