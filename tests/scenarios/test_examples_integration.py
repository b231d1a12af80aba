"""The docstring examples that need a cluster, or pictures in a bucket, do what they say."""

import io
from collections.abc import Iterator
from pathlib import Path

import distributed
import pytest
from PIL import Image

from docstring_examples import examples, needs, run
from seaweed import Weed

EXAMPLES = examples()


def photo() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "navy").save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(scope="module")
def pictures(weed: Weed) -> Iterator[None]:
    """Four dogs of two breeds; and the same with one that is broken."""
    dogs = {f"dogs/{breed}/{number}.jpg": photo() for breed in ("beagle", "collie") for number in range(4)}
    with_broken = {f"with-a-broken-one/{key.removeprefix('dogs/')}": picture for key, picture in dogs.items()}
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
