"""Every public name has an example in its docstring, and the examples do what they say."""

import logging
from importlib import import_module
from pathlib import Path

import pytest

from docstring_examples import examples, needs, run
from flytekitplugins.daskpytorch.testing import one_rank  # noqa: F401 - a fixture

EXAMPLES = examples()


def test_every_public_name_has_one() -> None:
    assert [name for name, example in EXAMPLES.items() if not example.examples] == []


def test_they_are_run_here_or_where_there_is_a_cluster() -> None:
    assert {needs(example) for example in EXAMPLES.values()} == {None, "client", "s3"}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if needs(example) is None])
def test_it_does_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.CRITICAL, "flytekit")  # it complains of connections that earlier tests have left open
    if "transformers" in name:
        import_module("transformers.integrations.integration_utils")  # which prints of W&B being offline
    assert run(EXAMPLES[name]) == ""
