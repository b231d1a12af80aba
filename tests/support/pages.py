"""The README and the pages of docs/, whose blocks of code the tests run."""

import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import distributed
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text()
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
}


def blocks(language: str, *pages: str) -> list[str]:
    """The fenced blocks of a language: of these pages, or of all."""
    text = "\n".join(PAGES[page] for page in pages or PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def block(mark: str, language: str = "python") -> str:
    """The one block with these words; where it stands on several pages, it is the same on each."""
    found = {each for each in blocks(language) if mark in each}
    assert len(found) == 1, f"{len(found)} different blocks have {mark!r}"
    return found.pop()


def command(pattern: str) -> str:
    """The one line of the pages' shell commands that matches."""
    found = {line for each in blocks("bash") for line in each.splitlines() if re.fullmatch(pattern, line)}
    assert len(found) == 1, found
    return found.pop()


def imported(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A program as a module of this process, whose Dask workers are threads: all gangs have one fork server."""
    import_module("flytekitplugins.daskpytorch.dispatch")  # needs the class itself
    here = {"processes": False, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    monkeypatch.setattr(distributed, "Client", partial(distributed.Client, **here))
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    module = import_module(name)
    del sys.modules[name]
    monkeypatch.setitem(sys.modules, name, module)  # until the test's end
    return module


def run_as_script(module: ModuleType) -> None:
    """Run what the program does as a script."""
    source = Path(str(module.__file__)).read_text()
    block = source.partition('if __name__ == "__main__":\n')[2]
    exec(compile("if True:\n    pass\n" + block, str(module.__file__), "exec"), vars(module))
