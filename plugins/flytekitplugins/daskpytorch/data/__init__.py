"""Training data: pictures in S3, partitions on Dask workers, samplers for ranks.

Runs in ranks, but `DaskPartitions` is made in the driver.
"""

from flytekitplugins.daskpytorch.data.bucket import ChangedError, DamagedTransferError
from flytekitplugins.daskpytorch.data.image_folder import BrokenImageError, S3ImageFolder
from flytekitplugins.daskpytorch.data.partitions import DaskPartitions, Share
from flytekitplugins.daskpytorch.data.rank_loader import RankLoader, ReadAhead, split_by_class

__all__ = [
    "BrokenImageError",
    "ChangedError",
    "DamagedTransferError",
    "DaskPartitions",
    "RankLoader",
    "ReadAhead",
    "S3ImageFolder",
    "Share",
    "split_by_class",
]
