"""The digits load from a directory, a mirror, or scikit-learn if the network is down."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchvision.datasets import MNIST

from mnist_files import as_idx, write_mnist
from tasks import digits
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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a download goes."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hub" / "mnist"


def ask_only(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)  # urllib keeps the proxies that it was first used with
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{port}/"])


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


def test_a_server_that_never_answers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "NETWORK_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ask_only(monkeypatch, server.getsockname()[1])
        assert "timed out" in load_digits().source
    assert socket.getdefaulttimeout() is None
