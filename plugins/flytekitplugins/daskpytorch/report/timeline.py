"""A timeline: spans of time on a line, events above the line, and all events as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from flytekitplugins.daskpytorch.process.streams import one_line
from flytekitplugins.daskpytorch.report.pieces import Tone, cells_table, element, text_of, whole

MAX_EVENTS = 300
"""Maximum number of events that a timeline shows: if there are more, the first 150 and the last 150."""
MAX_TEXT = 300
"""Maximum number of characters of an event's text that are shown."""
MAX_DETAIL = 1_000
"""Maximum number of characters of an event's detail that are shown, from its end."""
MAX_SPANS = 400
NUM_TICKS = 5
NARROW = 4.0
"""Minimum width, in percent of the timeline, of a span that is drawn with its name."""
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a timeline: a text at a point in time.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> event = report.Event(time=62.0, text="rank 1 was killed", detail="SIGKILL", tone="bad")
        >>> html = report.timeline([report.Span(start=0.0, end=60.0, text="training")], [event])
    """

    time: float
    """Time in seconds, on the same clock as all events and spans."""
    text: str
    """Description of the event, in one line."""
    detail: str = ""
    """Details in one or more lines. Of long details, the end is shown."""
    tone: Tone = "idle"
    """Colour of the event."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span of a timeline: a named phase with a start and an end.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> spans = [
        ...     report.Span(start=0.0, end=4.0, text="starting", tone="warn"),
        ...     report.Span(start=4.0, end=60.0, text="training", tone="good"),
        ... ]
        >>> html = report.timeline(spans)
    """

    start: float
    """Start in seconds, on the same clock as all events and spans."""
    end: float
    """End in seconds, on the same clock."""
    text: str
    """Name of the span, in a word or two."""
    tone: Tone = "idle"
    """Colour of the span."""


def timeline(spans: Sequence[Span], events: Sequence[Event] = ()) -> str:
    """Return a timeline as HTML, with spans on a line, events above the line, and the events as a table.

    Args:
        spans: Spans in the order of time, without overlap.
        events: Events in the order of time.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> spans = [report.Span(start=0.0, end=60.0, text="training", tone="good")]
        >>> html = report.timeline(spans, [report.Event(time=30.0, text="epoch 1 is over")])
    """
    times = [*(time for span in spans for time in (span.start, span.end)), *(event.time for event in events)]
    start = min(times, default=0.0)
    length = max(max(times, default=0.0) - start, 1e-3)
    line = "".join(_drawn(span, start, length) for span in spans[-MAX_SPANS:])
    marks = "".join(_mark(event, start, length) for event in _ends(events))
    ticks = "".join(element("span", duration(length * i / (NUM_TICKS - 1))) for i in range(NUM_TICKS))
    words = "; ".join(f"{span.text} {duration(span.end - span.start)}" for span in spans[-MAX_SPANS:])
    content = (
        element("div", marks, "dpt-marks", aria_hidden="true")
        + element("div", line, "dpt-track", role="img", aria_label=f"timeline of {duration(length)}: {words}")
        + element("div", ticks, "dpt-ticks", aria_hidden="true")
        + _events(events, start)
    )
    return whole(element("div", content, "dpt-card"))


def duration(seconds: float) -> str:
    """Return seconds as a text, such as `0.25 s`, `3 min 20 s`, `2 h 5 min`, `3.2 days`.

    Examples:
        >>> from flytekitplugins.daskpytorch import report
        >>> report.duration(200)
        '3 min 20 s'
    """
    if seconds < MINUTE:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.2g} s"
    whole_seconds = round(seconds)
    if seconds < HOUR:
        return (
            f"{whole_seconds // 60} min {whole_seconds % 60} s" if whole_seconds % 60 else f"{whole_seconds // 60} min"
        )
    if seconds < DAY:
        return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60} min"
    return f"{seconds / DAY:,.1f} days"


def _drawn(span: Span, start: float, length: float) -> str:
    left, width = 100 * (span.start - start) / length, 100 * (span.end - span.start) / length
    class_ = f"dpt-{span.tone}" + (" dpt-narrow" if width < NARROW else "")
    title = f"{span.text}: {duration(span.end - span.start)}"
    return element("span", text_of(span.text), class_, title=title, style=f"left:{left:.3f}%;width:{width:.3f}%")


def _mark(event: Event, start: float, length: float) -> str:
    left = 100 * (event.time - start) / length
    title = f"{duration(event.time - start)}: {one_line(event.text, MAX_TEXT)}"
    return element("span", "", f"dpt-{event.tone}", title=title, style=f"left:{left:.3f}%")


def _events(events: Sequence[Event], start: float) -> str:
    rows = [
        [
            "+" + duration(event.time - start),
            element("span", "", f"dpt-dot dpt-{event.tone}", aria_hidden="true")
            + text_of(one_line(event.text, MAX_TEXT))
            + (element("span", text_of(_end_of(event.detail)), "dpt-soft") if event.detail else ""),
        ]
        for event in _ends(events)
    ]
    if (left_out := len(events) - len(rows)) > 0:
        rows.insert(MAX_EVENTS // 2, ["", f"… {left_out:,} more …"])
    return cells_table(["after", "what happened"], rows, "dpt-events") if rows else ""


def _end_of(detail: str) -> str:
    """Return the last whole lines of a long detail, and the last characters of a single long line."""
    if len(detail) <= MAX_DETAIL:
        return detail
    _, _, rest = detail[-MAX_DETAIL:].partition("\n")
    return f"…\n{rest}" if rest else f"…{detail[-MAX_DETAIL:]}"


def _ends(events: Sequence[Event]) -> Sequence[Event]:
    if len(events) <= MAX_EVENTS:
        return events
    return [*events[: MAX_EVENTS // 2], *events[-MAX_EVENTS // 2 :]]
