"""Any records that ranks may log, also such as nobody would expect: strategies for Hypothesis."""

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from flytekitplugins.daskpytorch.records import LogRecord

ODD_NUMBERS = [math.nan, 1e308, 5e-324, -5e-324, math.inf, -math.inf, -0.0, True, -1]
STEPS = st.integers(-(2**63) + 1, 2**63 - 1) | st.integers(-3, 10)


def records(odd_names: Sequence[str]) -> st.SearchStrategy[LogRecord]:
    """Of two ranks; their metrics have usual names, these, or any."""
    names = st.sampled_from(["loss", "epoch", "held_out_loss", "samples_per_second", *odd_names]) | st.text()
    numbers = st.floats() | st.integers() | st.booleans() | st.sampled_from(ODD_NUMBERS)
    return st.builds(
        LogRecord,
        rank=st.integers(0, 1),
        step=STEPS,
        num_steps=st.none() | STEPS,
        time=st.floats(),
        metrics=st.dictionaries(names, numbers | st.text() | st.just("x" * 100_000), max_size=4),
    )
