"""Reads the digits of the MNIST example from a directory, the network or scikit-learn. Runs in tasks."""

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
"""Files in torchvision's directory."""
HOST = "ossci-datasets.s3.amazonaws.com"
"""Host of torchvision's first mirror."""
NETWORK_TIMEOUT = 5.0
"""Timeout for a server's answer, in seconds. All addresses of the first mirror together take a minute."""
TEST_SHARE = 0.2
"""Share of scikit-learn's digits that become the test set, as they have none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DigitSet:
    """Pictures of digits, with their labels."""

    images: Tensor
    """Pictures, (num_images, 28, 28), uint8: 0 is the background, 255 the ink."""
    labels: Tensor
    """Labels, (num_images,), int64, from 0 to 9."""

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
        """Return the digits on this device."""
        return DigitSet(images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, kw_only=True, eq=False)
class Digits:
    """Training and test digits."""

    training: DigitSet
    test: DigitSet
    source: str
    """Source of the digits, with a reason for other sources than MNIST."""

    @property
    def report(self) -> str:
        """Return a line for people: the numbers of digits and their source."""
        return f"{len(self.training):,} training and {len(self.test):,} test digits from {self.source}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the digits to one file. Equal digits give equal bytes, whatever their source."""
        torch.save([self.training.images, self.training.labels, self.test.images, self.test.labels], path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Digits:
        """Read a file that `save` wrote."""
        images, labels, test_images, test_labels = torch.load(path, weights_only=True)
        return cls(
            training=DigitSet(images=images, labels=labels),
            test=DigitSet(images=test_images, labels=test_labels),
            source=os.fspath(path),
        )


def load_digits(directory: str | os.PathLike[str] | None = None, *, source: str | None = None, seed: int = 0) -> Digits:
    """Read MNIST from a directory, or download it, or fall back to scikit-learn's small digits.

    Torch's cache (`~/.cache/torch/hub/mnist`, or below `TORCH_HOME`) keeps a download, which happens only once.

    Args:
        directory: A directory that `torchvision.datasets.MNIST(directory, download=True)` fills. None: download MNIST.
        source: Name of the directory in reports and errors, if it is a copy.
        seed: Seed of the test set of scikit-learn's digits. MNIST has its own test set.

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
    """Return the 1,797 digits of 8x8 pixels of scikit-learn, enlarged.

    Args:
        seed: Seed that decides which fifth of the digits is the test set.
    """
    from sklearn.datasets import load_digits as load_small  # the import takes a second

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
    """Read a directory with torchvision's layout.

    Raises:
        ValueError: Files are missing, or cannot be read.
    """
    from torchvision.datasets import MNIST  # the import takes a second, which the ranks save

    if missing := [file for file in FILES if not (directory / file).is_file()]:
        raise ValueError(
            f"{source} does not hold MNIST in torchvision's layout: {', '.join(missing)} not found. Give the directory "
            "that has MNIST/raw in it, unpacked, as torchvision.datasets.MNIST(directory, download=True) makes it; or "
            "give none, and MNIST is downloaded."
        )
    try:
        parts = [MNIST(os.fspath(directory), train=train) for train in (True, False)]
        training, test = (DigitSet(images=part.data, labels=part.targets) for part in parts)
    except Exception as error:  # torchvision checks little, so damaged files raise many types
        raise ValueError(
            f"cannot read the digits in {source}: {error or type(error).__name__}. The likely cause is a copy or a "
            "download that was cut off; get the files anew."
        ) from error
    return Digits(training=training, test=test, source=source)


def _download() -> Path:
    """Return the directory of the downloaded MNIST. Download it if needed."""
    from torchvision.datasets import MNIST

    home = Path(torch.hub.get_dir(), "mnist")
    with _impatient(NETWORK_TIMEOUT):
        MNIST(os.fspath(home), download=True)
    return home


@contextlib.contextmanager
def _impatient(seconds: float) -> Iterator[None]:
    """Set a timeout for the network. Torchvision has no timeout, so a firewall that drops packets would hang it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _instead(small: Digits, error: Exception) -> Digits:
    """Return the substitute digits, whose source tells the reason."""
    problem = " ".join(str(error).split()) or type(error).__name__
    source = (
        f"{small.source}, because MNIST could not be downloaded: {problem}. For MNIST itself give data_dir a directory "
        f"that has MNIST/raw in it, or let this machine reach {HOST}"
    )
    return replace(small, source=source)
