"""Charts and tables of a sweep's experiments, as pieces of a Deck."""

from __future__ import annotations

from collections.abc import Sequence

from flytekitplugins.daskpytorch import report
from tasks.sweeps import Outcome, TimeToLoss, without_partner

LOSS = "held-out loss (nats per character)"
BIGRAM = "bigram model"
MAX_LINES = 7
"""Maximum number of experiments in a chart. One of the eight colours belongs to the bigram model."""


def loss_charts(outcomes: Sequence[Outcome], baseline: float) -> str:
    """Return charts of the held-out loss of the best experiments, by epoch and by seconds of training.

    Args:
        outcomes: Outcomes of the experiments, including failed ones.
        baseline: The bigram model's held-out loss, in nats per character.
    """
    ended = _ranked(outcomes)
    shown = ended[:MAX_LINES]
    by_epoch = {one.experiment.label: list(enumerate(one.losses, 1)) for one in shown}
    by_time = {one.experiment.label: list(zip(one.elapsed, one.losses, strict=True)) for one in shown}
    charts = [_chart(by_epoch, "epoch", baseline), _chart(by_time, "seconds", baseline)]
    note = (
        f"Dashed: a bigram model, {baseline:.4f} nats per character. The time is that of the training steps, without "
        "the evaluations between them."
    )
    if len(ended) > len(shown):
        note += f" These are the {len(shown)} best of {len(ended)}; the table has all."
    return report.section("Losses", report.grid(*charts), report.text(note, quiet=True))


def time_chart(times: Sequence[TimeToLoss], target: float) -> str:
    """Return a chart of the time to a loss by number of ranks, with a line for each global batch and learning rate.

    Args:
        times: Times of the experiments. Experiments that never reached the loss are counted below the chart.
        target: The loss in nats per character.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for time in _ordered(times):
        if time.seconds is not None:
            name = f"global batch {time.global_batch:,}, learning rate {time.lr:g}"
            lines.setdefault(name, []).append((time.ranks, time.seconds))
    return report.section(
        f"Time to a held-out loss of {target:.4f} nats per character",
        report.line_chart("training time to this loss (s)", lines, "ranks", from_zero=True)
        if lines
        else report.text("No experiment reached this loss."),
        report.text(_about_times(times), quiet=True),
    )


def experiments_table(outcomes: Sequence[Outcome]) -> str:
    """Return a table of the experiments, ordered by their final loss. Failed experiments come last."""
    failed = [outcome for outcome in outcomes if not outcome.result]
    header = (
        *("ranks", "batch size per rank", "learning rate", "epochs"),
        *("final loss (nats)", "best loss (nats)", "time (s)", "remark"),
    )
    rows = [_table_row(outcome) for outcome in (*_ranked(outcomes), *failed)]
    return report.section("Experiments", report.card("", report.table(header, rows)))


def times_table(times: Sequence[TimeToLoss]) -> str:
    """Return a table of the times. Experiments with equal global batch and learning rate are neighbours."""
    header = ("global batch", "learning rate", "ranks", "batch size per rank", "time to loss (s)")
    rows = [(t.global_batch, f"{t.lr:g}", t.ranks, t.batch_size, _seconds(t.seconds, "never")) for t in _ordered(times)]
    return report.section("Times", report.card("", report.table(header, rows)))


def _chart(lines: dict[str, list[tuple[float, float]]], x_label: str, baseline: float) -> str:
    every = [x for points in lines.values() for x, _ in points]
    compared = {BIGRAM: [(min(every), baseline), (max(every), baseline)]} if every else {}
    best = dict.fromkeys(list(lines)[:1], "min")
    return report.line_chart(LOSS, lines | compared, x_label, best=best, dashed=[BIGRAM])


def _ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return sorted((outcome for outcome in outcomes if outcome.result), key=lambda outcome: outcome.standing)


def _ordered(times: Sequence[TimeToLoss]) -> list[TimeToLoss]:
    return sorted(times, key=lambda time: (time.global_batch, time.lr, time.ranks))


def _about_times(times: Sequence[TimeToLoss]) -> str:
    """Return notes: how to read the chart, and experiments without partner or without time."""
    text = (
        "Only experiments of equal global batch (ranks x batch size per rank) and learning rate are joined, since only "
        "they take the same steps. The time runs to the end of the first epoch at or below the loss; nothing is "
        "interpolated."
    )
    if single := without_partner(times):
        text += f" No other experiment has the global batch of {_shapes(single)}."
    if num_missed := sum(time.seconds is None for time in times):
        text += f" {num_missed} of {len(times)} never came to the loss; the table says which."
    return text


def _shapes(times: Sequence[TimeToLoss]) -> str:
    """Return the shapes, such as `1 x 1,024 = 1,024`: ranks, batch size per rank, global batch."""
    shapes = [f"{time.ranks} x {time.batch_size:,} = {time.global_batch:,}" for time in times]
    return "; ".join(dict.fromkeys(shapes))


def _table_row(outcome: Outcome) -> tuple[object, ...]:
    one = outcome.experiment
    named = (one.ranks, one.batch_size, f"{one.lr:g}", len(outcome.epochs))
    if not outcome.result:
        return (*named, "", "", "", f"failed: {outcome.failure}")
    losses = outcome.losses
    return (*named, f"{losses[-1]:.4f}", f"{min(losses):.4f}", _seconds(outcome.elapsed[-1]), "")


def _seconds(seconds: float | None, otherwise: str = "") -> str:
    return otherwise if seconds is None else f"{seconds:.1f}"
