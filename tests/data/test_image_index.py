"""An index finds the pictures in a listing."""

import pytest

from flytekitplugins.daskpytorch.data.bucket import Listed
from flytekitplugins.daskpytorch.data.image_folder import ImageIndex


def index(*keys: str, prefix: str = "p", nested: bool = False) -> ImageIndex:
    return ImageIndex.of([Listed(key, 1, "e") for key in keys], "b", prefix, nested=nested)


def test_classes_are_the_folders_that_have_pictures(caplog: pytest.LogCaptureFixture) -> None:
    found = index(
        "p/",
        "p/cat/",
        "p/cat/1.JPG",
        "p/cat/2 ü.jpeg",
        "p/dog/",
        "p/dog/notes.txt",
        "p/dog/.hidden.jpg",
        "p/emu/3.png",
        "p/cover.jpg",
    )
    assert [file.key for file in found.files] == ["p/cat/1.JPG", "p/cat/2 ü.jpeg", "p/emu/3.png"]
    assert found.classes == ["cat", "emu"]
    assert found.targets == [0, 0, 1]
    assert "s3://b/p/: left out 2 x file that is no picture by its name, such as p/dog/notes.txt" in caplog.text
    assert "left out 1 x picture in no class's folder, such as p/cover.jpg" in caplog.text
    assert "marker" not in caplog.text


@pytest.mark.parametrize("prefix", ["", "/", "p", "/p/", "p/q/"])
def test_prefixes_may_have_slashes_around_them(prefix: str) -> None:
    folder = f"{prefix.strip('/')}/".lstrip("/")
    assert index(f"{folder}cat/1.jpg", prefix=prefix).classes == ["cat"]


def test_parts_of_the_data_are_not_taken_for_classes() -> None:
    keys = ["p/train/cat/1.jpg", "p/val/cat/2.jpg"]
    with pytest.raises(ValueError, match=r"s3://b/p/ has 2 pictures .* name it: s3://b/p/train\. .* nested=True"):
        index(*keys)
    assert index(*keys, nested=True).classes == ["train", "val"]


def test_a_folder_without_pictures_is_an_error_that_says_what_is_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"Looked for s3://b/p/CLASS/PICTURE .* no object whose key"):
        index()
    with pytest.raises(FileNotFoundError, match=r"2 x file that is no picture by its name \(such as p/cat/a.txt\)"):
        index("p/cat/a.txt", "p/cat/b.csv")
