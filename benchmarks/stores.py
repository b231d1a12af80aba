"""Measure `dispatch.map` of a data frame's groupby: a trivial model for each of 10,000 keys, on two workers.

    python benchmarks/stores.py               # three rounds, about four minutes
    python benchmarks/stores.py --quick       # one round of 200 keys, as a trial

Plain Dask's `groupby.apply` trains the same models on the same cluster, and joblib in two processes, if installed. The
time is from the call to the table, on a cluster or pool that has trained once. The workers make the rows.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

from figures import Figure, report
from running import Program, asked, nothing_left, take_turns

PROGRAM = """
import resource, sys, time
import dask.dataframe, numpy, pandas
from distributed import Client
from flytekitplugins.daskpytorch import dispatch

def train(store, rows):
    slope, level = numpy.polyfit(rows["day"], rows["sales"], 1)
    return {"slope": slope, "level": level}

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def sales(day, count):
    stores = numpy.arange(count)
    return pandas.DataFrame({"store": stores, "day": day, "sales": (stores + day) % 97})

def gang(client, frame):
    return len(dispatch.map(client, train, frame.groupby("store"), models_per_worker=1).to_frame())

def of_group(rows):
    return pandas.Series(train(None, rows))

def plain(client, frame):
    return len(frame.groupby("store").apply(of_group, meta={"slope": float, "level": float}).compute())

def pool(client, frame):
    import joblib
    groups = frame.compute().groupby("store")
    return len(joblib.Parallel(n_jobs=2)(joblib.delayed(train)(store, rows) for store, rows in groups))

if __name__ == "__main__":
    way, count = globals()[sys.argv[1]], int(sys.argv[2])
    frame = dask.dataframe.from_map(sales, range(10), count=count)
    with Client(n_workers=2, threads_per_worker=1) as client:
        way(client, frame)
        before, began = peak(), time.perf_counter()
        assert way(client, frame) == count
        print("@seconds", time.perf_counter() - began, flush=True)
        print("@memory", peak() - before, flush=True)
"""


def measure(way: str, folder: Path, num_keys: int) -> tuple[float, float]:
    """Return the seconds that a way takes for all keys, and what the driver's peak memory grows by, in MiB."""
    program = Program.of(PROGRAM, folder, way, str(num_keys))
    found = float(program.hear("seconds")), float(program.hear("memory"))
    if program.wait():
        raise program.failure("failed")
    return found


if __name__ == "__main__":
    options = asked(__doc__, rounds=(3, 1, "rounds that count"), keys=(10_000, 200, "keys of the frame"))
    peers = {"plain": "Dask's `groupby.apply`"} | ({"pool": "joblib"} if find_spec("joblib") else {})
    with nothing_left("stores") as folder:
        ways = {way: partial(measure, way, folder, options.keys) for way in ("gang", *peers)}
        found = take_turns(ways, options.rounds, uncounted=0)
    seconds = {way: [each for each, _ in turns] for way, turns in found.items()}
    what = f"models of {options.keys:,} keys of a Dask frame"
    theirs = {name: seconds[way] for way, name in peers.items()}
    quickest = Figure.beside_quickest(theirs, what=what, here=seconds["gang"])
    grown = [growth for _, growth in found["gang"]]
    what = f"{what}: growth of the driver's peak memory"
    report([quickest, Figure(what=what, unit="MiB", here=grown)], options.on)
