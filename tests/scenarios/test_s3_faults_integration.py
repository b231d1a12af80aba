"""`S3ImageFolder` reports or survives faults of a real S3 server, its objects and its network."""

import hashlib
import io
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fault_proxy as faults
from fault_proxy import FaultProxy
from flytekitplugins.daskpytorch import data
from jpegs import encoded, photo
from processes import nothing_left_behind, run_program
from seaweed import ADMIN, NO_RIGHTS, PUBLIC, Keys, Weed

BUCKET = "pictures"
NUM_RETRIES = 2
PATIENCE = 20.0
"""Seconds that an answer may take where nothing stalls: a busy host shall not be taken for a fault."""
TIMEOUT = 1.0
"""Where something stalls."""
NAMES = ("a/0.jpg", "a/tab\tline\n[b]*?::%20 #+%.jpeg", "b/2.jpg", "b/größe-犬.JPG")
FEW = {f"few/{name}": encoded(photo(number, (96, 64))) for number, name in enumerate(NAMES)}
VICTIM = "few/b/2.jpg"
URI = f"s3://{BUCKET}/{VICTIM}"
JPEG = FEW[VICTIM]
BROKEN = {"empty.jpg": b"", "text.jpg": b"<html>not a picture</html>\n" * 50, "truncated.jpg": JPEG[: len(JPEG) // 2]}
"""Files named like pictures that arrive whole, and are none."""


@pytest.fixture(scope="module", autouse=True)
def pictures(weed: Weed) -> None:
    """What most tests read."""
    broken = {f"broken/thing/{name}": body for name, body in BROKEN.items()}
    weed.put_all(BUCKET, {**FEW, "few-others/c/1.jpg": JPEG, **broken, "broken/thing/whole.jpg": JPEG})


@pytest.fixture
def folder(weed: Weed, proxy: FaultProxy) -> Callable[..., data.S3ImageFolder]:
    """Makes data sets that read through the proxy and give up soon."""

    def make(prefix: str = "few", bucket: str = BUCKET, keys: Keys | None = None, **options: Any) -> data.S3ImageFolder:
        options = {"timeout": PATIENCE, "num_retries": NUM_RETRIES} | options
        place = {"endpoint_url": proxy.endpoint}
        place = place if options.get("anon") else weed.options(keys) | place
        return data.S3ImageFolder(bucket, prefix, storage_options=place, **options)

    return make


Make = Callable[..., data.S3ImageFolder]


def shown(body: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))


def read(dataset: data.S3ImageFolder, key: str) -> np.ndarray:
    """One picture, by its key."""
    return np.asarray(dataset[dataset.all_files.index(key)][0])


# ---- What is in the bucket


def test_pictures_and_labels_are_those_of_the_bucket(folder: Make) -> None:
    dataset = folder()
    assert dataset.all_files == sorted(FEW)
    assert (dataset.classes, dataset.class_to_idx, dataset.targets) == (["a", "b"], {"a": 0, "b": 1}, [0, 0, 1, 1])
    for key, (picture, label) in zip(dataset.all_files, dataset.__getitems__([0, 1, 2, 3]), strict=True):
        assert np.array_equal(np.asarray(picture), shown(FEW[key]))
        assert dataset.classes[label] == key.split("/")[1]


def test_more_keys_than_a_page_are_listed_and_a_pickle_has_the_listing(
    folder: Make, weed: Weed, proxy: FaultProxy
) -> None:
    keys = [f"many/class-{number % 3}/{number:05d}.jpg" for number in range(1005)]
    weed.put_all(BUCKET, dict.fromkeys(keys, b"?"))
    dataset = folder("many")
    assert dataset.all_files == sorted(keys)
    assert proxy.num_requests(BUCKET) >= 2
    proxy.heal()
    again = pickle.loads(pickle.dumps(dataset))
    assert (again.all_files, again.targets, again.etags) == (dataset.all_files, dataset.targets, dataset.etags)
    assert not proxy.requests


# ---- Who may read


def test_a_missing_bucket_is_named(folder: Make) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"s3://missing-bucket/few/ does not exist.*Check its name and the endpoint"
    ):
        folder(bucket="missing-bucket")


def test_anybody_reads_a_public_bucket_and_no_other(folder: Make, weed: Weed) -> None:
    weed.put(PUBLIC, "free/dog/1.jpg", JPEG)
    assert np.array_equal(read(folder("free", PUBLIC, anon=True), "free/dog/1.jpg"), shown(JPEG))
    with pytest.raises(PermissionError, match=rf"s3://{BUCKET}/few/ may not be read.*Check the credentials"):
        folder(anon=True)


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        (NO_RIGHTS, "AccessDenied"),
        (Keys(access="AKIAUNKNOWN", secret="x"), "InvalidAccessKeyId"),
        (Keys(access=ADMIN.access, secret="wrong"), "SignatureDoesNotMatch"),
    ],
    ids=["no rights", "unknown key", "wrong secret"],
)
def test_wrong_keys_are_refused_when_listing_and_when_reading(
    folder: Make, proxy: FaultProxy, keys: Keys, cause: str
) -> None:
    with pytest.raises(PermissionError, match=rf"s3://{BUCKET}/few/ may not be read.*Check the credentials.*{cause}"):
        folder(keys=keys)
    dataset = folder(on_error="skip")  # that is none of its business
    dataset._access, dataset._readers = replace(dataset._access, key=keys.access, secret=keys.secret), {}
    proxy.heal()
    with pytest.raises(PermissionError, match=rf"{URI} may not be read.*{cause}"):
        read(dataset, VICTIM)
    assert proxy.num_requests(VICTIM) == 1


# ---- On the way


TRANSIENT = {
    "503": faults.UNAVAILABLE,
    "reset in the body": faults.RESET_IN_BODY,
    "shortened": faults.SHORTENED,
    "garbage": faults.GARBAGE,
    "stalled in the body": faults.stalled_body(5 * TIMEOUT),
}
LASTING: dict[str, tuple[type[OSError], str]] = {
    "503": (ConnectionError, "could not be read: SlowDown: Please reduce your request rate"),
    "shortened": (data.DamagedTransferError, f"arrived with {len(JPEG) // 2} bytes instead of {len(JPEG)}"),
    "stalled in the body": (TimeoutError, "was not answered in time"),
}


def timeout_for(fault: str) -> float:
    return TIMEOUT if fault.startswith("stalled") else PATIENCE


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_fault_that_passes_is_not_noticed(folder: Make, proxy: FaultProxy, fault: str) -> None:
    num_times = 2 if fault == "503" else 1
    dataset = folder(timeout=timeout_for(fault))
    proxy.fail(TRANSIENT[fault], VICTIM, num_times)
    assert np.array_equal(read(dataset, VICTIM), shown(JPEG))
    assert proxy.num_requests(VICTIM) == num_times + 1


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_stays_ends_in_an_error_that_says_so(folder: Make, proxy: FaultProxy, fault: str) -> None:
    dataset = folder(timeout=timeout_for(fault))
    proxy.fail(TRANSIENT[fault], VICTIM)
    kind, cause = LASTING[fault]
    with pytest.raises(kind, match=rf"^{re.escape(URI)} {cause}.*Tried {NUM_RETRIES + 1} times") as raised:
        read(dataset, VICTIM)
    assert type(raised.value) is kind
    assert proxy.num_requests(VICTIM) == NUM_RETRIES + 1


def test_a_picture_that_is_deleted_in_mid_epoch_is_named_and_asked_for_once(
    folder: Make, weed: Weed, proxy: FaultProxy
) -> None:
    weed.put_all(BUCKET, {f"going/dog/{number}.jpg": JPEG for number in range(2)})
    dataset = folder("going")
    dataset[0]
    weed.delete(BUCKET, "going/dog/1.jpg")
    with pytest.raises(
        FileNotFoundError, match=rf"s3://{BUCKET}/going/dog/1.jpg does not exist: the object was deleted"
    ):
        dataset[1]
    assert proxy.num_requests("going/dog/1.jpg") == 1
    assert len(folder("going")) == 1


def test_a_picture_that_is_overwritten_in_mid_epoch_is_not_taken_for_the_other(
    folder: Make, weed: Weed, proxy: FaultProxy
) -> None:
    weed.put(BUCKET, "changing/dog/1.jpg", JPEG)
    dataset = folder("changing")
    weed.put(BUCKET, "changing/dog/1.jpg", FEW["few/a/0.jpg"])
    with pytest.raises(
        data.ChangedError, match=rf"s3://{BUCKET}/changing/dog/1.jpg has been overwritten .* List the bucket again"
    ):
        dataset[0]
    assert proxy.num_requests("changing/dog/1.jpg") == 1


def test_a_listing_survives_a_fault_that_passes_and_one_that_stays_is_an_error(folder: Make, proxy: FaultProxy) -> None:
    proxy.fail(faults.UNAVAILABLE, f"/{BUCKET}", 1)
    proxy.fail(faults.RESET, f"/{BUCKET}", 1)
    assert len(folder()) == len(FEW)
    proxy.fail(faults.UNAVAILABLE, f"/{BUCKET}")
    with pytest.raises(ConnectionError, match=rf"^s3://{BUCKET}/few/ "):
        folder(num_retries=0)


# ---- What `on_error` does


def test_broken_pictures_are_left_out_and_named(folder: Make, caplog: pytest.LogCaptureFixture) -> None:
    dataset = folder("broken", on_error="skip")
    items = dataset.__getitems__(range(len(dataset)))
    assert [np.array_equal(np.asarray(picture), shown(JPEG)) for picture, _ in items] == [True]
    for name in BROKEN:
        assert f"skipped: s3://{BUCKET}/broken/thing/{name} cannot be decoded" in caplog.text


def test_pictures_that_always_arrive_damaged_can_be_left_out_but_not_those_of_a_server_that_is_down(
    folder: Make, proxy: FaultProxy
) -> None:
    dataset = folder(on_error="skip")
    proxy.fail(faults.SHORTENED, VICTIM, NUM_RETRIES + 1)
    assert len(dataset.__getitems__(range(4))) == 3
    proxy.fail(faults.UNAVAILABLE, VICTIM)
    with pytest.raises(ConnectionError, match=URI):
        dataset.__getitems__(range(4))


# ---- Processes

START_METHODS = """
import hashlib, json, logging, sys
import numpy as np
from torch.utils.data import DataLoader
from flytekitplugins.daskpytorch import data

logging.basicConfig(stream=sys.stderr)

def digest(picture):
    return hashlib.sha256(np.asarray(picture).tobytes()).hexdigest()

def read_by(method, num_workers):
    loader = DataLoader(dataset, batch_size=2, num_workers=num_workers, multiprocessing_context=method)
    print(json.dumps([method, [image for batch, _ in loader for image in batch]]), flush=True)

if __name__ == "__main__":
    dataset = data.S3ImageFolder("s3://pictures/few", transform=digest)
    read_by("fork", 2)
    print(json.dumps(["parent", [image for image, _ in dataset.__getitems__(range(4))]]), flush=True)
    read_by("fork", 2)
    read_by("forkserver", 1)
"""


def test_workers_read_whether_they_are_forked_or_not_and_their_parent_has_or_not(weed: Weed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(START_METHODS)
    with nothing_left_behind():
        done = run_program(["script.py"], cwd=tmp_path, env=weed.env())
    assert done.returncode == 0, done.stderr
    digests = [hashlib.sha256(shown(FEW[key]).tobytes()).hexdigest() for key in sorted(FEW)]
    readers = ["fork", "parent", "fork", "forkserver"]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[reader, digests] for reader in readers]
    assert done.stderr.count("reads with botocore") == 2  # the two workers that were forked from a reader, no others
