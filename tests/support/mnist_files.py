"""Writes digits as MNIST's own files, in torchvision's layout."""

import struct
from pathlib import Path

import torch
from torch import Tensor

from tasks.digits import FILES, Digits


def as_idx(tensor: Tensor) -> bytes:
    """A tensor as a file of bytes."""
    values = tensor.to(torch.uint8)
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.numpy().tobytes()


def write_mnist(digits: Digits, directory: Path) -> Path:
    """Fill a directory that is not there yet."""
    (directory / FILES[0]).parent.mkdir(parents=True)
    tensors = (digits.training.images, digits.training.labels, digits.test.images, digits.test.labels)
    for file, tensor in zip(FILES, tensors, strict=True):
        (directory / file).write_bytes(as_idx(tensor))
    return directory
