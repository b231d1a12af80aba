"""Obstore and s3fs write and read the same shards. s3fs takes over whatever obstore cannot do."""

import functools
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from s3fs import S3FileSystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from flytekitplugins.daskpytorch.rank import quick_s3
from flytekitplugins.daskpytorch.rank.quick_s3 import quick_files
from flytekitplugins.daskpytorch.rank.shard_writer import ShardWriter, _Stream
from seaweed import READER, Weed
from sharded_rank import Rank

MIB = 1 << 20


@pytest.fixture
def files(s3: str) -> S3FileSystem:
    quick_s3._opened.cache_clear()
    return S3FileSystem()  # also where Flyte 2 has put its own file system in its place


def quick_of(files: Any) -> Any:
    quick = quick_files(files, "s3://tests/")
    assert quick is not None
    return quick


def test_what_is_written_is_what_was_there_when_it_was_handed_over(files: S3FileSystem) -> None:
    memory, handed = bytearray(3 * MIB), b""
    with quick_of(files).open("s3://tests/folder/object", "wb") as file:
        stream = _Stream(file)
        for number in range(9):  # more than two blocks
            memory[:] = bytes([number]) * len(memory)
            stream.write(memoryview(memory))
            handed += memory
    assert files.cat_file("s3://tests/folder/object") == handed
    read = quick_of(files).cat_file("s3://tests/folder/object", start=3 * MIB - 1, end=3 * MIB + 1)
    assert read == b"\0\1"


def test_nothing_is_there_of_what_could_not_be_written_to_the_end(files: S3FileSystem) -> None:
    class Planner(DefaultSavePlanner):
        values = iter([torch.zeros(5 * MIB)])

        def resolve_data(self, write_item: object) -> torch.Tensor:
            return next(self.values)

    writer = ShardWriter(files, "s3://tests/half", moved=lambda: None)
    item: Any = SimpleNamespace(index=MetadataIndex("a"))
    with pytest.raises(StopIteration):
        writer._write("part", [item, item], Planner(), quick_of(files))
    assert not files.exists("s3://tests/half/part")


@pytest.mark.parametrize(
    ("options", "is_known"),
    [
        ({"anon": True, "cache_regions": True}, True),
        ({"key": "k", "secret": "s", "token": "t", "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}, True),
        ({"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}, False),  # else it would be left out
        ({"client_kwargs": {"verify": False}}, False),
        ({"profile": "other"}, False),
    ],
)
def test_options_that_obstore_is_not_told_of_leave_all_to_s3fs(
    options: dict[str, Any], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_s3, "_opened", lambda *_: "obstore's")
    assert (quick_files(S3FileSystem(**options), "s3://tests/") is not None) == is_known


def test_other_storage_is_fsspecs() -> None:
    assert quick_files(fsspec.filesystem("file"), "/quick/") is None
    assert quick_files(fsspec.filesystem("memory"), "/quick/") is None


def test_the_keys_are_those_that_s3fs_has_been_given(files: S3FileSystem, weed: Weed) -> None:
    del files  # in an environment with the admin's keys
    [mine, nobodys] = [
        quick_of(fsspec.filesystem("s3", key=keys.access, secret=keys.secret)) for keys in (weed.keys, READER)
    ]
    with mine.open("s3://tests/mine", "wb") as file:
        file.write(b"data")
    assert nobodys.cat_file("s3://tests/mine", start=0, end=4) == b"data"
    with pytest.raises(Exception, match="AccessDenied"), nobodys.open("s3://tests/nobodys", "wb") as file:
        file.write(b"data")


def test_temporary_keys_are_renewed(files: S3FileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in the profile makes keys that botocore must renew before each use."""
    soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    keys = {"Version": 1, "AccessKeyId": "id", "SecretAccessKey": "secret", "Expiration": soon}
    program = tmp_path / "keys.py"
    program.write_text(f"import json, uuid; print(json.dumps({keys} | dict(SessionToken=str(uuid.uuid4()))))")
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    files.connect(refresh=True)
    first, second = quick_s3._credentials(files), quick_s3._credentials(files)
    assert first["access_key_id"] == second["access_key_id"] == "id"
    assert first["token"] != second["token"]
    assert datetime.now(UTC) < first["expires_at"] < datetime.now(UTC) + timedelta(minutes=10)


@pytest.mark.parametrize("broken", ["open", "cat_file", None])
def test_where_obstore_fails_s3fs_writes_and_reads(
    files: S3FileSystem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str | None
) -> None:
    asked: list[str] = []

    def noted(method: str, usual: Any, *how: Any, **more: Any) -> Any:
        if method == broken:
            raise OSError("no way")
        asked.append(method)
        return usual(*how, **more)

    opened = quick_s3._opened

    def noting(*how: Any) -> SimpleNamespace:
        store = opened(*how)
        methods = ("open", "cat_file")
        return SimpleNamespace(**{name: functools.partial(noted, name, getattr(store, name)) for name in methods})

    monkeypatch.setattr(quick_s3, "_opened", noting)
    base = f"s3://tests/{broken}"
    entry = Rank(base).save({"weights": torch.arange(5 * MIB)}, 1)
    content = {"weights": torch.zeros(5 * MIB, dtype=torch.int64)}
    assert Rank(base, [entry]).checkpoints.load(content) == 1
    assert content["weights"].equal(torch.arange(5 * MIB))
    assert asked == [method for method in ["open", *["cat_file"] * 6] if method != broken]  # 40 MiB, in pieces
    assert capsys.readouterr().err == ""
