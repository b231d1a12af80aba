"""Registry of models: immutable versions, and the history of the champion.

The registry runs in ordinary tasks, and on the command line:

    python -m tasks.registry --registry s3://bucket/models history
    python -m tasks.registry --registry s3://bucket/models roll-back --reason "too many names with q"

Objects below the registry's URI:

    versions/ID/...               the version's files and its card.json
    versions/ID.json              sizes and checksums of the files, written last to commit the version
    promotions/00000001.json ...  promoted version, time, reason and previous champion (the newest is the champion)

A promotion creates the object with the next number. If several processes try at once, only one succeeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.stores import open_store

VARIABLE = "PET_NAMES_REGISTRY"
"""Name of the environment variable with the registry's URI."""
CARD = "card.json"
VERSION = re.compile(r"\d{8}T\d{12}Z-[0-9a-f]{12}", re.ASCII)
"""Pattern of a version's id: the UTC time in microseconds, and the beginning of the manifest's checksum."""
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
PROMOTION = re.compile(r"\d{8}\.json", re.ASCII)


class ChampionChangedError(RuntimeError):
    """Another process has promoted a version in the meantime. The registry is unchanged."""


class DamagedFileError(RuntimeError):
    """A file of a version has a wrong checksum."""


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """Record of a version that became the champion."""

    number: int
    """Number of the promotion, from 1. The newest promotion is the champion."""
    version: str
    """Version that became the champion."""
    previous: str | None
    """Version that was replaced. None for the first promotion."""
    reason: str
    """Reason of the promotion, for people."""
    at: str
    """Time of the promotion in UTC, in ISO 8601 format."""


class Registry:
    """Versions of a model, and the history of its champion.

    Args:
        uri: A local folder, which is created if needed, or `s3://bucket/prefix`.
        storage_options: Additional options of fsspec for the access.

    Raises:
        ValueError: The URI is neither a local folder nor `s3://bucket/prefix`.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._uri = uri
        self._store = open_store(uri, storage_options)
        self._is_checked = False

    def check(self) -> None:
        """Check that the registry can be written, and that of two simultaneous promotions only one succeeds.

        Each `Registry` object checks once. `add` and `promote` check, too. Call this method before a long training, to
        get errors early.

        Raises:
            RuntimeError: Both promotions succeeded, or the folder cannot be written.
            OSError: The bucket cannot be reached or written.
        """
        if not self._is_checked:
            self._store.check()
            self._is_checked = True

    # ---- Versions

    def add(self, files: Mapping[str, Path], card: Mapping[str, Any]) -> str:
        """Add a version, which never changes afterwards. If the call fails or is killed, no version is added.

        Args:
            files: Local files by their names in the registry. Names consist of letters, digits, `_`, `-` and `.`.
            card: Description of the version for people, as a mapping that JSON can write.

        Returns:
            The version's id. Ids sort by time.

        Raises:
            ValueError: Names are invalid, or files are missing. The message lists all problems.
            RuntimeError, OSError: As in `check`.
        """
        _refuse(files)
        self.check()
        sources: dict[str, Path | bytes] = {**files, CARD: json.dumps(dict(card), indent=2).encode()}
        manifest = _json({name: _fingerprint(source) for name, source in sources.items()})
        version = f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{_digest(manifest)}"
        for name, source in sources.items():
            self._store.write(f"versions/{version}/{name}", source)
        self._store.write(f"versions/{version}.json", manifest)
        return version

    def versions(self) -> list[str]:
        """Return the ids of all versions, oldest first."""
        ids = (name.removesuffix(".json") for name in self._store.names("versions") if name.endswith(".json"))
        return [version for version in ids if VERSION.fullmatch(version)]

    def card(self, version: str) -> dict[str, Any]:
        """Return the description of a version.

        Raises:
            ValueError: The version does not exist.
            DamagedFileError: The card has a wrong checksum.
        """
        entry = self._manifest(version)[CARD]
        (found,) = self._store.read([f"versions/{version}/{CARD}"])
        self._compare(version, CARD, entry, _fingerprint(found))
        card: dict[str, Any] = json.loads(found)
        return card

    def fetch(self, version: str, name: str, folder: Path) -> Path:
        """Copy a file of a version into a local folder, which is created if needed.

        The checksum proves the file unchanged since `add`. Anyone with write access to the registry can add any file,
        so load states with `torch.load(path, weights_only=True)`.

        Raises:
            ValueError: The version does not exist, or has no file of this name.
            DamagedFileError: The file has a wrong checksum, and is removed from the folder.
        """
        manifest = self._manifest(version)
        if name not in manifest or not FILE.fullmatch(name):
            raise ValueError(f"version {version} of {self._uri} has no file {name!r}; it has {', '.join(manifest)}")
        folder.mkdir(parents=True, exist_ok=True)
        path, part = folder / name, folder / f".{name}.part"
        try:
            self._store.download(f"versions/{version}/{name}", part)
            self._compare(version, name, manifest[name], _fingerprint(part))
            return part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    # ---- Promotions

    def champion(self) -> Promotion | None:
        """Return the newest promotion, or None before the first promotion."""
        newest = self._read_promotions(self._promotions()[-1:])
        return newest[0] if newest else None

    def history(self) -> list[Promotion]:
        """Return all promotions, oldest first. A roll-back is a promotion, too."""
        return self._read_promotions(self._promotions())

    def promote(self, version: str, *, instead_of: Promotion | None, reason: str) -> Promotion:
        """Make a version the champion, unless the champion has changed. Repeating the same promotion has no effect.

        Args:
            version: Id of the version.
            instead_of: The champion in the comparison. None if no champion existed.
            reason: Reason of the promotion, for people.

        Raises:
            ChampionChangedError: The champion is not `instead_of`. The registry is unchanged.
            ValueError: The version does not exist, or is the champion already.
            RuntimeError, OSError: As in `check`.
        """
        self._manifest(version)
        if instead_of is not None and instead_of.version == version:
            raise ValueError(
                f"version {version} is the champion of {self._uri} already (promotion {instead_of.number})"
            )
        self.check()
        wanted = Promotion(
            number=instead_of.number + 1 if instead_of else 1,
            version=version,
            previous=instead_of.version if instead_of else None,
            reason=reason,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        champion = self.champion()
        if champion == instead_of:
            champion = self._create(wanted)
        # The same promotion stands if a lost answer made us send the request again, or the task runs again.
        if champion is None or (champion.number, champion.version) != (wanted.number, version):
            raise ChampionChangedError(
                f"version {version} was not promoted in {self._uri}: it was to replace {_described(instead_of)}, but "
                f"the champion is {_described(champion)} by now. Both are kept: compare them, and promote again if "
                "need be."
            )
        return champion

    def roll_back(self, *, to: str | None = None, reason: str = "rolled back") -> Promotion:
        """Make an earlier champion the champion again.

        Args:
            to: A version that has been the champion. None: the previous champion. Two calls with None go back by two
                champions.
            reason: Reason of the roll-back, for people.

        Raises:
            ChampionChangedError: Another process has promoted a version at the same time. The registry is unchanged.
            ValueError: No earlier champion exists, or `to` was never the champion or is the champion now.
            RuntimeError, OSError: As in `check`.
        """
        history = self.history()
        standing = _standing(history)
        if to is None and len(standing) < 2:
            only = ", ".join(standing) or "none"
            raise ValueError(f"there is nothing to go back to in {self._uri}: the only champion is {only}")
        if to is not None and to not in {promotion.version for promotion in history}:
            raise ValueError(f"version {to!r} has never been champion of {self._uri}; promote it if you mean it")
        return self.promote(to or standing[-2], instead_of=history[-1], reason=reason)

    # ---- Objects in the store

    def _manifest(self, version: str) -> dict[str, dict[str, Any]]:
        if not VERSION.fullmatch(version):
            raise ValueError(f"{version!r} is no version's id, such as 20260131T060000000000Z-0123456789ab")
        try:
            (found,) = self._store.read([f"versions/{version}.json"])
        except FileNotFoundError as error:
            raise ValueError(f"there is no version {version} in {self._uri}") from error
        if not version.endswith(_digest(found)):
            raise DamagedFileError(
                f"the manifest of version {version} in {self._uri} is damaged: roll back to another one"
            )
        manifest: dict[str, dict[str, Any]] = json.loads(found)
        return manifest

    def _compare(self, version: str, name: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        if found != wanted:
            raise DamagedFileError(
                f"{name} of version {version} in {self._uri} is damaged: it should have {wanted['size']:,} bytes with "
                f"SHA-256 {wanted['sha256'][:12]}..., and has {found['size']:,} with {found['sha256'][:12]}.... "
                "Roll back to another version."
            )

    def _promotions(self) -> list[str]:
        return [name for name in self._store.names("promotions") if PROMOTION.fullmatch(name)]

    def _read_promotions(self, names: Sequence[str]) -> list[Promotion]:
        return [Promotion(**json.loads(found)) for found in self._store.read([f"promotions/{name}" for name in names])]

    def _create(self, promotion: Promotion) -> Promotion:
        """Create a promotion. If another process was faster, return its promotion."""
        name = f"{promotion.number:08}.json"
        try:
            self._store.create(f"promotions/{name}", _json(asdict(promotion)))
        except OSError:
            if name not in self._promotions():
                raise
            return self._read_promotions([name])[0]
        return promotion


def _refuse(files: Mapping[str, Path]) -> None:
    problems = [
        f"{name!r}: a name is made of letters, digits, '_', '-' and '.', and begins with none of the last two"
        for name in files
        if not FILE.fullmatch(name)
    ]
    problems += [f"{name!r}: is the card's own name" for name in files if name == CARD]
    problems += [f"{name!r}: there is no file {path}" for name, path in files.items() if not path.is_file()]
    if problems:
        raise ValueError("no version was added; " + "; ".join(problems))


def _fingerprint(source: Path | bytes) -> dict[str, Any]:
    if isinstance(source, bytes):
        return {"size": len(source), "sha256": hashlib.sha256(source).hexdigest()}
    with source.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}


def _digest(manifest: bytes) -> str:
    """Return the end of a version's id, which identifies the contents of its files."""
    return hashlib.sha256(manifest).hexdigest()[:12]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode()


def _described(promotion: Promotion | None) -> str:
    return f"{promotion.version} (promotion {promotion.number})" if promotion else "none"


def _standing(history: Sequence[Promotion]) -> list[str]:
    """Return the stack of champions. A roll-back to a champion removes all later champions."""
    standing: list[str] = []
    for version in (promotion.version for promotion in history):
        standing = [*standing[: standing.index(version)], version] if version in standing else [*standing, version]
    return standing


# ---- The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.registry:
        parser.error(f"say which registry: --registry URI, or the environment variable {VARIABLE}")
    try:
        options.command(Registry(options.registry), options)
    except Exception as error:  # the store's client raises many types
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.registry", description="Shows a registry of models, and changes its champion."
    )
    parser.add_argument(
        "--registry",
        metavar="URI",
        default=os.environ.get(VARIABLE),
        help=f"a local folder or s3://bucket/prefix (default: ${VARIABLE})",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    history = commands.add_parser("history", help="the promotions, oldest first")
    history.set_defaults(command=_history)
    promote = commands.add_parser("promote", help="make a version the champion")
    promote.add_argument("version", metavar="VERSION")
    promote.add_argument("--reason", required=True)
    promote.set_defaults(command=_promote)
    back = commands.add_parser("roll-back", help="make the champion before the champion again")
    back.add_argument(
        "--to", metavar="VERSION", help="version to make the champion again (default: the one before the champion)"
    )
    back.add_argument("--reason", required=True)
    back.set_defaults(command=_roll_back)
    return parser


def _history(registry: Registry, _: argparse.Namespace) -> None:
    for promotion in registry.history():
        _print(promotion)


def _promote(registry: Registry, options: argparse.Namespace) -> None:
    _print(registry.promote(options.version, instead_of=registry.champion(), reason=options.reason))


def _roll_back(registry: Registry, options: argparse.Namespace) -> None:
    _print(registry.roll_back(to=options.to, reason=options.reason))


def _print(promotion: Promotion) -> None:
    instead = f" instead of {promotion.previous}" if promotion.previous else ""
    print(f"{promotion.number} {promotion.at} {promotion.version}{instead}: {promotion.reason}")


if __name__ == "__main__":
    sys.exit(main())
