"""Whatever a user may ask for either works or is refused before anything starts, in words that name what is wrong."""

from __future__ import annotations

import json
import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from flytekit import Resources, Secret
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flytekitplugins.daskpytorch import (
    DaskCluster,
    DaskDDP,
    EarlyStopping,
    Gang,
    Keep,
    Scheduler,
    SpawnDDP,
    StrictInputs,
    Wandb,
    WorkerGroup,
    current_rank,
    dispatch,
)
from flytekitplugins.daskpytorch.data.sampling import RankBatches, split_by_class
from flytekitplugins.daskpytorch.display import wandb as wandb_run
from flytekitplugins.daskpytorch.driver import futures
from flytekitplugins.daskpytorch.driver import request as calls
from flytekitplugins.daskpytorch.driver.blame import FailurePolicy
from flytekitplugins.daskpytorch.driver.request import Keys
from flytekitplugins.daskpytorch.driver.retention import retained
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.node.own_node import OwnNode
from flytekitplugins.daskpytorch.protocol.orders import Job, environment
from flytekitplugins.daskpytorch.protocol.placement import Node, choose_backend, place_ranks
from flytekitplugins.daskpytorch.protocol.sharded import WrittenShards
from flytekitplugins.daskpytorch.sweep.trials import Trials
from processes import nothing_left_behind
from test_task import make, serialised

thoroughly = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

MAX_MESSAGE = 500
"""Characters for each thing that is wrong."""


class Unwritable:
    """A value of a user's whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


HOSTILE = st.sampled_from(
    [
        *(0, -1, 1 << 31, 1 << 63, 10**400, 10**5_000, 1e308, 5e-324),
        *("", " ", "\0", "\ud800", "auto", "x" * 100_000, "../..", "a\nb"),
        *(b"", b"x" * 100_000, [None] * 50_000, {1: 2}, {"a"}, object(), Gang, Unwritable(), Gang(), Resources()),
    ]
)
ANYTHING = st.one_of(
    HOSTILE,
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)
COUNTS = st.integers(1, 5)
SECONDS = st.floats(1e-3, 2_000_000) | st.integers(1, 2_000_000)
WORDS = st.text(min_size=1, max_size=10)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Values for some of the fields: mostly such as make sense, now and then any."""
    mixed = {name: st.one_of(sensible, sensible, sensible, ANYTHING) for name, sensible in fields.items()}
    return st.fixed_dictionaries({}, optional=mixed)


GANG = some(
    backend=st.sampled_from(["auto", "gloo", "nccl"]),
    devices=st.sampled_from(["own", "all"]),
    ranks_per_worker=COUNTS | st.just("auto"),
    min_workers=COUNTS | st.none(),
    max_restarts=st.integers(0, 5),
    start_timeout=SECONDS,
    hang_timeout=SECONDS | st.sampled_from(["auto", None]),
    key=st.from_regex(r"\A\w[\w.-]{0,9}\Z", fullmatch=True) | st.none(),
    keep=st.builds(Keep, last=COUNTS),
)
WANDB = st.builds(
    lambda project, rest: {"project": project, **rest},
    st.one_of(WORDS, WORDS, WORDS, ANYTHING),
    some(
        entity=WORDS,
        secret=st.just(Secret(group="wandb", key="key")),
        mode=st.sampled_from(["offline", "disabled"]),
        id=WORDS,
        name=WORDS,
        group=WORDS,
        tags=st.lists(WORDS, max_size=3).map(tuple),
        config=st.dictionaries(WORDS, ANYTHING, max_size=3),
        host=st.just("https://wandb.ai"),
        dir=WORDS,
    ),
)
RESOURCES = st.builds(Resources, cpu=st.sampled_from([None, "2", "500m"]), gpu=st.sampled_from([None, "0", "2", 4]))
PODS = {"image": st.sampled_from([None, "image:v1"]), "requests": RESOURCES, "limits": RESOURCES}


def tried(call: Callable[[], Any]) -> tuple[Any, str]:
    """What comes of it, or the text of the refusal."""
    try:
        return call(), ""
    except ValueError as error:
        return None, str(error)


def built(kind: Any, values: dict[str, Any]) -> Any | None:
    """What is made of them, or None where they are refused, as they should be."""
    made, refusal = tried(lambda: kind(**values))
    if refusal:
        named = re.findall(r"(?:^|; )[\w.]+\((\w+)", refusal)
        assert named, refusal[:1_000]
        assert set(named) <= values.keys()
        assert len(refusal) < MAX_MESSAGE * len(named)
        assert "must be" in refusal
    return made


@thoroughly
@given(GANG)
def test_gangs(values: dict[str, Any]) -> None:
    gang = built(Gang, values)
    if gang is None:
        return
    assert pickle.loads(pickle.dumps(gang)) == gang
    for seconds in (each for each in (gang.start_timeout, gang.hang_timeout) if each not in {None, "auto"}):
        assert timedelta(seconds=seconds) > timedelta(0)
        assert 1_000 * seconds < 2**31  # what waits for sockets counts in milliseconds
    assert FailurePolicy(gang.max_restarts).limit >= 0
    taken = Keys().take(len, gang.key, ["-0", "-1"], object())
    assert all(re.fullmatch(r"[\w.-]+", key, re.ASCII) for key in taken)
    ranks = 1 if gang.ranks_per_worker == "auto" else min(gang.ranks_per_worker, 8)
    nodes = [_node(f"tcp://10.0.0.{index}:1", ranks) for index in range(2)]
    places = place_ranks(nodes, ranks, gang.devices)
    backend = choose_backend(gang.backend, nodes, places)
    job = Job(
        gang="gang",
        attempt=0,
        call=b"",
        backend=backend,
        store=("127.0.0.1", 1),
        timeout=gang.start_timeout,
        devices=gang.devices,
        max_restarts=gang.max_restarts,
    )
    variables = environment({}, places[1][0], job, "lo", Path("/scratch"))
    assert variables["WORLD_SIZE"] == str(2 * ranks)
    visible = variables["CUDA_VISIBLE_DEVICES"].split(",")
    assert int(variables["LOCAL_RANK"]) < len(visible)  # it names a device
    assert all(isinstance(value, str) for value in variables.values())


def _node(worker: str, num_gpus: int) -> Node:
    gpus = tuple(map(str, range(num_gpus)))
    return Node(
        worker=worker, host=worker, num_cores=2, gpus=gpus, gpu_names=gpus, interface="lo", versions={"torch": "2"}
    )


@thoroughly
@given(some(metric=WORDS, mode=st.sampled_from(["min", "max"]), reduction_factor=COUNTS, grace_period=COUNTS))
def test_early_stopping(values: dict[str, Any]) -> None:
    stop = built(EarlyStopping, {"metric": "loss", **values})
    if stop is not None:
        assert pickle.loads(pickle.dumps(stop)) == stop
        Trials(stop, 3)


@thoroughly
@given(some(last=COUNTS, best=st.integers(0, 3), metric=WORDS | st.none(), mode=st.sampled_from(["min", "max"])))
def test_keep(values: dict[str, Any]) -> None:
    keep = built(Keep, values)
    if keep is not None:
        assert pickle.loads(pickle.dumps(keep)) == keep
        entries = [
            WrittenShards(
                attempt=0,
                number=step,
                step=step,
                parts=(),
                items=(),
                state=None,
                metrics={str(keep.metric): 1.0 / step},
            )
            for step in range(1, 9)
        ]
        staying = retained(entries, keep)
        assert staying[-1] is entries[-1]
        assert max(keep.last, keep.best) <= len(staying) <= keep.last + keep.best


@thoroughly
@given(WANDB)
def test_wandb(values: dict[str, Any]) -> None:
    wandb = built(Wandb, values)
    if wandb is None:
        return
    link = wandb_run.console_link(wandb)
    assert all(isinstance(value, str) and value.encode() for value in link.values())
    if wandb.mode is not None:
        run = wandb_run.begin(wandb, task="flows.train", execution="f3a")()
        assert re.fullmatch(r"[^/\\#?%:]{1,128}", run.id)


@thoroughly
@given(
    st.sampled_from([DaskDDP, DaskCluster, SpawnDDP]),
    some(number_of_workers=COUNTS, **PODS),
    some(**PODS),
    st.one_of(GANG, ANYTHING),
    st.one_of(WANDB, st.none(), ANYTHING),
    some(nproc=COUNTS | st.just("auto"), start_method=st.just("spawn"), start_timeout=SECONDS),
)
def test_task_configs(kind: Any, workers: Any, scheduler: Any, gang: Any, wandb: Any, rest: dict[str, Any]) -> None:
    values = {
        "workers": WorkerGroup(**{"number_of_workers": 2, **workers}),
        "scheduler": Scheduler(**scheduler),
        "gang": built(Gang, gang) or Gang() if isinstance(gang, dict) and gang.keys() <= vars(Gang()).keys() else gang,
        "wandb": built(Wandb, wandb) if isinstance(wandb, dict) and "project" in wandb else wandb,
        **rest,
    }
    allowed = kind.__dataclass_fields__.keys()
    config = built(kind, {name: value for name, value in values.items() if name in allowed})
    if config is None:
        return
    template = serialised(make(config))
    assert template.to_flyte_idl().SerializeToString()
    if kind is not SpawnDDP:
        assert template.custom["workers"]["numberOfWorkers"] == config.num_workers
    if kind is DaskDDP:
        assert config.ranks_per_worker >= 1


@thoroughly
@given(
    st.sampled_from([dispatch.run, dispatch.map]),
    ANYTHING,
    st.one_of(ANYTHING, st.just(len)),
    ANYTHING,
    some(
        gang=st.none(),
        backend=st.just("gloo"),
        pass_local_rank=st.booleans(),
        stop_early=st.none(),
        wandb=st.none(),
    ),
)
def test_calls_without_a_client(call: Any, client: Any, function: Any, experiments: Any, rest: dict[str, Any]) -> None:
    """Nobody is asked anything: all are refused."""
    own = {dispatch.run: ("gang", "pass_local_rank"), dispatch.map: ("gang", "stop_early", "wandb")}[call]
    values = {"client": client, "pytorch_function": function, **{name: rest[name] for name in own if name in rest}}
    if call is dispatch.map:
        values["experiments"] = experiments
    assert built(call, values) is None


@dataclass
class Inputs(StrictInputs):
    """A user's, of every kind that JSON has."""

    epochs: int = 1
    rate: float = 0.1
    shuffle: bool = False
    name: str = ""
    layers: list[int] = field(default_factory=list)
    seed: int | None = None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@thoroughly
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "epochs": st.integers() | JSON,
            "rate": st.floats(allow_nan=False) | JSON,
            "shuffle": st.booleans() | JSON,
            "name": st.text() | JSON,
            "layers": st.lists(st.integers()) | JSON,
            "seed": st.integers() | JSON,
            "epoch": st.just(1),
        },
    )
)
def test_inputs_are_what_was_given_or_refused(given_values: dict[str, Any]) -> None:
    made, refusal = tried(lambda: Inputs.from_json(json.dumps(given_values)))
    if refusal:
        assert refusal.startswith("Inputs")
        assert len(refusal) < MAX_MESSAGE
        return
    taken = asdict(made)
    for name, value in given_values.items():
        assert taken[name] == value
        assert isinstance(taken[name], bool) == isinstance(value, bool)


@thoroughly
@given(
    held_out=st.one_of(st.floats(0.1, 0.9), ANYTHING),
    seed=st.one_of(st.integers(), ANYTHING),
    batch_size=st.one_of(COUNTS, ANYTHING),
    world_size=st.one_of(COUNTS, ANYTHING.filter(lambda value: value is not None)),
    epoch=st.integers(0, 1_000),
)
def test_samplers(held_out: Any, seed: Any, batch_size: Any, world_size: Any, epoch: int) -> None:
    sides, refusal = tried(lambda: split_by_class([0, 1] * 20, held_out, seed))
    if not refusal:
        training, tests = sides
        assert sorted(training + tests) == list(range(40))
        batches, refusal = tried(lambda: RankBatches(training, batch_size, seed=seed, rank=0, world_size=world_size))
    if refusal:
        assert re.search("(held_out|seed|batch_size|world_size|rank)=|items", refusal)
        assert len(refusal) < 4 * MAX_MESSAGE
        return
    batches.set_epoch(epoch)
    assert sum(map(len, batches)) <= len(training)


# ---- Real gangs


def echo(*args: Any, **kwargs: Any) -> tuple[int, int, Any, Any]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(10.0 ** current_rank().rank)
    dist.all_reduce(total)
    return current_rank().rank, int(total.item()), args, kwargs


@pytest.mark.slow
def test_gangs_of_valid_configurations_run() -> None:
    """Of one to three ranks on this node."""
    sensible = st.builds(
        Gang,
        backend=st.sampled_from(["auto", "gloo"]),
        ranks_per_worker=st.integers(1, 3),
        min_workers=st.sampled_from([None, 1]),
        max_restarts=st.integers(0, 1_000_000),
        start_timeout=st.floats(60, 1_209_600),
        hang_timeout=st.sampled_from(["auto", None]) | st.floats(30, 1_209_600),
    )

    @settings(thoroughly, max_examples=8)
    @given(sensible, st.lists(JSON, max_size=2), st.dictionaries(st.from_regex(r"\A[a-z]\Z"), JSON, max_size=2))
    def run(gang: Gang, args: list[Any], kwargs: dict[str, Any]) -> None:
        request = calls.request_for(echo, args, kwargs, gang)
        size = request.ranks_per_worker
        found = futures.GangFutures(Supervisor(request, OwnNode()), size).result()
        assert found == [(rank, int("1" * size), tuple(args), kwargs) for rank in range(size)]

    with nothing_left_behind():
        try:
            run()
        finally:
            fork_client.shutdown()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "daskpytorch-gang"]
