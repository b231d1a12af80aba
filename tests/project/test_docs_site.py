"""The documentation's site contains all public names, and loads nothing from any network."""

import dataclasses
import re
from importlib import import_module
from pathlib import Path

import pytest

from docstring_examples import MODULES, OF_FLYTE, PACKAGE
from docstring_examples import public_names as named_objects
from pages import PAGES, REPOSITORY

REFERENCE = {name: text for name, text in PAGES.items() if name.startswith("docs/reference/")}


def public_names() -> set[str]:
    """Of all modules that users import; errors of gangs are documented where they are written."""
    found = set()
    for module in MODULES:
        for name in import_module(PACKAGE + module).__all__:
            home = f"{PACKAGE}.errors" if f"{PACKAGE}.{name}" in _ERRORS else PACKAGE + module
            found.add(f"{home}.{name}")
    return found


_ERRORS = {f"{PACKAGE}.{name}" for name in import_module(f"{PACKAGE}.errors").__all__}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with warnings as errors: a link, an anchor or a name that is not there."""
    build = pytest.importorskip("mkdocs.commands.build").build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("docs") / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        build(load_config("mkdocs.yml", strict=True, site_dir=str(folder)))
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    there = {name for name in public_names() - OF_FLYTE if f'id="{name}"' in pages}
    assert public_names() - OF_FLYTE == there
    assert all(f"`{name.rpartition('.')[2]}`" in REFERENCE["docs/reference/tasks.md"] for name in OF_FLYTE)


def test_what_a_function_returns_is_one_value_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "dispatch.html").read_text()
    returns = [part.partition("</ul>")[0] for part in page.split("Returns:</span>")[1:]]
    assert len(returns) >= 2
    assert [part.count("<li") for part in returns] == [1] * len(returns)


def test_every_field_of_a_public_record_has_a_docstring() -> None:
    package = pytest.importorskip("griffe").load(PACKAGE, search_paths=[REPOSITORY / "plugins"])
    records = {value for value in named_objects().values() if dataclasses.is_dataclass(value)}
    fields = {(record, field.name) for record in records for field in dataclasses.fields(record) if field.repr}
    silent = []
    for record, name in fields:
        owner = next(each for each in record.__mro__ if name in vars(each).get("__annotations__", ()))
        written = f"{owner.__module__}.{owner.__qualname__}.{name}".removeprefix(f"{PACKAGE}.")
        if owner.__module__.startswith(PACKAGE) and not name.startswith("_") and not package[written].docstring:
            silent.append(f"{owner.__name__}.{name}")
    assert len(records) > 20
    assert silent == []


def test_every_error_has_its_cause_and_remedy() -> None:
    names = {name.rpartition(".")[2] for name in public_names() if name.endswith("Error")}
    table = REFERENCE["docs/reference/errors.md"]
    rows = re.findall(r"^\| `(?:\w+\.)?(\w+Error)` \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    assert {name for name, _, _ in rows} == names


def test_what_is_named_for_changes_is_there() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", PAGES["docs/changing.md"], re.MULTILINE)[1:]
    plugin = REPOSITORY / "plugins/flytekitplugins/daskpytorch"
    assert len(rows) >= 12
    for wish, files, tests in rows:
        named, to_run = re.findall(r"`([\w/]+(?:\.\w+|/))`", files), re.findall(r"`(tests/\w+/test_\w+\.py)`", tests)
        assert named, wish
        assert to_run, wish
        roots = [(plugin if (plugin / path).exists() else REPOSITORY) / path for path in (*named, *to_run)]
        assert [path for path in roots if not path.exists()] == []


def test_every_variable_is_documented_and_none_else() -> None:
    folders = ("plugins/flytekitplugins", "plugins/flyteplugins", "workflows", "tasks")
    sources = "".join(path.read_text() for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))
    read = set(re.findall(r"\bDASKPYTORCH_[A-Z]+(?:_[A-Z]+)*\b", sources))
    assert set(re.findall(r"^\| `(DASKPYTORCH_\w+)`", REFERENCE["docs/reference/variables.md"], re.MULTILINE)) == read


def test_pages_ask_nothing_of_a_network(site: Path) -> None:
    loaded = r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc="?(?:https?:)?//|<link\b[^>]*\bhref="?(?:https?:)?//"""
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(REFERENCE)
    assert [path.name for path in pages if re.search(loaded, path.read_text())] == []
    assert [path.name for path in site.rglob("*.css") if re.search(r"url\(\W?(?:https?:)?//", path.read_text())] == []
