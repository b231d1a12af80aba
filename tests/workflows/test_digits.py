"""The digits load from a directory, a mirror, or scikit-learn if the network is down."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mnist_files import as_idx, write_mnist
from tasks.digits import FILES, Digits, DigitSet, load_digits


def noise(count: int) -> DigitSet:
    """Images of noise, labels in order."""
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(256, (count, 28, 28), dtype=torch.uint8, generator=generator)
    return DigitSet(images=images, labels=torch.arange(count) % 10)


DIGITS = Digits(training=noise(30), test=noise(20), source="")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_mnist(DIGITS, tmp_path / "digits")


def tensors(loaded: Digits) -> list[Tensor]:
    return [loaded.training.images, loaded.training.labels, loaded.test.images, loaded.test.labels]


def test_a_file_of_digits_depends_on_their_content_only(directory: Path, tmp_path: Path) -> None:
    files = [tmp_path / "here" / "digits.pt", tmp_path / "there" / "digits.pt"]
    for number, file in enumerate(files):
        file.parent.mkdir()
        load_digits(directory, source=f"place {number}").save(file)
    assert files[0].read_bytes() == files[1].read_bytes()
    for found, expected in zip(tensors(Digits.load(files[0])), tensors(DIGITS), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (FILES[0], b"", ""),
        (FILES[0], b"<html>not found</html>", ""),
        (FILES[0], as_idx(torch.zeros(30, 28, 28, dtype=torch.uint8))[:-1], ""),
        (FILES[0], as_idx(torch.zeros(30, 8, 8, dtype=torch.uint8)), r"images of shape \(30, 8, 8\)"),
        (FILES[2], as_idx(torch.zeros(19, 28, 28, dtype=torch.uint8)), "for 20 labels"),
        (FILES[3], as_idx(torch.full((20,), 10, dtype=torch.uint8)), r"the labels \[10\] are no digits"),
    ],
)
def test_damaged_files(directory: Path, file: str, content: bytes, said: str) -> None:
    (directory / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"cannot read the digits in {directory}: .*{said}.*get the files anew"):
        load_digits(directory)
