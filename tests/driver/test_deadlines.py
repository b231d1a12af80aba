"""All times after SIGTERM follow from one grace period."""

import pytest

from flytekitplugins.daskpytorch.driver.state import Deadlines


@pytest.mark.parametrize("grace_period", [1.0, 20.0, 600.0])
def test_an_end_takes_at_most_one_and_a_half_times_the_grace_period(grace_period: float) -> None:
    ends = Deadlines(grace_period)
    assert grace_period + ends.stop + ends.storage + ends.results <= 1.5001 * grace_period
    assert ends.unheeded + ends.stop + ends.storage + ends.results <= 1.5001 * grace_period
    assert ends.close + ends.stop < ends.all_stopped
