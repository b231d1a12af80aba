"""Finds, loads, cleans and splits the list of names of the pet-names example. Runs in ordinary tasks."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from flytekitplugins.daskpytorch import url_to_fs
from tasks.embedded_names import EMBEDDED_NAMES

ENDINGS = (".csv", ".json")
"""Endings of the file names that `newest_uri` finds in a folder."""
ALPHABET = "*+abcdefghijklmnopqrstuvwxyz-. "
"""All characters that the model knows. `*` is the blank that pads, and `+` the stop that ends a name."""

NAME_CHARACTERS = frozenset(ALPHABET[2:])
"""Characters that a name may have."""


@dataclass(frozen=True, kw_only=True)
class CleanNames:
    """Usable names of a source, and counts of the dropped entries."""

    source: str
    """URI of the names, or `the embedded list`."""
    names: list[str]
    """Lower-case names in the order of the source. Repetitions stay."""
    num_read: int
    """Number of entries in the source."""
    num_empty: int
    """Number of dropped entries without a name."""
    num_outside: int
    """Number of dropped entries with a character outside the alphabet."""
    outside: dict[str, int] = field(default_factory=dict)
    """Number of names with each character outside the alphabet, most frequent first."""

    @property
    def report(self) -> str:
        """Return a line for people: the kept entries, the dropped entries and the reasons."""
        text = f"{len(self.names):,} names ({len(set(self.names)):,} different) of {self.num_read:,} from {self.source}"
        if self.num_empty:
            text += f"; {self.num_empty:,} dropped as empty"
        if self.num_outside:
            text += f"; {self.num_outside:,} dropped for characters outside the alphabet: {_listing(self.outside)}"
        return text


def load_names(uri: str = "") -> CleanNames:
    """Read and clean a list of names.

    Args:
        uri: A local path, or an `https://`, `http://` or `s3://` URI. The file is a JSON list of names, or a CSV file
            with a column of names. Empty: the embedded list. Credentials and endpoints come from the environment.

    Returns:
        The usable names, and counts of the dropped entries.

    Raises:
        FileNotFoundError: No file exists at `uri`.
        ValueError: The file is not a list of names, or has no usable name.
    """
    if not uri:
        return clean_names(EMBEDDED_NAMES, source="the embedded list")
    shown = _without_secrets(uri)
    return clean_names(_parse(shown, _read(uri)), source=shown)


def newest_uri(data: str, day: date) -> str:
    """Return the URI of the newest names.

    Args:
        data: A file, or a URI with `{date}`, which becomes the day (`{date:%Y/%m/%d}` sets the format). A folder or
            prefix stands for its `.csv` or `.json` file with the latest time of writing. Empty: the embedded list.
        day: The day of the names.

    Returns:
        A URI for `load_names`.

    Raises:
        FileNotFoundError: The folder has no `.csv` or `.json` file.
        ValueError: The braces contain something other than a date.
    """
    try:
        uri = data.format(date=day)
    except (AttributeError, IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"data={data!r}: only {{date}}, or a form of it such as {{date:%Y/%m/%d}}, may stand in braces "
            f"({type(error).__name__}: {error})"
        ) from error
    if not uri or uri.startswith(("http://", "https://")):  # web servers have no folders
        return uri
    filesystem, path = url_to_fs(uri)
    filesystem.invalidate_cache()
    if not filesystem.isdir(path):
        return uri
    files = [file for file in filesystem.find(path) if file.endswith(ENDINGS)]
    if not files:
        raise FileNotFoundError(
            f"there is no file whose name ends in {' or '.join(ENDINGS)} in {uri!r}, which data={data!r} stands for on "
            f"{day}. Check the spelling, and whether the day's names have arrived."
        )
    newest = max(files, key=lambda file: (filesystem.modified(file), file))
    return str(filesystem.unstrip_protocol(newest))


def clean_names(raw: Sequence[str], *, source: str) -> CleanNames:
    """Convert the names to lower case, strip them, and keep those that the alphabet can write.

    Args:
        raw: The names as they were read.
        source: The names' source, for the report and for errors.

    Raises:
        ValueError: `raw` is empty, or has no usable name.
    """
    if not raw:
        raise ValueError(f"{source} has no names: its list is empty. Give a file with at least one name.")
    stripped = [name.lower().strip() for name in raw]
    names = [name for name in stripped if name and NAME_CHARACTERS.issuperset(name)]
    num_empty = stripped.count("")
    outside = Counter(character for name in stripped for character in set(name) - NAME_CHARACTERS)
    # Characters with equal counts are sorted, or their order would change with the hash seed.
    ranked = dict(sorted(outside.items(), key=lambda item: (-item[1], item[0])))
    if not names:
        raise ValueError(
            f"{source} has no usable name: of {len(raw):,} read, {num_empty:,} are empty and {len(raw) - num_empty:,} "
            f"have characters outside the alphabet ({_listing(ranked)}). A name may have a-z, '-', '.' and spaces; "
            "check that this is the right file, or spell its names in these characters."
        )
    return CleanNames(
        source=source,
        names=names,
        num_read=len(raw),
        num_empty=num_empty,
        num_outside=len(raw) - num_empty - len(names),
        outside=ranked,
    )


def split_by_name(names: Iterable[str], held_out: float, seed: int) -> tuple[list[str], list[str]]:
    """Hold out a fraction of the different names, each with all its repetitions.

    A name never stands on both sides, so the held-out loss is measured on names that the model has not seen. The split
    depends on the set of names and the seed. The order has no effect.

    Args:
        names: Clean names, with repetitions.
        held_out: Fraction of the different names to hold out, between 0 and 1. Both sides get at least one name.
        seed: Seed that decides which names are held out.

    Returns:
        The training names and the held-out names, both in the given order and with repetitions.

    Raises:
        ValueError: `held_out` is not between 0 and 1, or fewer than two names are different.
    """
    names = list(names)
    distinct = sorted(set(names))
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out!r}: must be a fraction between 0 and 1, such as 0.1")
    if len(distinct) < 2:
        raise ValueError(f"a split needs two different names or more, and got {distinct}; give a longer list of names")
    num_held_out = min(max(round(held_out * len(distinct)), 1), len(distinct) - 1)
    chosen = set(random.Random(seed).sample(distinct, num_held_out))
    return [name for name in names if name not in chosen], [name for name in names if name in chosen]


def split_by_hash(names: Iterable[str], held_out: float) -> tuple[list[str], list[str]]:
    """Hold out about a fraction of the different names. A hash of each name decides its side.

    A name's side does not depend on the other names. A model therefore never trains on a name that
    later models are evaluated on. A larger fraction holds out all names of a smaller one.

    Args:
        names: Clean names, with repetitions.
        held_out: Approximate fraction of the different names to hold out, between 0 and 1.

    Returns:
        The training names and the held-out names, both in the given order and with repetitions. Either can be empty if
        the list is short.

    Raises:
        ValueError: `held_out` is not between 0 and 1.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out!r}: must be a fraction between 0 and 1, such as 0.1")
    names = list(names)
    chosen = {name for name in set(names) if _place(name) < held_out}
    return [name for name in names if name not in chosen], [name for name in names if name in chosen]


def _place(name: str) -> float:
    """Return a number from 0 to below 1 that depends only on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def _read(uri: str) -> bytes:
    try:
        filesystem, path = url_to_fs(uri)
        with filesystem.open(path, "rb") as file:
            return bytes(file.read())
    except FileNotFoundError as error:
        shown = _without_secrets(uri)
        raise FileNotFoundError(
            f"there is no file at {shown!r}. Check the spelling; a local path must exist on the machine where the task "
            "runs, so that on a cluster an https:// or s3:// URI is needed."
        ) from error


def _without_secrets(uri: str) -> str:
    """Return the URI without password and signature, for logs and model cards."""
    if not uri.startswith(("http://", "https://")):
        return uri
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _parse(uri: str, content: bytes) -> list[str]:
    """Return the entries of a JSON list, or of the column of names of a CSV file."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(uri, f"it is no UTF-8 text (its first bytes are {content[:8]!r})") from error
    if not text.strip():
        raise _unreadable(uri, "the file is empty")
    if uri.endswith(".json") or text.lstrip().startswith(("[", "{")):
        return _parse_json(uri, text)
    return _parse_csv(uri, text)


def _parse_json(uri: str, text: str) -> list[str]:
    try:
        entries: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise _unreadable(uri, f"it is not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise _unreadable(uri, f"it is JSON, but no list: {reprlib.repr(entries)}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise _unreadable(uri, f"element {index} of its JSON list is no string but {reprlib.repr(entry)}")
    return entries


def _parse_csv(uri: str, text: str) -> list[str]:
    try:
        # A row may end before the column of names. An empty line is not a row.
        header, *rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except csv.Error as error:
        raise _unreadable(uri, f"it is not valid CSV: {error}") from error
    column = _name_column(header)
    if column is None:
        raise _unreadable(uri, f"no column of its CSV header is called a name: {reprlib.repr(header)}")
    return [row[column] if column < len(row) else "" for row in rows]


def _name_column(header: Sequence[str]) -> int | None:
    """Return the index of the column of names: `name` first, then `Animal's Name`, then any other with `name`."""
    titles = [title.lower().strip() for title in header]
    for wanted in ("name", "animal's name"):
        if wanted in titles:
            return titles.index(wanted)
    return next((index for index, title in enumerate(titles) if "name" in title), None)


def _unreadable(uri: str, found: str) -> ValueError:
    return ValueError(
        f"cannot read names from {uri!r}: {found}. Give a JSON list of strings, such as "
        '["Bella", "Max"], or a CSV file whose header names a column "name".'
    )


def _listing(outside: dict[str, int]) -> str:
    """Return the ten most frequent characters, such as `'é' in 12 names`."""
    shown = [f"{character!r} in {count:,}" for character, count in list(outside.items())[:10]]
    return ", ".join(shown) + (f" and {len(outside) - 10} other characters" if len(outside) > 10 else "")
