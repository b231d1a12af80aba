"""A user's project, for the tests that run tasks the way a backend does."""
