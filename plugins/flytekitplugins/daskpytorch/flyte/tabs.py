"""A Deck's tabs of inputs and outputs, in place of flytekit's. Runs in the driver, and for outputs in rank 0.

The tabs are written from the values and literals that are there. flytekit's own read files a second time, show secrets
and have inputs as live HTML.
"""

import logging
from collections.abc import Mapping
from typing import Any, get_args

from flytekit.deck.renderer import Renderable
from flytekit.models.literals import Literal

from flytekitplugins.daskpytorch import report

logger = logging.getLogger("flytekitplugins.daskpytorch")


def tab_of(values: Mapping[str, Any], types: Mapping[str, Any], literals: Mapping[str, Literal]) -> str:
    """Return the page of a task's inputs or outputs; where the page cannot be written, a page that says so.

    Args:
        values: By their names.
        types: Of the task's interface. `Annotated[..., renderer]` is shown as its renderer has it.
        literals: As Flyte has the values; perhaps none.
    """
    from flytekitplugins.daskpytorch.display.values import values_table

    try:
        addresses = {name: address for name in values if (address := _address(literals.get(name)))}
        ready = {name: html for name, value in values.items() if (html := _rendered(value, types.get(name)))}
        return report.page(values_table(values, addresses, ready))
    except Exception as error:  # whatever a user's own renderer or class raises
        logger.warning("a tab of the Deck could not be written; the task's outcome stands", exc_info=error)
        return report.page(report.alert("This tab could not be written", f"{type(error).__name__}: {error}"))


def _address(literal: Literal | None) -> str | None:
    scalar = literal.scalar if literal is not None else None
    if scalar is not None and scalar.union is not None:
        return _address(scalar.union.value)
    for each in (scalar.blob, scalar.structured_dataset, scalar.schema) if scalar is not None else ():
        if each is not None:
            return str(each.uri)
    return None


def _rendered(value: Any, type_: Any) -> str | None:
    """Return what the user's own renderer makes of the value, where the task's signature has one."""
    renderers = [each for each in get_args(type_)[1:] if isinstance(each, Renderable) and not isinstance(each, type)]
    return renderers[0].to_html(value) if renderers and value is not None else None
