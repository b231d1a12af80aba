"""Which file has the newest names."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from seaweed import Weed
from tasks.newest_names import newest_uri

DAY = date(2026, 1, 31)


@pytest.mark.parametrize(
    ("data", "uri"),
    [
        ("", ""),
        ("names.csv", "names.csv"),
        ("s3://bucket/{date}.csv", "s3://bucket/2026-01-31.csv"),
        ("https://host/{date:%Y/%m}/names.json", "https://host/2026/01/names.json"),
    ],
)
def test_a_file_is_taken_as_it_is_named_on_the_day(
    data: str, uri: str, tmp_path: Path, weed: Weed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in weed.env().items():
        monkeypatch.setenv(name, value)
    weed.put_all("bucket", {"2026-01-31.csv": b"name\nmax"})
    assert newest_uri(data, DAY) == uri


def test_of_a_folder_it_is_the_file_written_last(tmp_path: Path) -> None:
    for age, name in enumerate(["b/new.json", "z.csv", "a.csv"]):
        path = tmp_path / "2026-01-31" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[]")
        os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))
    (tmp_path / "2026-01-31" / "notes.txt").write_text("younger than all")
    assert newest_uri(f"{tmp_path}/{{date}}", DAY) == f"file://{tmp_path}/2026-01-31/b/new.json"


def test_of_a_prefix_it_is_the_object_written_last(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in weed.env().items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()  # what other tests have opened speaks for somebody else
    weed.make_bucket("newest")
    weed.put("newest", "names/z.csv", b"name\nmax")
    assert newest_uri("s3://newest/names/", DAY) == "s3://newest/names/z.csv"
    weed.put("newest", "names/a.csv", b"name\nmax")  # SeaweedFS keeps times to the second, and then the name decides
    weed.delete("newest", "names/z.csv")
    assert newest_uri("s3://newest/names/", DAY) == "s3://newest/names/a.csv"


def test_what_cannot_be_found_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ends in \.csv or \.json .* stands for on 2026-01-31"):
        newest_uri(str(tmp_path), DAY)
    for data in ("s3://bucket/{day}.csv", "{}.csv", "{date.names}.csv", "{date"):
        with pytest.raises(ValueError, match=r"only \{date\}"):
            newest_uri(data, DAY)
