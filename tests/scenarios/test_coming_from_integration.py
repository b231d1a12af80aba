"""The code blocks of docs/coming_from.md run in a gang."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from pages import REPOSITORY, imported, run_as_script

PAGE = (REPOSITORY / "docs" / "coming_from.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}


def program(title: str) -> str:
    """A section's program after what its block says."""
    [block] = re.findall(r"^```diff\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)
    lines = block.splitlines()
    assert all(line[:1] in ("-", "+", " ") for line in lines)
    return "\n".join(line[1:] for line in lines if line[0] != "-") + "\n"


@pytest.mark.usefixtures("one_fork_server")
def test_what_they_make_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(title: str) -> ModuleType:
        """The program afterwards."""
        name = re.sub(r"\W", "_", title)
        return imported(f"from_{name}", program(title), tmp_path, monkeypatch)

    elastic = changed("kfpytorch's Elastic")
    assert elastic.train(learning_rate=0.1) == 3.0  # 1 + 2: only two ranks of one gang have it
    capsys.readouterr()
    run_as_script(changed("Ray Train"))
    assert capsys.readouterr().out == "[4, 4]\n"  # of 8 batches, each rank sees half
    run_as_script(changed("dask-pytorch-ddp"))
    files = [tmp_path / "results" / f"rank-{rank}" / f"epoch-{epoch}.json" for rank in range(2) for epoch in range(2)]
    assert [json.loads(file.read_text()) for file in files] == [{"epoch": 0, "ranks": 2}, {"epoch": 1, "ranks": 2}] * 2
