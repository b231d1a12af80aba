"""Deck tabs of inputs and outputs, in place of flytekit's. Runs in the driver, and for outputs in rank 0.

The tabs are written from the existing values and literals. The tabs of flytekit itself read files a second time, show
secrets, and contain inputs as unescaped HTML.
"""

import logging
from collections.abc import Mapping
from typing import Any, get_args

from flytekit.deck.renderer import Renderable
from flytekit.models.literals import Literal

from flytekitplugins.daskpytorch import report

logger = logging.getLogger("flytekitplugins.daskpytorch")


def tab_of(values: Mapping[str, Any], types: Mapping[str, Any], literals: Mapping[str, Literal]) -> str:
    """Return the page of a task's inputs or outputs. If that fails, return a page with the error.

    Args:
        values: Values by name.
        types: Types of the task's interface, by name. The renderer of an `Annotated[..., renderer]` shows its value.
        literals: Flyte's literals of the values, by name. May be empty.
    """
    from flytekitplugins.daskpytorch.display.values import values_table

    try:
        addresses = {name: address for name in values if (address := _address(literals.get(name)))}
        ready = {name: html for name, value in values.items() if (html := _rendered(value, types.get(name)))}
        return report.page(values_table(values, addresses, ready))
    except Exception as error:  # any exception of a user's renderer or class
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
    """Return the HTML of the user's renderer in the task's signature. None: no renderer, or no value."""
    renderers = [each for each in get_args(type_)[1:] if isinstance(each, Renderable) and not isinstance(each, type)]
    return renderers[0].to_html(value) if renderers and value is not None else None
