"""The generated photographs: equal for equal seeds, with twenty breeds, of many sizes."""

from pathlib import Path

from tasks.photos import BREEDS, write_photos


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}


def test_photos_are_of_all_breeds_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first = content(write_photos(tmp_path / "first", num_per_class=3, seed=1))
    assert sorted(first) == sorted(f"{breed}/{number:04}.jpg" for breed in BREEDS for number in range(3))
    assert content(write_photos(tmp_path / "again", num_per_class=3, seed=1)) == first
    others = content(write_photos(tmp_path / "other", num_per_class=3, seed=2))
    assert len(set(first.values()) | set(others.values())) == 2 * len(first)
