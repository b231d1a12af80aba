"""The limits of restarts: two budgets, and no third attempt after the same error at the same step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flytekitplugins.daskpytorch.driver.blame import AttemptFailure, FailurePolicy

ERROR = AttemptFailure(what="rank 1", cause="ValueError: bad batch", position=(3, 1), is_infrastructure=False)
OTHER = replace(ERROR, cause="OSError: disk")
LOSS = AttemptFailure(what="rank 0", cause="its worker was lost", position=(3, None), is_infrastructure=True)
NOWHERE = replace(ERROR, position=(None, 0))
FINAL = replace(ERROR, is_final=True)
RAISED = replace(ERROR, is_exception=True)
ERRORS_USED_UP = "max_restarts=2 is used up by errors of the function"
LOSSES_USED_UP = "max_restarts=2 is used up by losses of infrastructure"
THE_SAME = "the same error came at the same step twice"


def at(step: int | None, moves: int | None = 0) -> AttemptFailure:
    return replace(ERROR, position=(step, moves))


@pytest.mark.parametrize(
    ("limit", "before", "failure", "refusal"),
    [
        (1, [], ERROR, None),
        (1, [], LOSS, None),
        (0, [], ERROR, "max_restarts is 0"),
        (0, [], LOSS, "max_restarts is 0"),
        (2, [LOSS, LOSS], LOSS, LOSSES_USED_UP),
        (2, [at(1), at(2)], at(3), ERRORS_USED_UP),
        (2, [LOSS, at(1), LOSS, at(2)], LOSS, LOSSES_USED_UP),
        (2, [LOSS, at(1), LOSS, at(2)], at(3), ERRORS_USED_UP),
        (2, [LOSS, LOSS], ERROR, None),
        (100, [ERROR], ERROR, THE_SAME),
        (3, [ERROR, LOSS], ERROR, THE_SAME),
        (3, [ERROR], replace(ERROR, what="rank 7"), THE_SAME),
        (3, [NOWHERE], NOWHERE, THE_SAME),
        (3, [LOSS, LOSS], LOSS, None),
        (3, [ERROR], at(4, 1), None),
        (3, [ERROR], at(3, 2), None),
        (3, [ERROR], at(None, None), None),
        (3, [ERROR], OTHER, None),
        (3, [ERROR, OTHER], ERROR, None),  # the same counts only right after its like
        (3, [], FINAL, "it is certain to come again"),
        (3, [LOSS], FINAL, "it is certain to come again"),
        (3, [], replace(RAISED, gets_further=True), None),
    ],
)
def test_a_failure_is_forgiven_or_the_reason_is_said(
    limit: int, before: list[AttemptFailure], failure: AttemptFailure, refusal: str | None
) -> None:
    policy = FailurePolicy(limit)
    for each in before:
        assert policy.refusal(each) is None
        policy.note(each)
    for _ in range(2):  # asking costs nothing
        assert policy.refusal(failure) == refusal
