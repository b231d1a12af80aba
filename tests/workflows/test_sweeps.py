"""The workflows' sweeps: grids, outcomes of experiments, and their evaluation."""

from concurrent.futures import Future

import pytest

from flytekitplugins.daskpytorch import PreemptedError
from made_outcomes import outcome, result
from tasks.char_lstm import TrainingResult
from tasks.sweeps import (
    ScalingRow,
    SweepRow,
    TimeToLoss,
    best,
    collect,
    grid,
    scaling_rows,
    sweep_rows,
    time_to_loss,
)


def future(value: TrainingResult | Exception) -> Future[TrainingResult]:
    made: Future[TrainingResult] = Future()
    if isinstance(value, Exception):
        made.set_exception(value)
    else:
        made.set_result(value)
    return made


def test_rows() -> None:
    outcomes = [outcome(3.0, 2.0, ranks=2, seconds=1.5), outcome(lr=0.2), outcome(2.5, lr=0.3)]
    assert sweep_rows(outcomes) == [
        SweepRow(batch_size=8, lr=0.1, epoch=1, loss=3.0, elapsed_time_sec=1.5),
        SweepRow(batch_size=8, lr=0.1, epoch=2, loss=2.0, elapsed_time_sec=3.0),
        SweepRow(batch_size=8, lr=0.3, epoch=1, loss=2.5, elapsed_time_sec=1.0),
    ]
    assert scaling_rows(outcomes)[1] == ScalingRow(
        ranks=2, batch_size=8, global_batch=16, lr=0.1, epoch=2, loss=2.0, elapsed_time_sec=3.0
    )


def test_the_best_has_the_lowest_loss_at_the_end() -> None:
    outcomes = [
        outcome(),
        outcome(float("nan"), lr=0.2),
        outcome(1.0, 2.5, lr=0.3),
        outcome(3.0, 2.0, lr=0.4),
        outcome(9.0, 2.0, lr=0.5),
    ]
    assert best(outcomes).experiment.lr == 0.4
    assert best(outcomes[:2]).experiment.lr == 0.2


def test_the_time_to_a_loss_is_that_of_the_first_epoch_at_or_below_it() -> None:
    outcomes = [outcome(3.0, 2.0, 2.2, ranks=2, batch_size=4, seconds=2.0), outcome(2.0), outcome(2.5), outcome()]
    times = time_to_loss(outcomes, 2.0)
    assert times[0] == TimeToLoss(ranks=2, batch_size=4, global_batch=8, lr=0.1, seconds=4.0)
    assert [time.seconds for time in times] == [4.0, 1.0, None, None]


def test_a_failed_experiment_is_kept_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    experiments = grid([8], [0.1, 0.2])
    outcomes = collect(experiments, [future(LookupError("nothing there\nlog")), future(result(2.0))])
    assert capsys.readouterr().out == "failed: batch size 8, learning rate 0.1: LookupError: nothing there\n"
    assert [outcome.losses for outcome in outcomes] == [[], [2.0]]
    assert outcomes[1].trained.epochs[0].held_out_loss == 2.0
    with pytest.raises(ValueError, match=r"batch size 8, learning rate 0\.1 failed and has no model"):
        outcomes[0].trained  # noqa: B018 - the access is what is tested


def test_if_all_fail_the_first_error_is_raised() -> None:
    with pytest.raises(LookupError, match="first"):
        collect(grid([8], [0.1, 0.2]), [future(LookupError("first")), future(OSError("second"))])


def test_a_preempted_task_does_not_end_with_half_a_sweep() -> None:
    with pytest.raises(PreemptedError):
        collect(grid([8], [0.1, 0.2]), [future(result(2.0)), future(PreemptedError("gone", cause="gone"))])
