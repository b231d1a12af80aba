"""The picture cache returns complete files of the current version, and stays below its size."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch.data.bucket import Listed
from flytekitplugins.daskpytorch.data.image_index import ImageCache
from others import give_away
from warm import warm_python

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
