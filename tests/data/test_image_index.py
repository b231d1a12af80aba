"""An index finds the pictures in a listing. Their cache returns complete files of the current version, up to a size."""

import os
import textwrap
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch.data.bucket import Listed
from flytekitplugins.daskpytorch.data.image_index import ImageCache, ImageIndex
from others import give_away
from warm import warm_python


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


def test_an_index_survives_its_file(tmp_path: Path) -> None:
    found = index("p/cat/1.jpg", "p/dog/ü.png")
    found.save(tmp_path / "index.json")
    assert ImageIndex.load(tmp_path / "index.json") == found
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"files": []}', '{"version": 2, "files": []}', "\x00"])
def test_another_file_is_no_index(tmp_path: Path, content: str) -> None:
    path = tmp_path / "index.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"index.json is not an index of a folder of pictures \(.*Delete the file"):
        ImageIndex.load(path)


def test_other_users_may_read_a_saved_index_if_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        index("p/cat/1.jpg").save(tmp_path / "index.json")
    finally:
        os.umask(before)
    [file] = tmp_path.iterdir()  # and no unfinished one
    assert file.stat().st_mode & 0o777 == 0o644


# ---- Cache


BODY = b"picture" * 100


def listed(number: int = 0, etag: str = "e") -> Listed:
    return Listed(f"cat/{number}.jpg", len(BODY), etag)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_what_was_put_is_there_for_others(tmp_path: Path) -> None:
    ImageCache(tmp_path, 10**6).put("b", listed(), BODY)
    cache = ImageCache(tmp_path, 10**6)
    assert cache.get("b", listed()) == BODY
    assert cache.get("b", listed(etag="newer")) is None
    assert cache.get("other", listed()) is None


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_not_given(tmp_path: Path, damage: str) -> None:
    cache = ImageCache(tmp_path, 10**6)
    cache.put("b", listed(), BODY)
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-50], "changed": b"x" + content[1:], "empty": b""}[damage])
    assert cache.get("b", listed()) is None
    cache.put("b", listed(), BODY)
    assert cache.get("b", listed()) == BODY


def test_what_was_used_longest_ago_goes_first_and_other_files_stay(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path, 20_000)
    mine = [tmp_path / "photos" / ("f" * 64), cache._path("b", listed()).with_name("thesis.tex")]
    for file in mine:
        file.parent.mkdir()
        file.write_text("x" * 50_000)
        os.utime(file, (0, 0))
    for number in range(100):
        cache.put("b", listed(number), BODY)
        os.utime(cache._path("b", listed(number)), (number, number))  # as if a second lay between them
        assert size(tmp_path) - 100_000 <= 20_000 * 1.04 + len(BODY)
    kept = [number for number in range(100) if cache.get("b", listed(number)) is not None]
    assert kept == list(range(kept[0], 100))
    assert len(kept) > 20
    assert all(file.exists() for file in mine)


def test_an_unfinished_file_goes_once_its_writer_must_have_ended(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path, 5_000)
    cache.put("b", listed(), BODY)
    shelf = cache._path("b", listed()).parent
    young, old = (shelf / f".{letter * 64}-tmp" for letter in "ab")
    young.write_bytes(b"x" * 1_000)
    old.write_bytes(b"x" * 2_500)  # more than the cache has to free
    os.utime(old, (0, 0))
    for number in range(5):
        cache.put("b", listed(number), BODY)
    assert (young.exists(), old.exists()) == (True, False)


@pytest.mark.parametrize("who", ["owns", "can write to"])
def test_a_folder_of_another_user_is_refused_by_its_path(tmp_path: Path, who: str) -> None:
    ImageCache(tmp_path, 10**6).put("b", listed(), BODY)
    give_away(tmp_path / "daskpytorch-images", who)
    with pytest.raises(PermissionError, match=str(tmp_path / "daskpytorch-images")):
        ImageCache(tmp_path, 10**6)


def test_all_folders_of_the_cache_are_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ImageCache(tmp_path / "ssd" / "cache", 10**6).put("b", listed(), BODY)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_dir()} == {0o700}


def test_processes_that_write_at_once_keep_the_bound_and_whole_files(tmp_path: Path) -> None:
    code = """
        import sys
        from flytekitplugins.daskpytorch.data.image_index import ImageCache
        from flytekitplugins.daskpytorch.data.bucket import Listed
        cache = ImageCache(sys.argv[1], 50_000)
        for number in range(1_500):
            item = Listed(f"{number % 200}", 700, "e")
            body = b"%d" % (number % 10) * 700
            found = cache.get("b", item)
            assert found in (None, body), found
            if found is None:
                cache.put("b", item, body)
    """
    command, folder = ["-c", textwrap.dedent(code), tmp_path / "cache"], tmp_path / "cache"
    with (tmp_path / "said").open("w+") as said:
        writers = [warm_python().start(command, cwd=tmp_path, env=os.environ, stderr=said) for _ in range(3)]
        codes = [writer.wait() for writer in writers]
        said.seek(0)
        assert (codes, said.read()) == ([0] * 3, "")
    assert 0 < size(folder) <= 50_000 * 1.1


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ImageCache(tmp_path, 10**6)
    cache._path("b", listed()).parent.write_text("a file where a folder should be")
    cache.put("b", listed(), BODY)
    assert cache.get("b", listed()) is None
    assert "cannot be written" in caplog.text
