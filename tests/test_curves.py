"""The charts and tables of a sweep."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from made_outcomes import outcome, result
from tasks.curves import Chart, experiments_table, loss_by_epoch, loss_by_time, time_chart, times_table
from tasks.sweeps import Experiment, Outcome, TimeToLoss, grid, time_to_loss

BIGRAM = 2.6844


def swept(num_sizes: int, num_rates: int) -> list[Outcome]:
    """A sweep whose losses and times differ."""
    sizes, rates = [2**i for i in range(num_sizes)], [0.1 * (i + 1) for i in range(num_rates)]
    return [
        Outcome(experiment=one, result=result(3 - one.lr, 2.5 - one.lr, 2.2, seconds=9 / one.batch_size))
        for one in grid(sizes, rates)
    ]


def rows_of(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html[html.index("<tbody>") :])
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


@pytest.mark.parametrize("shape", [(2, 2), (4, 3), (1, 5)])
def test_a_panel_for_each_experiment(shape: tuple[int, int]) -> None:
    outcomes = swept(*shape)
    for chart in (loss_by_epoch(outcomes, BIGRAM), loss_by_time(outcomes, BIGRAM)):
        panels = chart.figure.axes
        assert [panel.get_title() for panel in panels] == [one.experiment.label for one in outcomes]
        assert chart.figure.get_supylabel() == "held-out loss (nats per character)"
        assert "a bigram model, 2.6844 nats per character" in chart.caption
        for panel, one in zip(panels, outcomes, strict=True):
            *others, baseline, own = panel.lines
            assert len(others) == len(outcomes)
            assert list(own.get_ydata()) == one.losses
            assert set(baseline.get_ydata()) == {BIGRAM}
    assert loss_by_epoch(outcomes, BIGRAM).figure.get_supxlabel() == "epoch"
    assert list(loss_by_time(outcomes, BIGRAM).figure.axes[0].lines[-1].get_xdata()) == outcomes[0].elapsed


@pytest.mark.parametrize("shape", [(2, 2), (4, 3)])
def test_nothing_overlaps(shape: tuple[int, int]) -> None:
    outcomes = [
        Outcome(experiment=Experiment(batch_size=16384, lr=0.001 * (i + 1), ranks=16), result=result(3.0, 2.0))
        for i in range(shape[0] * shape[1])
    ]
    figure = loss_by_time(outcomes, BIGRAM).figure
    figure.canvas.draw()
    boxes = [panel.title.get_window_extent() for panel in figure.axes]
    boxes += [panel.get_window_extent() for panel in figure.axes]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_a_failed_experiment_has_a_panel_and_a_line_in_the_table() -> None:
    outcomes = [outcome(3.0, 2.0, lr=0.1), outcome(lr=0.2), outcome(1.5, 1.8, lr=0.3)]
    panels = loss_by_epoch(outcomes, BIGRAM).figure.axes
    assert [[text.get_text() for text in panel.texts] for panel in panels] == [[], ["failed"], []]
    assert rows_of(experiments_table(outcomes)) == [
        ["1", "8", "0.3", "2", "1.8000", "1.5000", "2.0", ""],
        ["1", "8", "0.1", "2", "2.0000", "2.0000", "2.0", ""],
        ["1", "8", "0.2", "0", "", "", "", "failed: RuntimeError: no memory"],
    ]


def test_a_chart_is_a_png(tmp_path: Path) -> None:
    chart = loss_by_epoch(swept(2, 2), BIGRAM)
    path = chart.save(tmp_path)
    assert path == tmp_path / "loss_by_epoch.png"
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    (embedded,) = re.findall(r"<img src='data:image/png;base64,([^']*)' alt='Held-out loss against epoch'", chart.html)
    assert base64.b64decode(embedded) == path.read_bytes()
    assert Image.open(io.BytesIO(chart.png)).size == tuple(pixels.shape[1::-1])


def scaling() -> list[TimeToLoss]:
    """Ranks 1 and 2, batches of 8 and 16: 1 x 16 and 2 x 8 compare."""
    return time_to_loss(
        [
            outcome(3.0, 2.0, ranks=one.ranks, batch_size=one.batch_size, lr=one.lr, seconds=4.0 / one.ranks)
            for one in grid([8, 16], [0.1, 0.2], [1, 2])
        ],
        2.0,
    )


def lines_of(chart: Chart) -> list[tuple[list[float], list[float]]]:
    """What is joined: the curves of two points or more."""
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in chart.figure.axes[0].lines]
    return [(x, y) for x, y in lines if len(x) > 1]


def test_only_equal_global_batches_are_joined() -> None:
    chart = time_chart(scaling(), 2.0)
    assert lines_of(chart) == [([1, 2], [8.0, 4.0])] * 2  # for each learning rate
    axes = chart.figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("ranks (one per worker)", "training time to this loss (s)")
    assert chart.title == axes.get_title() == "Time to a held-out loss of 2.0000 nats per character"
    assert "No other experiment has the global batch of 1 x 8 = 8; 2 x 16 = 32." in chart.caption
    assert "never" not in chart.caption
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["global batch", "8", "16", "32", "learning rate", "0.1", "0.2"]


def test_some_or_all_never_come_to_the_loss() -> None:
    times = scaling()
    times[0].seconds = None
    chart = time_chart(times, 2.0)
    assert "1 of 8 never came to the loss; the table says which." in chart.caption
    assert rows_of(times_table(times))[0] == ["8", "0.1", "1", "8", "never"]
    for time in times:
        time.seconds = None
    nobody = time_chart(times, 2.0)
    assert [text.get_text() for text in nobody.figure.axes[0].texts] == ["no experiment reached this loss"]
    assert nobody.png.startswith(b"\x89PNG")


def test_the_table_of_times_has_partners_side_by_side() -> None:
    rows = rows_of(times_table(scaling()))
    assert [row[:4] for row in rows[2:6]] == [
        ["16", "0.1", "1", "16"],
        ["16", "0.1", "2", "8"],
        ["16", "0.2", "1", "16"],
        ["16", "0.2", "2", "8"],
    ]
