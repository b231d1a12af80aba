"""The names of the pet names example are read, cleaned and split correctly."""

import functools
import http.server
import os
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from seaweed import Weed
from tasks.embedded_names import EMBEDDED_NAMES
from tasks.names import clean_names, load_names, newest_uri, split_by_hash, split_by_name

DAY = date(2026, 1, 31)


@pytest.fixture
def write(tmp_path: Path):
    """Write a file and return its path as a string."""

    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of an HTTP server for the files in `tmp_path`."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("file", ["names.json", "names.txt"])
def test_json_is_known_by_its_content(write, file: str) -> None:
    names = load_names(write(file, '\ufeff ["Bella", " Max ", "bella", "Mary-Ann", "Mr. B"]'))
    assert names.names == ["bella", "max", "bella", "mary-ann", "mr. b"]


@pytest.mark.parametrize(
    ("header", "column"),
    [
        ("id,pet_name", 1),
        ("Species, Name ", 1),
        ("owner name,Animal's Name", 1),
        ("owner name,pet name", 0),
    ],
)
def test_csv_column(write, header: str, column: int) -> None:
    rows = "first,second\n\nthird,fourth\n"
    assert (
        load_names(write("pets.csv", f"{header}\n{rows}")).names == [["first", "third"], ["second", "fourth"]][column]
    )


def test_cleaning_counts_what_it_drops() -> None:
    names = clean_names(["Zoë", "", "  ", "Zoé 2", "Léa", "Max", "MAX"], source="a list")
    assert names.names == ["max", "max"]
    assert (names.num_read, names.num_empty, names.num_outside) == (7, 2, 3)
    assert list(names.outside.items()) == [("é", 2), ("2", 1), ("ë", 1)]
    assert names.report == (
        "2 names (1 different) of 7 from a list; 2 dropped as empty; "
        "3 dropped for characters outside the alphabet: 'é' in 2, '2' in 1, 'ë' in 1"
    )


def test_s3(s3: str, weed: Weed) -> None:
    weed.put_all("pets", {"names.csv": b"name\nBella\n"})
    assert load_names("s3://pets/names.csv").names == ["bella"]
    with pytest.raises(FileNotFoundError, match=r"there is no file at 's3://pets/other\.csv'"):
        load_names("s3://pets/other.csv")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"dogs": [], "cats": []}', "it is JSON, but no list: {'cats': "),
        ('["Bella", 7]', "element 1 of its JSON list is no string but 7"),
        ("species,breed\ncat,manx\n", r"no column of its CSV header is called a name: \['species', 'breed'"),
        ("<!doctype html>\n<p>Log in</p>\n", "no column of its CSV header .*<!doctype html>"),
        (b"PAR1\x15\x04\xff", "it is no UTF-8 text .*PAR1"),
    ],
)
def test_unreadable(write, content: str | bytes, found: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)cannot read names from '.*pets': {found}.*Give a JSON list of strings"):
        load_names(write("pets", content))


def test_split_keeps_every_name_on_one_side_by_the_seed_and_not_by_the_order() -> None:
    names = [*EMBEDDED_NAMES, *EMBEDDED_NAMES[:100]]
    training, held_out = split_by_name(names, 0.1, seed=3)
    assert len(set(held_out)) == round(0.1 * len(EMBEDDED_NAMES))
    assert not set(training) & set(held_out)
    assert Counter(training) + Counter(held_out) == Counter(names)
    assert sorted(split_by_name(names[::-1], 0.1, seed=3)[1]) == sorted(held_out)
    assert set(split_by_name(names, 0.1, seed=4)[1]) != set(held_out)


def test_split_leaves_a_name_on_both_sides_and_needs_two_names_and_a_fraction() -> None:
    for held_out, num_held_out in ((0.001, 1), (0.999, 2)):
        assert len(split_by_name(["bella", "max", "luna"], held_out, seed=0)[1]) == num_held_out
    for wrong in (0, 1, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"held_out=.*: must be a fraction between 0 and 1"):
            split_by_name(["bella", "max"], wrong, seed=0)
    with pytest.raises(ValueError, match=r"needs two different names or more, and got \['max'\]"):
        split_by_name(["max", "max"], 0.5, seed=0)


def test_what_is_held_out_by_hash_is_so_among_any_names() -> None:
    names = [*EMBEDDED_NAMES, "bella", "max"]
    training, held_out = split_by_hash(names, 0.1)
    assert sorted(training + held_out) == sorted(names)
    assert not set(training) & set(held_out)
    assert 0.07 < len(set(held_out)) / len(set(names)) < 0.13
    for some in (names[::2], names[::-3]):
        assert split_by_hash(some, 0.1)[1] == [name for name in some if name in set(held_out)]
    assert set(split_by_hash(names, 0.05)[1]) < set(held_out) < set(split_by_hash(names, 0.2)[1])
    with pytest.raises(ValueError, match=r"held_out=1: must be a fraction"):
        split_by_hash(names, 1)


def test_no_password_and_no_signature_is_shown(served: str, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text('["Max"]')
    address = served.replace("http://", "http://user:s3cret@")
    assert load_names(f"{address}/names.json?signature=s3cret").source == f"{served}/names.json"
    with pytest.raises(FileNotFoundError, match=rf"no file at '{served}/none.json'"):
        load_names(f"{address}/none.json?signature=s3cret")


# The newest file


def test_a_file_is_taken_as_it_is_named_on_the_day(s3: str, weed: Weed) -> None:
    weed.put_all("bucket", {"2026-01-31.csv": b"name\nmax"})
    assert newest_uri("s3://bucket/{date}.csv", DAY) == "s3://bucket/2026-01-31.csv"
    assert newest_uri("https://host/{date:%Y/%m}/names.json", DAY) == "https://host/2026/01/names.json"
    assert newest_uri("", DAY) == ""


def test_of_a_folder_it_is_the_file_written_last(tmp_path: Path) -> None:
    for age, name in enumerate(["b/new.json", "z.csv", "a.csv"]):
        path = tmp_path / "2026-01-31" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[]")
        os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))
    (tmp_path / "2026-01-31" / "notes.txt").write_text("younger than all")
    assert newest_uri(f"{tmp_path}/{{date}}", DAY) == f"file://{tmp_path}/2026-01-31/b/new.json"


def test_what_cannot_be_found_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ends in \.csv or \.json .* stands for on 2026-01-31"):
        newest_uri(str(tmp_path), DAY)
    for data in ("s3://bucket/{day}.csv", "{}.csv", "{date.names}.csv", "{date"):
        with pytest.raises(ValueError, match=r"only \{date\}"):
            newest_uri(data, DAY)
