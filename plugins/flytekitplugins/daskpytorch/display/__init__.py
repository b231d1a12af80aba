"""What a user sees of a gang, here and elsewhere: observers of it, in the driver and in rank 0.

Called by `flyte`, `dispatch` and `sweep`, and by name in rank 0. May import `report`, `protocol` and all below.
"""
