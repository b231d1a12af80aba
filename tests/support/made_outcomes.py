"""Outcomes of experiments that nobody had to train, for the tests of sweeps and their charts."""

import torch

from tasks.char_lstm import EpochMetrics, TrainingResult
from tasks.sweeps import Experiment, Outcome


def result(*losses: float, seconds: float = 1.0) -> TrainingResult:
    """A training with these held-out losses, whose epochs took so many seconds each."""
    return TrainingResult(
        state_dict={"weight": torch.zeros(1)},
        epochs=[
            EpochMetrics(
                epoch=epoch,
                loss=0.0,
                held_out_loss=loss,
                held_out_accuracy=0.0,
                samples_seen=1,
                samples_per_second=1.0,
                epoch_seconds=seconds,
            )
            for epoch, loss in enumerate(losses, 1)
        ],
    )


def outcome(*losses: float, ranks: int = 1, batch_size: int = 8, lr: float = 0.1, seconds: float = 1.0) -> Outcome:
    """A trained model with these losses; without any, a failure."""
    one = Experiment(batch_size=batch_size, lr=lr, ranks=ranks)
    if not losses:
        return Outcome(experiment=one, error=RuntimeError("no memory\nand a long log"))
    return Outcome(experiment=one, result=result(*losses, seconds=seconds))
