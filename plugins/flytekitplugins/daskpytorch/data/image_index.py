"""The index of a folder of pictures in S3, `prefix/class/image`, made from one listing."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flytekitplugins.daskpytorch.data.bucket import Listed
from flytekitplugins.daskpytorch.process.folders import replacing

logger = logging.getLogger(__name__)

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")


@dataclass(frozen=True, kw_only=True)
class ImageIndex:
    bucket: str
    prefix: str
    nested: bool
    files: Sequence[Listed]
    classes: list[str]
    targets: list[int]

    @classmethod
    def of(cls, listing: Iterable[Listed], bucket: str, prefix: str, *, nested: bool) -> ImageIndex:
        folder = prefix.strip("/") + "/" if prefix.strip("/") else ""
        files: list[Listed] = []
        others: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for listed in listing:
            kind = _kind(listed.key, folder)
            if kind == "picture" or (nested and kind == "deeper picture"):
                files.append(listed)
            else:
                others[kind] += 1
                examples.setdefault(kind, listed.key)
        uri = f"s3://{bucket}/{folder}"
        if others["deeper picture"]:
            raise ValueError(_too_deep(uri, folder, others["deeper picture"], examples["deeper picture"]))
        if not files:
            raise FileNotFoundError(_nothing(uri, others, examples))
        for kind in others.keys() - {"folder marker"}:
            logger.warning("%s: left out %d x %s, such as %s", uri, others[kind], kind, examples[kind])
        names = [listed.key.removeprefix(folder).split("/")[0] for listed in files]
        classes = sorted(set(names))
        places = {name: place for place, name in enumerate(classes)}
        targets = [places[name] for name in names]
        return cls(bucket=bucket, prefix=folder, nested=nested, files=files, classes=classes, targets=targets)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole. Other ranks may read or write it at the same time."""
        target = Path(path)
        with replacing(target, target.with_name(f".{target.name}-{uuid.uuid4().hex}")) as unfinished:
            unfinished.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ImageIndex:
        try:
            content = json.loads(Path(path).read_text())
            return cls(**{**content, "files": [Listed(*file) for file in content["files"]]})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{path} is not an index of a folder of pictures ({what}). Delete the file, and the bucket is listed "
                "again"
            ) from error


def _kind(key: str, folder: str) -> str:
    parts = key.removeprefix(folder).split("/")
    if not parts[-1]:
        return "folder marker"
    if not parts[-1].lower().endswith(IMAGE_EXTENSIONS) or parts[-1].startswith("."):
        return "file that is no picture by its name"
    if len(parts) == 1:
        return "picture in no class's folder"
    return "picture" if len(parts) == 2 else "deeper picture"


def _too_deep(uri: str, folder: str, count: int, example: str) -> str:
    first = example.removeprefix(folder).split("/")[0]
    return (
        f"{uri} has {count} pictures that lie deeper than class/picture, such as {example}. If {first!r} is a part "
        f"of the data rather than a class, name it: {uri}{first}. If {first!r} is a class, pass nested=True"
    )


def _nothing(uri: str, others: Counter[str], examples: dict[str, str]) -> str:
    there = ", ".join(f"{count} x {kind} (such as {examples[kind]})" for kind, count in others.items())
    return (
        f"{uri} has no pictures. Looked for {uri}CLASS/PICTURE with the extensions {' '.join(IMAGE_EXTENSIONS)}; "
        f"found {there or 'no object whose key begins so'}. Check bucket, prefix and endpoint"
    )
