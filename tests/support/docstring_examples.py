"""The examples in the docstrings of all public names."""

import contextlib
import doctest
import inspect
import re
from importlib import import_module
from typing import Any

PACKAGE = "flytekitplugins.daskpytorch"
MODULES = (
    "",
    ".data",
    ".dispatch",
    ".errors",
    ".lightning",
    ".preload",
    ".report",
    ".results",
    ".testing",
    ".transformers",
)
OF_FLYTE = {f"{PACKAGE}.{name}" for name in ("Scheduler", "WorkerGroup")}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_ONLY_FIRST_FAILURE


def public_names() -> dict[str, Any]:
    """All that users import, by the first of the modules that have it; and what `RankContext.checkpoint` is."""
    found = {f"{PACKAGE}.context.Checkpoint": import_module(f"{PACKAGE}.context").Checkpoint}
    for module in MODULES:
        loaded = import_module(PACKAGE + module)
        for name in loaded.__all__:
            value = getattr(loaded, name)
            if not any(value is other for other in found.values()):
                found[f"{PACKAGE}{module}.{name}"] = value
    return found


def examples() -> dict[str, doctest.DocTest]:
    """Those of each name, some perhaps empty; without a name whose docstring is of another project or none at all."""
    parser = doctest.DocTestParser()
    return {
        name: parser.get_doctest(inspect.getdoc(value) or "", {"__name__": "__main__"}, name, name, 0)
        for name, value in public_names().items()
        if name not in {*OF_FLYTE, f"{PACKAGE}.report.Tone"}
    }


def source_of(example: doctest.DocTest) -> str:
    """What it runs, as one text."""
    return "".join(each.source for each in example.examples)


def needs(example: doctest.DocTest) -> str | None:
    """What must be there before it runs: a `client` of a cluster, pictures in `s3`, or neither."""
    if "s3://pictures" in source_of(example):
        return "s3"
    return "client" if re.search(r"\bclient\b", source_of(example)) else None


def run(example: doctest.DocTest, **given: Any) -> str:
    """What it has found wrong."""
    example.globs.update(given)
    said: list[str] = []
    with contextlib.redirect_stdout(None):
        doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append)
    return "".join(said)
