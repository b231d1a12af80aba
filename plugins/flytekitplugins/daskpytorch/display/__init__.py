"""Displays and trackers of a gang: observers in the driver and in rank 0.

Called by `task`, `dispatch` and `sweep`, and by name in rank 0. May import `report`, `driver` and all below.
"""
