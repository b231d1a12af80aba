"""The charts and tables of a sweep show the right numbers."""

from __future__ import annotations

from flytekitplugins.daskpytorch.report.pieces import shared
from made_outcomes import outcome
from tasks.curves import experiments_table, time_chart, times_table
from tasks.sweeps import TimeToLoss, grid, time_to_loss
from test_report import chart_data, rows_of


def lines_of(html: str) -> list[dict[str, list[tuple[float, float]]]]:
    """The points of each line of each chart."""
    return [
        {line["name"]: list(zip(line["x"], line["y"], strict=True)) for line in data["lines"]}
        for data in chart_data(html)
    ]


def test_a_failed_experiment_has_a_line_in_the_table() -> None:
    outcomes = [outcome(3.0, 2.0, lr=0.1), outcome(lr=0.2), outcome(1.5, 1.8, lr=0.3)]
    assert rows_of(experiments_table(outcomes))[1:] == [
        ["1", "8", "0.3", "2", "1.8000", "1.5000", "2.0", ""],
        ["1", "8", "0.1", "2", "2.0000", "2.0000", "2.0", ""],
        ["1", "8", "0.2", "0", "", "", "", "failed: RuntimeError: no memory"],
    ]


def scaling() -> list[TimeToLoss]:
    """Ranks 1 and 2, batches of 8 and 16: 1 x 16 and 2 x 8 compare."""
    return time_to_loss(
        [
            outcome(3.0, 2.0, ranks=one.ranks, batch_size=one.batch_size, lr=one.lr, seconds=4.0 / one.ranks)
            for one in grid([8, 16], [0.1, 0.2], [1, 2])
        ],
        2.0,
    )


def test_only_equal_global_batches_are_joined() -> None:
    html = time_chart(scaling(), 2.0)
    assert lines_of(html) == [
        {
            **{f"global batch 8, learning rate {lr}": [(1, 8)] for lr in (0.1, 0.2)},
            **{f"global batch 16, learning rate {lr}": [(1, 8), (2, 4)] for lr in (0.1, 0.2)},
            **{f"global batch 32, learning rate {lr}": [(2, 4)] for lr in (0.1, 0.2)},
        }
    ]
    assert "Time to a held-out loss of 2.0000 nats per character" in html
    assert "No other experiment has the global batch of 1 x 8 = 8; 2 x 16 = 32." in html
    assert "never" not in html.replace(shared(), "")


def test_some_or_all_never_come_to_the_loss() -> None:
    times = scaling()
    times[0].seconds = None
    assert "1 of 8 never came to the loss; the table says which." in time_chart(times, 2.0)
    assert rows_of(times_table(times))[1] == ["8", "0.1", "1", "8", "never"]
    for time in times:
        time.seconds = None
    nobody = time_chart(times, 2.0)
    assert lines_of(nobody) == []
    assert "No experiment reached this loss." in nobody
