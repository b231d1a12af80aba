"""A clock for tests."""


class Clock:
    """Stands still but where a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
