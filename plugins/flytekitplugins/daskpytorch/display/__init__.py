"""Displays and trackers of a gang: observers in the driver and in rank 0."""
