"""Makes the journals of `tests/golden` by real runs: `python tests/support/golden_runs.py`.

The tests make pages, terminal lines and trackers' calls from these journals, which are made again only if the events
have changed.
"""

import multiprocessing
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from distributed import Client

from flytekitplugins.daskpytorch import Evaluate, Gang, LogRecord, Observer, current_rank, dispatch
from flytekitplugins.daskpytorch.protocol import host

GOLDEN = Path(__file__).parents[1] / "golden"


def train(num_steps: int = 30, die_at: tuple[int, ...] = ()) -> float:
    """Log 30 steps in three epochs, and save each tenth state. Attempt n dies at the nth step of `die_at`."""
    rank = current_rank()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    first = (rank.checkpoint.load() or -1) + 1
    for step in range(first, num_steps):
        time.sleep(0.02)
        metrics: dict[str, Any] = {"loss": 1 / (1 + step), "epoch": 1 + step // 10}
        if step % 10 == 9:
            metrics["val_loss"] = 1.5 / (1 + step)
            rank.checkpoint.save(step, step)
            rank.checkpoint.flush()
        rank.log(metrics, step=step, num_steps=num_steps)
        if rank.rank == 1 and die_at[attempt : attempt + 1] == (step,):
            os._exit(3 + attempt)
        rank.should_stop()
    return 1 / num_steps


def learn(num_steps: int) -> float:
    """Take optimizer steps for more than a minute, after which the goodput is shown."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    for step in range(num_steps):
        time.sleep(2.2)
        optimizer.zero_grad()
        (loss := weight.square().sum()).backward()
        optimizer.step()
        current_rank().log({"loss": loss.item()}, step=step, num_steps=num_steps)
    return loss.item()


class Killing(Observer):
    """Kills the driver at step 15."""

    def on_log(self, record: LogRecord) -> None:
        if record.step == 15:
            os.kill(os.getpid(), signal.SIGKILL)


class Preempting(Observer):
    """Ends the gang at step 15, as a SIGTERM of the driver's pod does."""

    def on_log(self, record: LogRecord) -> None:
        if record.step == 15:
            host.preempt_all("the pod was told to end")


def held_out() -> dict[str, float]:
    """Evaluate a state, which is the number of its step."""
    return {"held_out_loss": 2.0 / (1 + (current_rank().checkpoint.load() or 0))}


def size(experiment: dict[str, int]) -> float:
    """Train a model of a sweep."""
    for step in range(experiment["steps"]):
        current_rank().log({"loss": 1 / (1 + step)}, step=step)
    if experiment["steps"] == 2:
        raise ValueError("two steps are too few")
    return 1.0


def plain(client: Client) -> None:
    dispatch.run(client, train, gang=Gang(key="plain")).result()


def long(client: Client) -> None:
    dispatch.run(client, learn, 30, gang=Gang(key="long")).result()


def killed(client: Client) -> None:
    dispatch.run(client, train, gang=Gang(key="killed", observers=(Killing,))).result()


def restarts(client: Client) -> None:
    dispatch.run(client, train, die_at=(4, 12, 25), gang=Gang(key="restarts", max_restarts=3)).result()


def failed(client: Client) -> None:
    dispatch.run(client, train, die_at=(4,), gang=Gang(key="failed", max_restarts=0)).exception()


def preemption(client: Client) -> None:
    dispatch.run(client, train, gang=Gang(key="preemption", observers=(Preempting,))).exception()


def evaluation(client: Client) -> None:
    gang = Gang(key="evaluation", evaluate=Evaluate(held_out, workers=1))
    dispatch.run(client, train, gang=gang).result()


def staying(client: Client) -> None:
    with dispatch.gang(client, gang=Gang(key="staying")) as gang:
        gang.call(train, 5).result()
        gang.call(size, {"steps": 2}).exception()


def sweep(client: Client) -> None:
    models = dispatch.map(client, size, [{"steps": steps} for steps in (1, 2, 3)], gang=Gang(key="sweep"))
    for model in models:
        model.exception()


RUNS: tuple[Callable[[Client], None], ...] = (
    plain,
    long,
    killed,
    restarts,
    failed,
    preemption,
    evaluation,
    staying,
    sweep,
)


def drive(run: Callable[[Client], None], folder: str) -> None:
    os.environ |= {"DASKPYTORCH_JOURNAL": folder, "XDG_CACHE_HOME": f"{folder}/cache", "DASKPYTORCH_PRICE": "core=0.5"}
    workers = 3 if run is evaluation else 2
    with Client(n_workers=workers, threads_per_worker=1, dashboard_address=None) as client:
        run(client)


def make(run: Callable[[Client], None]) -> None:
    """Make the journals of one run, without names of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("fork").Process(target=drive, args=(run, folder))
        process.start()
        process.join()
        for number, journal in enumerate(sorted(Path(folder).glob("*.jsonl"))):
            text = journal.read_text().replace(platform.node(), "ada").replace(folder, "/runs")
            text = text.replace(str(GOLDEN.parents[1]), "/project")
            text = re.sub(r"\d{8}-\d{6}-[0-9a-f]{6}", "20261128-120000-0123ab", text)
            name = run.__name__ if run is not sweep else f"sweep-{number}"
            (GOLDEN / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in RUNS:
        if each.__name__ in sys.argv[1:] or not sys.argv[1:]:
            make(each)
