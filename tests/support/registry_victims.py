"""Two processes that retrain at the same time. A script of the tests."""

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tasks.registry import ChampionChangedError, Registry

BARRIER = multiprocessing.get_context("fork").Barrier(2)


def race(uri: str, options: dict[str, Any], folder: Path, num_rounds: int) -> list[list[bool]]:
    """Two processes that promote at the same moment, again and again: for each, in which rounds it won."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        rivals = [pool.submit(retrain_often, uri, options, folder / name, num_rounds) for name in ("old", "new")]
        return [rival.result() for rival in rivals]


def retrain_often(uri: str, options: dict[str, Any], state: Path, num_rounds: int) -> list[bool]:
    registry = Registry(uri, options)
    return [retrains(registry, state) for _ in range(num_rounds)]


def retrains(registry: Registry, state: Path) -> bool:
    """Whether this one won."""
    champion = registry.champion()
    version = registry.add({"state.pt": state}, {"state": state.name})
    BARRIER.wait()
    try:
        registry.promote(version, instead_of=champion, reason=state.name)
    except ChampionChangedError:
        return False
    else:
        return True
    finally:
        BARRIER.wait()


if __name__ == "__main__":
    uri, given, folder, num_rounds = sys.argv[1:]
    print(json.dumps(race(uri, json.loads(given), Path(folder), int(num_rounds))))
