"""The registry of models keeps versions and promotions, and refuses invalid changes."""

import hashlib
from itertools import count
from pathlib import Path

import pytest

from tasks.registry import ChampionChangedError, DamagedFileError, Registry

HOSTILE = [
    *("../x", "..", ".", "", "/etc/passwd", "a/b", "a\\b", ".hidden", "-rf", "x\n", "x\0y", "s3://b/k", "é", "x" * 101),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "registry"


@pytest.fixture
def registry(root: Path) -> Registry:
    return Registry(str(root))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "state.pt"
    path.write_bytes(b"a state")
    return path


def add(registry: Registry, state: Path, **card: object) -> str:
    return registry.add({"state.pt": state}, card)


def champions(registry: Registry, state: Path, count: int) -> list[str]:
    """Versions that were promoted one after the other."""
    versions = []
    for number in range(1, count + 1):
        versions.append(add(registry, state, number=number))
        registry.promote(versions[-1], instead_of=registry.champion(), reason=f"reason {number}")
    return versions


# ---- Versions


def test_all_files_that_cannot_be_are_named_and_nothing_is_added(registry: Registry, state: Path, root: Path) -> None:
    missing = state.with_name("missing")
    with pytest.raises(ValueError, match="no version was added") as error:
        registry.add(dict.fromkeys([*HOSTILE, "card.json", "fine.pt"], state) | {"b.pt": missing}, {})
    message = str(error.value)
    assert all(repr(name) in message for name in HOSTILE)
    assert "'card.json': is the card's own name" in message
    assert f"'b.pt': there is no file {missing}" in message
    assert "fine.pt" not in message
    assert not root.exists()


@pytest.mark.parametrize("num_written", range(3))
def test_a_version_counts_only_once_all_of_it_is_there(
    num_written: int, registry: Registry, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before one of its three writes becomes visible, as if it were killed."""
    replace, numbers = Path.replace, count()

    def end(path: Path, target: Path) -> Path:
        if next(numbers) == num_written:
            raise OSError("a power cut")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", end)
    with pytest.raises(OSError, match="power cut"):
        add(registry, state)
    assert next(numbers) == num_written + 1
    assert registry.versions() == []


@pytest.mark.parametrize("version", [*HOSTILE, "20260131T060000000000Z-0123456789ab/../../x"])
def test_a_name_that_is_no_version_reaches_no_file(version: str, registry: Registry, tmp_path: Path) -> None:
    for use in (
        registry.card,
        lambda version: registry.fetch(version, "state.pt", tmp_path),
        lambda version: registry.promote(version, instead_of=None, reason=""),
    ):
        with pytest.raises(ValueError, match="is no version's id"):
            use(version)


def test_a_manifest_that_names_files_elsewhere_writes_none(registry: Registry, root: Path, tmp_path: Path) -> None:
    manifest = b'{"../x": {"size": 1, "sha256": "ab"}}'
    version = f"20260131T060000000000Z-{hashlib.sha256(manifest).hexdigest()[:12]}"
    (root / "versions" / version).mkdir(parents=True)
    (root / "versions" / "x").write_bytes(b"x")
    (root / "versions" / f"{version}.json").write_bytes(manifest)
    with pytest.raises(ValueError, match="has no file"):
        registry.fetch(version, "../x", tmp_path / "fetched")
    assert not (tmp_path / "x").exists()


def test_a_manifest_that_is_not_what_was_added_is_refused(registry: Registry, state: Path, root: Path) -> None:
    version = add(registry, state)
    path = root / "versions" / f"{version}.json"
    path.write_text(path.read_text().replace("7", "8"))
    with pytest.raises(DamagedFileError, match=f"manifest of version {version}"):
        registry.promote(version, instead_of=None, reason="")


@pytest.mark.parametrize("found", [b"A state", b"a sta", b""])
def test_a_damaged_file_is_not_fetched(
    found: bytes, registry: Registry, state: Path, root: Path, tmp_path: Path
) -> None:
    version = add(registry, state)
    (root / "versions" / version / "state.pt").write_bytes(found)
    with pytest.raises(DamagedFileError, match=f"state.pt of version {version} .* has {len(found)} with"):
        registry.fetch(version, "state.pt", tmp_path / "fetched")
    assert list((tmp_path / "fetched").iterdir()) == []
    (root / "versions" / version / "card.json").write_bytes(found)
    with pytest.raises(DamagedFileError, match=r"card\.json"):
        registry.card(version)


def test_a_link_that_leads_out_of_the_registry_is_not_followed(
    registry: Registry, state: Path, root: Path, tmp_path: Path
) -> None:
    version = add(registry, state)
    path = root / "versions" / version / "state.pt"
    path.unlink()
    path.symlink_to(state)
    with pytest.raises(PermissionError, match="outside the registry"):
        registry.fetch(version, "state.pt", tmp_path / "fetched")


# ---- Promotions


@pytest.mark.parametrize("number_known", [0, 1])
def test_who_knows_an_old_champion_does_not_promote(number_known: int, registry: Registry, state: Path) -> None:
    champions(registry, state, 2)
    before = registry.history()
    known = before[number_known - 1] if number_known else None
    late = add(registry, state, late=True)
    with pytest.raises(ChampionChangedError, match=rf"{late} was not promoted.*champion is .* \(promotion 2\)"):
        registry.promote(late, instead_of=known, reason="late")
    assert registry.history() == before
    assert late in registry.versions()


def test_two_roll_backs_go_back_by_two(registry: Registry, state: Path) -> None:
    first, second, third = champions(registry, state, 3)
    assert registry.roll_back(reason="bad").version == second
    assert registry.roll_back(reason="bad, too").version == first
    with pytest.raises(ValueError, match=f"nothing to go back to in .*: the only champion is {first}"):
        registry.roll_back()
    assert [promotion.version for promotion in registry.history()] == [first, second, third, second, first]


def test_a_roll_back_to_a_version_takes_only_former_champions(registry: Registry, state: Path) -> None:
    first, _, third = champions(registry, state, 3)
    challenger = add(registry, state)
    assert registry.roll_back(to=first).version == first
    assert registry.roll_back(to=third).version == third  # and forth again
    for never in (challenger, "../x"):
        with pytest.raises(ValueError, match="has never been champion"):
            registry.roll_back(to=never)
    with pytest.raises(ValueError, match="already"):
        registry.roll_back(to=third)


# ---- Where it can be


def test_a_place_that_cannot_be_written_is_told_before_a_training(state: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot be written"):
        Registry(f"file://{state}/registry").check()
