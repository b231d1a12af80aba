"""Every public name has an example in its docstring, `help` has all its fields, and the examples do what they say."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
from importlib import import_module
from pathlib import Path

import pytest

from docstring_examples import examples, needs, public_names, run
from flytekitplugins.daskpytorch.testing import one_rank  # noqa: F401

EXAMPLES = examples()


def test_every_public_name_has_one() -> None:
    assert [name for name, example in EXAMPLES.items() if not example.examples] == []


def test_they_are_run_here_or_where_there_is_a_cluster() -> None:
    assert {needs(example) for example in EXAMPLES.values()} == {None, "client", "s3"}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if needs(example) is None])
def test_it_does_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "transformers" in name:
        import_module("transformers.integrations.integration_utils")  # which prints of W&B being offline
    assert run(EXAMPLES[name]) == ""


def test_help_says_what_all_fields_of_dataclasses_are() -> None:
    silent = [
        f"{name}.{field.name}"
        for name, value in public_names().items()
        if dataclasses.is_dataclass(value) and not name.endswith((".Scheduler", ".WorkerGroup"))
        for field in dataclasses.fields(value)
        if field.repr
        and not field.name.startswith("_")
        and f"\n    {field.name}: " not in (inspect.getdoc(value) or "")
    ]
    assert silent == []


def test_help_reads_well() -> None:
    shown = pydoc.plain(pydoc.render_doc(public_names()["flytekitplugins.daskpytorch.Keep"]))
    assert (
        "Attributes:\n |      last: The newest ones: that, and those before it should it turn out to be damaged."
        in shown
    )
    assert shown.index("Attributes:") < shown.index("Raises:") < shown.index("Examples:")
