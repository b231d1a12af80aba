"""Copies of shards on the node's disk: the reads that they serve, and their removal."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch.process.folders import make_private
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint, Sharding
from flytekitplugins.daskpytorch.rank.shard_copies import OWN_FOLDER, ShardCopies
from others import give_away
from shards import Rank
from test_sharded import assert_is, do_harm, state


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return tmp_path / "stored"


def files_in(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if not path.is_dir())


def test_who_starts_again_on_the_node_reads_the_copies(stored: Path, cache: Path) -> None:
    entry = Rank(stored, cache=cache).save(state(2.0), 1)
    do_harm(entry, "changed")  # so that what is there now was not read there
    content = state()
    assert Rank(stored, [entry], attempt=1, cache=cache).checkpoints.load(content) == 1
    assert_is(content, 2.0)


def flip(copy: Path) -> None:
    copy.write_bytes(bytes(byte ^ 1 for byte in copy.read_bytes()))


def shorten(copy: Path) -> None:
    copy.write_bytes(copy.read_bytes()[:10])


@pytest.mark.parametrize("harm", [Path.unlink, flip, shorten])
def test_what_is_not_whole_here_comes_from_storage(stored: Path, cache: Path, harm: Callable[[Path], None]) -> None:
    entry = Rank(stored, cache=cache).save(state(2.0), 1)
    for copy in files_in(cache):
        harm(copy)
    content = state()
    assert Rank(stored, [entry], cache=cache).checkpoints.load(content) == 1
    assert_is(content, 2.0)


def test_a_copy_of_what_storage_has_lost_is_no_checkpoint(
    stored: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(stored, cache=cache)
    before, entry = rank.save(state(1.0), 1), rank.save(state(2.0), 2)
    do_harm(entry, "removed")
    assert Rank(stored, [entry, before], cache=cache).checkpoints.load(state()) == 1
    assert "step 2" in capsys.readouterr().err


def test_the_newest_is_all_that_stays_and_goes_with_the_gang(stored: Path, cache: Path) -> None:
    rank = Rank(stored, cache=cache)
    for step in (1, 2, 3):
        rank.save(state(), step)
    assert {path.parent.parent.name for path in files_in(cache)} == {"step-3"}
    restarted = Rank(stored, attempt=1, cache=cache)
    restarted.save(state(), 3)
    assert {path.parent.name.split("-")[0] for path in files_in(cache)} == {"1"}
    restarted.checkpoints.close()
    assert files_in(cache)
    make_private(cache / OWN_FOLDER / "step-2")  # a rank was killed before it made the folder of its save
    restarted.checkpoints.drop_copies()
    assert list(cache.iterdir()) == []


def test_copies_of_the_driver_before_are_read_and_go_with_the_first_new_ones(stored: Path, cache: Path) -> None:
    entry = Rank(stored, cache=cache, nonce="before").save(state(2.0), 1)
    other = Rank(stored, cache=cache, nonce="other").save(state(5.0), 1)
    do_harm(entry, "changed")
    rank, content = Rank(stored, [entry], cache=cache), state()
    assert rank.checkpoints.load(content) == 1
    assert_is(content, 2.0)
    new = rank.save(state(3.0), 2)
    assert folders_in(cache) == {Path(kept.uri).name for kept in (other, new)}


def test_all_ranks_of_a_node_clear_it_at_the_same_time(cache: Path) -> None:
    copies = ShardCopies(Sharding(base="s3://there", nonce="nonce", cache=str(cache)), 0)
    for step in range(300):
        copies.write(f"s3://there/step-{step}/0-{step}-nonce/__0_0.distcp", [lambda file: file.write(b"shard")])
    with ThreadPoolExecutor(4) as pool:
        for cleared in [pool.submit(copies.clear) for _ in range(4)]:
            cleared.result()
    assert list(cache.iterdir()) == []


def folders_in(cache: Path) -> set[str]:
    return {path.parent.name for path in files_in(cache)}


def test_where_no_copy_can_be_made_a_line_says_so(
    stored: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("a file, where a folder should be")
    assert_all_is_stored(stored, cache)
    told = capsys.readouterr().err
    assert told.count("\n") == 2  # of the rank that writes, and of that which reads
    assert f"rank 0 cannot keep copies of its shards in Gang(shard_cache='{cache}')" in told


def test_a_disk_that_is_full_gets_its_space_back(stored: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = cache / OWN_FOLDER / "step-1" / "0-0-nonce" / "__0_0.distcp"
    make_private(copy.parent)
    copy.symlink_to("/dev/full")
    assert_all_is_stored(stored, cache)
    assert "No space left on device" in capsys.readouterr().err
    assert files_in(cache) == []


def assert_all_is_stored(stored: Path, cache: Path) -> None:
    entry: ShardedCheckpoint = Rank(stored, cache=cache).save(state(2.0), 1)
    content = state()
    assert Rank(stored, [entry], cache=cache).checkpoints.load(content) == 1
    assert_is(content, 2.0)


def test_what_the_user_keeps_in_the_folder_of_copies_stays(stored: Path, cache: Path) -> None:
    entry = Rank(stored, cache=cache, nonce="before").save(state(2.0), 1)
    mine = cache / Path(entry.uri).parent.name / Path(entry.uri).name / "notes.txt"
    others = cache / OWN_FOLDER / "runs" / "best" / "notes.txt"
    for notes in (mine, others):
        make_private(notes.parent)
        notes.write_text("mine")
    foreign = replace(entry, uri=f"{stored}/runs/best")
    rank = Rank(stored, [entry, foreign], cache=cache)
    rank.save(state(3.0), 2)
    rank.checkpoints.drop_copies()
    assert files_in(cache) == [others, mine] or files_in(cache) == [mine, others]


@pytest.mark.parametrize("who", ["owns", "can write to"])
def test_copies_in_a_folder_of_another_user_are_not_read(
    stored: Path, cache: Path, capsys: pytest.CaptureFixture[str], who: str
) -> None:
    entry = Rank(stored, cache=cache).save(state(2.0), 1)
    give_away(cache / OWN_FOLDER, who)
    do_harm(entry, "changed")  # so that copies that are read would show
    with pytest.raises(OSError, match="are damaged, and reading them has changed the state"):
        Rank(stored, [entry], cache=cache).checkpoints.load(state())
    assert str(cache / OWN_FOLDER) in capsys.readouterr().err
