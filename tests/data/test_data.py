"""`S3ImageFolder` checks its arguments without a server. test_s3_*_integration.py has tests with a server."""

import pickle
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins.daskpytorch import data
from flytekitplugins.daskpytorch.data.bucket import Access, Bucket, Listed, credentials
from flytekitplugins.daskpytorch.data.image_folder import pictures_in

PLACE = {"endpoint_url": "http://127.0.0.1:1"}
KEYS = dict.fromkeys(("key", "secret", "token"), "hush")
NOWHERE: dict[str, Any] = {"storage_options": KEYS | PLACE, "num_retries": 1}


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that only lists."""
    files = [Listed("p/cat/1.jpg", 3, "a"), Listed("p/dog/2.jpg", 4, "b"), Listed("p/dog/3.jpg", 4, "b")]
    monkeypatch.setattr(Bucket, "listing", lambda _, prefix: files if prefix == "p/" else [])


@pytest.mark.parametrize("place", [("b", "p"), ("b", "/p/"), ("s3://b/p",), ("s3://b/p/",), ("s3a://b", "p")])
@pytest.mark.usefixtures("listed")
def test_bucket_and_prefix_or_an_uri(place: tuple[str, ...]) -> None:
    folder = data.S3ImageFolder(*place, **NOWHERE)
    assert folder.all_files == ["p/cat/1.jpg", "p/dog/2.jpg", "p/dog/3.jpg"]
    assert folder.classes == ["cat", "dog"]
    assert folder.class_to_idx == {"cat": 0, "dog": 1}
    assert folder.targets == [0, 1, 1]
    assert len(folder) == 3
    assert folder.etags[1] == folder.etags[2] != folder.etags[0]


@pytest.mark.parametrize(
    "place, options, message",
    [
        (("gs://b/p",), {}, "must be a bucket's name or s3://bucket/prefix"),
        (("s3:///p",), {}, "must be a bucket's name"),
        (("b/p",), {}, "must be a bucket's name"),
        (("s3://b/p", "q"), {}, "name the prefix once"),
        (("b",), {"on_error": "ignore", "timeout": 0}, r"\(on_error='ignore'.*timeout=0"),
        (("b",), {"num_connections": 0, "num_retries": -1}, "num_connections=0.*num_retries=-1"),
        (("b",), {"storage_options": {"kee": 1, "client_kwargs": {}}}, "has client_kwargs, kee, which is unknown"),
        (("b",), {"storage_options": {"key": "k"}}, "has key, but no secret: give both"),
    ],
)
def test_bad_arguments_are_all_named(place: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.S3ImageFolder(*place, **{**NOWHERE, **options})


# ---- The pictures among a folder's objects


def pictures(*keys: str, nested: bool = False) -> list[str]:
    found = pictures_in([Listed(key, 1, "e") for key in keys], "s3://b/p/", "p/", nested=nested)
    return [listed.key for listed in found]


def test_other_objects_are_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    wanted = ["p/cat/1.JPG", "p/cat/2 ü.jpeg", "p/emu/3.png"]
    others = ["p/", "p/cat/", "p/dog/notes.txt", "p/dog/.hidden.jpg", "p/cover.jpg"]
    assert pictures(*others, *wanted) == wanted
    assert "s3://b/p/: left out 2 x file that is no picture by its name, such as p/dog/notes.txt" in caplog.text
    assert "left out 1 x picture in no class's folder, such as p/cover.jpg" in caplog.text
    assert "marker" not in caplog.text


def test_parts_of_the_data_are_not_taken_for_classes() -> None:
    keys = ["p/train/cat/1.jpg", "p/val/cat/2.jpg"]
    with pytest.raises(ValueError, match=r"s3://b/p/ has 2 pictures .* name it: s3://b/p/train\. .* nested=True"):
        pictures(*keys)
    assert pictures(*keys, nested=True) == keys


def test_a_folder_without_pictures_is_an_error_that_says_what_is_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"Looked for s3://b/p/CLASS/PICTURE .* found no such object"):
        pictures()
    with pytest.raises(FileNotFoundError, match=r"2 x file that is no picture by its name, such as p/cat/a.txt"):
        pictures("p/cat/a.txt", "p/cat/b.csv")


# ---- Its way to other processes, and credentials


@pytest.mark.usefixtures("listed")
def test_it_travels_without_its_client_and_hides_its_secret() -> None:
    folder = data.S3ImageFolder("b", "p", **NOWHERE)
    with pytest.raises(ConnectionError, match=r"s3://b/p/cat/1.jpg could not be read: .*Tried 2 times"):
        folder[0]  # its client is in use
    other = pickle.loads(pickle.dumps(folder))
    assert other.all_files == folder.all_files
    with pytest.raises(ConnectionError, match=r"s3://b/p/dog/3.jpg could not be read"):
        other[-1]
    assert "hush" not in repr(folder._access)


def test_no_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(PermissionError, match=r"no AWS credentials .*anon=True"):
        credentials(Access().session())
    with pytest.raises(PermissionError, match=r"s3://b/p/ may not be read: Unable to locate credentials.*anon=True"):
        data.S3ImageFolder("b", "p", storage_options=PLACE)


def test_temporary_keys_are_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in the profile makes keys that botocore must renew before each use."""
    soon = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    keys = {"Version": 1, "AccessKeyId": "id", "SecretAccessKey": "secret", "Expiration": soon}
    program = tmp_path / "keys.py"
    program.write_text(f"import json, uuid; print(json.dumps({keys} | dict(SessionToken=str(uuid.uuid4()))))")
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    current = credentials(Access().session())
    first, second = current(), current()
    assert first["access_key_id"] == second["access_key_id"] == "id"
    assert first["token"] != second["token"]
    assert datetime.now(UTC) < first["expires_at"] < datetime.now(UTC) + timedelta(minutes=10)
