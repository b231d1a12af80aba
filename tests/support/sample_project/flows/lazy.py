"""A module that is imported only when a rank runs."""

ANSWER = 42
