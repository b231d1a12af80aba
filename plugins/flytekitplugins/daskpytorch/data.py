"""Training data: folders of pictures in S3, their splits and the ranks' batches. Runs in drivers and in ranks."""

from __future__ import annotations

from flytekitplugins.daskpytorch.sampling import RankBatches, split_by_class

__all__ = ["RankBatches", "split_by_class"]
