"""What a user sees of a gang: observers of it, in the driver.

Called by `flyte`, `dispatch` and `sweep`. May import `protocol` and all below.
"""
