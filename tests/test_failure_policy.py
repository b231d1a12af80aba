"""The limits of restarts: two budgets, and no third attempt after the same error at the same step."""

from __future__ import annotations

import pytest

from flytekitplugins.daskpytorch.driver.blame import AttemptFailure, FailurePolicy


def error(cause: str = "ValueError: bad batch", position: tuple[int | None, int | None] = (3, 1)) -> AttemptFailure:
    return AttemptFailure(what=f"rank 1: {cause}", cause=cause, position=position, is_infrastructure=False)


def loss(cause: str = "its worker was lost", position: tuple[int | None, int | None] = (3, None)) -> AttemptFailure:
    return AttemptFailure(what=f"rank 0: {cause}", cause=cause, position=position, is_infrastructure=True)


def after(*failures: AttemptFailure, limit: int = 3) -> FailurePolicy:
    policy = FailurePolicy(limit)
    for failure in failures:
        assert policy.refusal(failure) is None
        policy.note(failure)
    return policy


@pytest.mark.parametrize("failure", [error(), loss()])
def test_first_defeat_is_forgiven(failure: AttemptFailure) -> None:
    assert FailurePolicy(1).refusal(failure) is None


@pytest.mark.parametrize("failure", [error(), loss()])
def test_limit_of_0_forgives_nothing(failure: AttemptFailure) -> None:
    assert FailurePolicy(0).refusal(failure) == "max_restarts is 0"


def test_losses_are_forgiven_up_to_the_limit() -> None:
    policy = after(loss(), loss(), limit=2)
    assert policy.refusal(loss()) == "max_restarts=2 is used up by losses of infrastructure"


def test_errors_are_forgiven_up_to_the_limit() -> None:
    policy = after(error(position=(1, 0)), error(position=(2, 0)), limit=2)
    assert policy.refusal(error(position=(3, 0))) == "max_restarts=2 is used up by errors of the function"


def test_losses_and_errors_have_budgets_of_their_own() -> None:
    policy = after(loss(), error(position=(1, 0)), loss(), error(position=(2, 0)), limit=2)
    assert policy.refusal(loss()) is not None
    assert policy.refusal(error(position=(3, 0))) is not None
    policy = after(loss(), loss(), limit=2)
    assert policy.refusal(error()) is None


def test_same_error_at_the_same_position_twice_ends_it_before_the_limit() -> None:
    assert after(error(), limit=100).refusal(error()) == "the same error came at the same step twice"


def test_loss_in_between_does_not_excuse_the_same_error() -> None:
    assert after(error(), loss()).refusal(error()) == "the same error came at the same step twice"


def test_same_error_of_another_rank_is_still_the_same() -> None:
    other = AttemptFailure(what="rank 7", cause=error().cause, position=error().position, is_infrastructure=False)
    assert after(error()).refusal(other) == "the same error came at the same step twice"


def test_same_error_without_any_step_is_the_same() -> None:
    nowhere = error(position=(None, 0))
    assert after(nowhere).refusal(nowhere) == "the same error came at the same step twice"


def test_same_loss_at_the_same_step_is_forgiven() -> None:
    assert after(loss(), loss()).refusal(loss()) is None


@pytest.mark.parametrize(
    "later",
    [error(position=(4, 1)), error(position=(3, 2)), error("OSError: disk"), error(position=(None, None))],
)
def test_another_error_or_another_position_is_forgiven(later: AttemptFailure) -> None:
    assert after(error()).refusal(later) is None


def test_error_counts_as_the_same_only_right_after_its_like() -> None:
    assert after(error(), error("OSError: disk")).refusal(error()) is None


def test_asking_costs_nothing() -> None:
    policy = FailurePolicy(1)
    assert [policy.refusal(loss()) for _ in range(3)] == [None, None, None]


def test_what_would_come_again_is_not_tried_again() -> None:
    final = AttemptFailure(what="rank 0", cause="TypeError", position=(3, 1), is_infrastructure=False, is_final=True)
    assert FailurePolicy(3).refusal(final) == "it is certain to come again"
    assert after(loss()).refusal(final) is not None


def test_exception_without_a_checkpoint_since_the_start_is_not_tried_again() -> None:
    raised = {"what": "rank 0", "cause": "ValueError at train.py:7", "position": (3, 1), "is_infrastructure": False}
    fresh = AttemptFailure(**raised, is_exception=True)
    assert (FailurePolicy(3).refusal(fresh) or "").startswith("no checkpoint had been saved")
    assert FailurePolicy(3).refusal(AttemptFailure(**raised, is_exception=True, gets_further=True)) is None
