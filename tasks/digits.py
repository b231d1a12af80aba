"""The data of the MNIST example: handwritten digits from a directory, the network or scikit-learn. Runs in tasks."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses
from torch import Tensor

FILES = tuple(f"MNIST/raw/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
"""What torchvision's directory holds."""
HOST = "ossci-datasets.s3.amazonaws.com"
"""The first mirror that torchvision asks."""
NETWORK_TIMEOUT = 5.0
"""Seconds of silence from a server. Of the first mirror's addresses each is waited for in turn: a minute in all."""
TEST_SHARE = 0.2
"""Of scikit-learn's digits, which come without a test set."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DigitSet:
    """Pictures of digits, and which digits they are."""

    images: Tensor
    """(num_images, 28, 28), uint8: 0 is the background, 255 the ink."""
    labels: Tensor
    """(num_images,), int64, from 0 to 9."""

    def __post_init__(self) -> None:
        shape, num_labels = tuple(self.images.shape), len(self.labels)
        if shape != (num_labels, 28, 28) or not num_labels:
            raise ValueError(
                f"images of shape {shape} for {num_labels} labels: must be ({num_labels or 'some'}, 28, 28)"
            )
        if strangers := sorted(set(self.labels.tolist()) - set(range(10))):
            raise ValueError(f"the labels {strangers[:10]} are no digits")

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> DigitSet:
        """The same digits on this device."""
        return DigitSet(images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, kw_only=True, eq=False)
class Digits:
    """What to train on, and what to test on."""

    training: DigitSet
    test: DigitSet
    source: str
    """Where they come from, and why not from elsewhere."""

    @property
    def report(self) -> str:
        """One line for people."""
        return f"{len(self.training):,} training and {len(self.test):,} test digits from {self.source}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them to one file: the same digits make the same bytes, wherever they came from."""
        torch.save([self.training.images, self.training.labels, self.test.images, self.test.labels], path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Digits:
        """Read what `save` wrote."""
        images, labels, test_images, test_labels = torch.load(path, weights_only=True)
        return cls(
            training=DigitSet(images=images, labels=labels),
            test=DigitSet(images=test_images, labels=test_labels),
            source=os.fspath(path),
        )


def load_digits(directory: str | os.PathLike[str] | None = None, *, source: str | None = None, seed: int = 0) -> Digits:
    """Read MNIST from a directory, else download it, else take the small digits that scikit-learn brings.

    A download is kept in torch's cache (`~/.cache/torch/hub/mnist`, or below `TORCH_HOME`) and made once.

    Args:
        directory: What `torchvision.datasets.MNIST(directory, download=True)` fills; None to download.
        source: What to call the directory in reports and errors, where it is a copy.
        seed: Decides which of scikit-learn's digits are held out as the test set; MNIST has its own.

    Raises:
        ValueError: The directory has no digits in torchvision's layout, or they cannot be read.
    """
    if directory is not None:
        return _read(Path(directory), source or os.fspath(directory))
    try:
        home = _download()
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        return _instead(small_digits(seed), error)
    return _read(home, f"MNIST in {home}")


def small_digits(seed: int) -> Digits:
    """The 1,797 digits of 8x8 pixels that scikit-learn brings, enlarged.

    Args:
        seed: Decides which fifth of them is the test set.
    """
    from sklearn.datasets import load_digits as load_small  # takes a second to import, too

    small = load_small()
    pixels = torch.from_numpy(small.images).float() * (255 / 16)
    images = F.interpolate(pixels[:, None], size=(28, 28), mode="bilinear")[:, 0].round().to(torch.uint8)
    labels = torch.from_numpy(small.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, training = order.tensor_split([round(TEST_SHARE * len(order))])
    return Digits(
        training=DigitSet(images=images[training], labels=labels[training]),
        test=DigitSet(images=images[test], labels=labels[test]),
        source="scikit-learn (8x8 pixels, enlarged)",
    )


def _read(directory: Path, source: str) -> Digits:
    """Read torchvision's layout.

    Raises:
        ValueError: It is not there, or cannot be read.
    """
    from torchvision.datasets import MNIST  # takes a second to import, which the ranks need not spend

    if missing := [file for file in FILES if not (directory / file).is_file()]:
        raise ValueError(
            f"{source} does not hold MNIST in torchvision's layout: {', '.join(missing)} not found. Give the directory "
            "that has MNIST/raw in it, unpacked, as torchvision.datasets.MNIST(directory, download=True) makes it; or "
            "give none, and MNIST is downloaded."
        )
    try:
        parts = [MNIST(os.fspath(directory), train=train) for train in (True, False)]
        training, test = (DigitSet(images=part.data, labels=part.targets) for part in parts)
    except Exception as error:  # torchvision checks little, and damaged files end in errors of any kind
        raise ValueError(
            f"cannot read the digits in {source}: {error or type(error).__name__}. The likely cause is a copy or a "
            "download that was cut off; get the files anew."
        ) from error
    return Digits(training=training, test=test, source=source)


def _download() -> Path:
    """The directory of the downloaded MNIST, after the download where it was not made before."""
    from torchvision.datasets import MNIST

    home = Path(torch.hub.get_dir(), "mnist")
    with _impatient(NETWORK_TIMEOUT):
        MNIST(os.fspath(home), download=True)
    return home


@contextlib.contextmanager
def _impatient(seconds: float) -> Iterator[None]:
    """Bound every wait for the network: torchvision does not, and a firewall that drops packets would hang it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _instead(small: Digits, error: Exception) -> Digits:
    """The digits to make do with; they say why."""
    problem = " ".join(str(error).split()) or type(error).__name__
    source = (
        f"{small.source}, because MNIST could not be downloaded: {problem}. For MNIST itself give data_dir a directory "
        f"that has MNIST/raw in it, or let this machine reach {HOST}"
    )
    return replace(small, source=source)
