"""Examples do what they say: docstrings that need a cluster or a bucket, and the programs of docs/coming_from.md."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import distributed
import pytest
from PIL import Image

from docstring_examples import examples, needs, run
from jpegs import encoded
from pages import REPOSITORY, imported, run_as_script
from seaweed import Weed

# ---- Docstrings


EXAMPLES = examples()


@pytest.fixture(scope="module")
def pictures(weed: Weed) -> Iterator[None]:
    """Four dogs of two breeds; and the same with one that is broken."""
    picture = encoded(Image.new("RGB", (40, 30), "navy"))
    dogs = {f"dogs/{breed}/{number}.jpg": picture for breed in ("beagle", "collie") for number in range(4)}
    with_broken = {f"with-a-broken-one/{key.removeprefix('dogs/')}": picture for key in dogs}
    weed.put_all("pictures", {**dogs, **with_broken, "with-a-broken-one/beagle/broken.jpg": b"no picture"})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in weed.env().items():
            patch.setenv(name, value)
        yield


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if needs(example) == "s3"])
def test_it_reads_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(EXAMPLES[name]) == ""


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if needs(example) == "client"])
def test_it_does_what_it_says(
    name: str, client: distributed.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distributed, "Client", lambda **_: client)  # in place of a cluster of the example's own
    assert run(EXAMPLES[name], client=client) == ""


# ---- docs/coming_from.md


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
