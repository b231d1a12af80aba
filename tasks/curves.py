"""How a sweep is shown: charts by seaborn, as files and as HTML for a Deck, and a table of its experiments."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.report import table
from tasks.sweeps import Outcome, TimeToLoss, without_partner

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Chart", "experiments_table", "loss_by_epoch", "loss_by_time", "time_chart", "times_table"]

MAX_COLUMNS = 4
"""Panels side by side; more would make their text too small to read."""
PANEL = (3.6, 2.5)
"""Width and height of a panel, in inches."""
DPI = 110
LOSS = "held-out loss (nats per character)"
MAX_TITLE = 42
"""Characters of a panel's title on one line; longer ones run into their neighbours."""
EPOCH = "epoch"
WIDE_RANGE = 20
"""Times that differ by more than this factor are drawn on a logarithmic axis."""
MARKED_EPOCHS = 30
"""Curves up to this long show their points."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture."""

    name: str
    """The file's name, without `.png`."""
    title: str
    caption: str
    """What to know when reading it; stands below it in a Deck."""
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        """The picture as a PNG file."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    @property
    def html(self) -> str:
        """The picture and its caption, as HTML that needs no other file."""
        data = base64.b64encode(self.png).decode()
        return (
            "<figure style='margin:1em 0'>"
            f"<img src='data:image/png;base64,{data}' alt='{escape(self.title)}' style='max-width:100%;height:auto'>"
            f"<figcaption style='max-width:60em'>{escape(self.caption)}</figcaption></figure>"
        )

    def save(self, folder: str | Path) -> Path:
        """Write the PNG file; returns where it is."""
        path = Path(folder, f"{self.name}.png")
        path.write_bytes(self.png)
        return path


def loss_by_epoch(outcomes: Sequence[Outcome], baseline: float) -> Chart:
    """The held-out loss against the epoch, a panel for each experiment.

    Args:
        outcomes: Of the experiments, failed ones among them.
        baseline: The bigram model's held-out loss, in nats per character.
    """
    curves = [list(range(1, len(outcome.losses) + 1)) for outcome in outcomes]
    return Chart(
        name="loss_by_epoch",
        title="Held-out loss against epoch",
        caption=f"Each panel shows one experiment, with the others in grey. {_about(baseline)}",
        figure=_panels(outcomes, curves, baseline, title="Held-out loss against epoch", x_label=EPOCH),
    )


def loss_by_time(outcomes: Sequence[Outcome], baseline: float) -> Chart:
    """The held-out loss against the seconds of training, a panel for each experiment; as `loss_by_epoch`."""
    title = "Held-out loss against elapsed time"
    return Chart(
        name="loss_by_time",
        title=title,
        caption=(
            "Each panel shows one experiment, with the others in grey. The time is that of the training steps, "
            f"without the evaluations between them. {_about(baseline)}"
        ),
        figure=_panels(
            outcomes, [outcome.elapsed for outcome in outcomes], baseline, title=title, x_label="elapsed time (s)"
        ),
    )


def time_chart(times: Sequence[TimeToLoss], target: float) -> Chart:
    """The time to a loss against the number of ranks, a line for each global batch and learning rate.

    Args:
        times: Of the experiments; those that never got there are counted in the caption.
        target: The loss in nats per character.
    """
    import seaborn as sns

    title = f"Time to a held-out loss of {target:.4f} nats per character"
    reached = [time for time in times if time.seconds is not None]
    figure = _figure((7.2, 4.2))
    axes = figure.subplots()
    if reached:
        frame = _frame(reached)
        sns.lineplot(
            frame,
            x="ranks",
            y="seconds",
            hue="global batch",
            style="learning rate",
            palette=sns.color_palette("colorblind", frame["global batch"].nunique()),
            markers=True,
            markersize=9,
            ax=axes,
        )
        sns.move_legend(axes, "center left", bbox_to_anchor=(1, 0.5), frameon=False)
    else:
        _write(axes, "no experiment reached this loss")
    _style_times(axes, times, reached)
    axes.set_title(title)
    return Chart(name="time_to_loss", title=title, caption=_about_times(times), figure=figure)


def experiments_table(outcomes: Sequence[Outcome]) -> str:
    """An HTML table of the experiments, the lowest final loss first and failed ones last."""
    ended = sorted((outcome for outcome in outcomes if outcome.result), key=lambda outcome: outcome.standing)
    failed = [outcome for outcome in outcomes if not outcome.result]
    header = (
        *("ranks", "batch size per rank", "learning rate", "epochs"),
        *("final loss (nats)", "best loss (nats)", "time (s)", "remark"),
    )
    return "<h3>Experiments</h3>" + table(header, [_table_row(outcome) for outcome in (*ended, *failed)])


def times_table(times: Sequence[TimeToLoss]) -> str:
    """An HTML table of the times, equal global batches and learning rates next to each other."""
    ordered = sorted(times, key=lambda time: (time.global_batch, time.lr, time.ranks))
    header = ("global batch", "learning rate", "ranks", "batch size per rank", "time to loss (s)")
    return "<h3>Times</h3>" + table(
        header,
        [
            (f"{t.global_batch:,}", f"{t.lr:g}", t.ranks, f"{t.batch_size:,}", _seconds(t.seconds, "never"))
            for t in ordered
        ],
    )


def _panels(
    outcomes: Sequence[Outcome], curves: Sequence[Sequence[float]], baseline: float, *, title: str, x_label: str
) -> Figure:
    """A panel for each experiment: its losses over the x-values in `curves`, and those of the others in grey."""
    num_columns = _num_columns(outcomes)
    num_rows = -(-len(outcomes) // num_columns)
    figure = _figure((max(6.4, PANEL[0] * num_columns), 0.9 + PANEL[1] * num_rows))
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(outcomes):
            axes.remove()
            continue
        _draw_panel(axes, index, outcomes, curves, baseline)
        # The last panel of a column has the numbers, also where the last row is not full.
        axes.tick_params(labelbottom=index + num_columns >= len(outcomes))
    _limit_x(grid[0, 0], max((x[-1] for x in curves if x), default=1), is_epoch=x_label == EPOCH)
    figure.suptitle(title)
    figure.supxlabel(x_label, fontsize="medium")
    figure.supylabel(LOSS, fontsize="medium")
    return figure


def _draw_panel(
    axes: Axes, index: int, outcomes: Sequence[Outcome], curves: Sequence[Sequence[float]], baseline: float
) -> None:
    import seaborn as sns
    from matplotlib.ticker import MaxNLocator

    for other, x in zip(outcomes, curves, strict=True):
        axes.plot(x, other.losses, color="0.85", linewidth=1.2, zorder=1)
    axes.axhline(baseline, color="0.35", linestyle="--", linewidth=1, zorder=2)
    one, x = outcomes[index], curves[index]
    if one.result:
        color = sns.color_palette("colorblind")[_color_of(one, outcomes)]
        marker = "o" if len(x) <= MARKED_EPOCHS else ""
        sns.lineplot(x=x, y=one.losses, color=color, marker=marker, linewidth=2, zorder=3, ax=axes)
    else:
        _write(axes, "failed")
    title = one.experiment.label
    axes.set_title(title.replace(", ", "\n") if len(title) > MAX_TITLE else title, fontsize="small")
    axes.set(xlabel="", ylabel="")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(visible=True, alpha=0.3)


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure  # not pyplot, which keeps global state

    return Figure(figsize=size, layout="constrained")


def _num_columns(outcomes: Sequence[Outcome]) -> int:
    """One for each learning rate, or else for each batch size, so that a row shares the rest; or as many as fit."""
    num_rates = len({outcome.experiment.lr for outcome in outcomes})
    num_sizes = len({outcome.experiment.batch_size for outcome in outcomes})
    return next((n for n in (num_rates, num_sizes) if 2 <= n <= MAX_COLUMNS), min(MAX_COLUMNS, len(outcomes)))


def _limit_x(axes: Axes, last: float, *, is_epoch: bool) -> None:
    """Leave room for the first and the last point; whole epochs, and times from 0."""
    axes.set_xlim(*((0.6, last + 0.4) if is_epoch else (0, 1.05 * last)))


def _color_of(one: Outcome, outcomes: Sequence[Outcome]) -> int:
    """Equal batch sizes and ranks have the same colour; the palette has ten."""
    shapes = [(outcome.experiment.ranks, outcome.experiment.batch_size) for outcome in outcomes]
    return list(dict.fromkeys(shapes)).index((one.experiment.ranks, one.experiment.batch_size)) % 10


def _frame(times: Sequence[TimeToLoss]) -> Any:
    """The times as a pandas.DataFrame, with values as the legend shows them, in the order of their size."""
    import pandas as pd

    ordered = sorted(times, key=lambda time: (time.global_batch, time.lr, time.ranks))
    return pd.DataFrame(
        {
            "ranks": [time.ranks for time in ordered],
            "seconds": [time.seconds for time in ordered],
            "global batch": [f"{time.global_batch:,}" for time in ordered],
            "learning rate": [f"{time.lr:g}" for time in ordered],
        }
    )


def _style_times(axes: Axes, times: Sequence[TimeToLoss], reached: Sequence[TimeToLoss]) -> None:
    ranks = sorted({time.ranks for time in times})
    seconds = [time.seconds for time in reached if time.seconds is not None]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.minorticks_off()
    axes.set_xlim(ranks[0] / 1.3, ranks[-1] * 1.3)
    if seconds and max(seconds) > WIDE_RANGE * min(seconds):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(seconds, default=1))
    axes.set(xlabel="ranks (one per worker)", ylabel="training time to this loss (s)")
    axes.grid(visible=True, alpha=0.3)


def _write(axes: Axes, text: str) -> None:
    """Put a text where a curve would be."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", backgroundcolor="white")


def _about(baseline: float) -> str:
    return f"Dashed: a bigram model, {baseline:.4f} nats per character."


def _about_times(times: Sequence[TimeToLoss]) -> str:
    """How to read the chart, what has nothing to be compared with, and what is not on it."""
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
    """Such as `1 x 1,024 = 1,024; 16 x 4,096 = 65,536`: ranks, batch size per rank, global batch."""
    shapes = [f"{time.ranks} x {time.batch_size:,} = {time.global_batch:,}" for time in times]
    return "; ".join(dict.fromkeys(shapes))


def _table_row(outcome: Outcome) -> tuple[object, ...]:
    one = outcome.experiment
    named = (one.ranks, f"{one.batch_size:,}", f"{one.lr:g}", len(outcome.epochs))
    if not outcome.result:
        return (*named, "", "", "", f"failed: {outcome.failure}")
    losses = outcome.losses
    return (*named, f"{losses[-1]:.4f}", f"{min(losses):.4f}", _seconds(outcome.elapsed[-1]), "")


def _seconds(seconds: float | None, otherwise: str = "") -> str:
    return otherwise if seconds is None else f"{seconds:.1f}"
