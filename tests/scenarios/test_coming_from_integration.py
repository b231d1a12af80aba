"""The code blocks of docs/coming_from.md run in a gang."""

import json
import re
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import distributed
import pytest

from flytekitplugins.daskpytorch.node import fork_client
from pages import REPOSITORY
from processes import nothing_left_behind

PAGE = (REPOSITORY / "docs" / "coming_from.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}


def program(title: str) -> str:
    """A section's program after what its block says."""
    [block] = re.findall(r"^```diff\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)
    lines = block.splitlines()
    assert all(line[:1] in ("-", "+", " ") for line in lines)
    return "\n".join(line[1:] for line in lines if line[0] != "-") + "\n"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers in this process, so that all gangs have one fork server."""
    with nothing_left_behind():
        fork_client.shutdown()
        monkeypatch.setattr(fork_client, "_imported_ahead", ["torch._dynamo"])  # once, and not by each optimizer
        import_module("flytekitplugins.daskpytorch.dispatch")  # needs the class itself
        in_process = partial(distributed.Client, processes=False, dashboard_address=None)
        monkeypatch.setattr(distributed, "Client", in_process)
        yield
        fork_client.shutdown()


def changed(title: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program afterwards, imported."""
    (folder / f"{name}.py").write_text(program(title))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    return import_module(name)


def as_script(module: ModuleType) -> Any:
    """Run what the program does as a script."""
    source = Path(str(module.__file__)).read_text()
    block = source.partition('if __name__ == "__main__":\n')[2]
    exec(compile("if True:\n" + block, str(module.__file__), "exec"), vars(module))


@pytest.mark.usefixtures("here")
def test_what_they_make_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elastic = changed("kfpytorch's Elastic", "from_elastic", tmp_path, monkeypatch)
    assert elastic.train(learning_rate=0.1) == 3.0  # 1 + 2: only two ranks of one gang have it
    capsys.readouterr()
    as_script(changed("Ray Train", "from_ray", tmp_path, monkeypatch))
    assert capsys.readouterr().out == "[4, 4]\n"  # of 8 batches, each rank sees half
    as_script(changed("dask-pytorch-ddp", "from_dask_pytorch_ddp", tmp_path, monkeypatch))
    files = [tmp_path / "results" / f"rank-{rank}" / f"epoch-{epoch}.json" for rank in range(2) for epoch in range(2)]
    assert [json.loads(file.read_text()) for file in files] == [{"epoch": 0, "ranks": 2}, {"epoch": 1, "ranks": 2}] * 2
