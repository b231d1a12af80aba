"""Every config works, or is refused before anything starts, with an error that names the wrong field."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna
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
    Profile,
    Scheduler,
    Search,
    SpawnDDP,
    StrictInputs,
    Wandb,
    WorkerGroup,
    checks,
    dispatch,
)
from flytekitplugins.daskpytorch.display import wandb as wandb_run
from flytekitplugins.daskpytorch.driver.request import Keys
from flytekitplugins.daskpytorch.protocol.orders import Job, environment
from flytekitplugins.daskpytorch.protocol.placement import Node, choose_backend, place_ranks
from flytekitplugins.daskpytorch.protocol.sharded import Sharding
from processes import run_program
from test_task import make, serialised

# ---- Chosen values: what each field refuses, and what the error says

NOT_A_COUNT = [0, -1, None, 1.5, True, "2", 10**30]
A_COUNT = "a whole number from 1 to 1000000"
SECONDS = "seconds above 0 and at most 1209600"
A_URI = "None, a folder or an fsspec URL such as s3://bucket/prefix"
MODES = "one of min, max"
NO_URIS = ["", 7, Path("/kept"), "s4://bucket/kept", "s3:/bucket/kept", "s3//bucket/kept", "s3://", "memory://kept"]
REFUSED: list[tuple[Any, str, list[Any], str]] = [
    (Gang, "backend", ["mpi"], "one of auto, gloo, nccl"),
    (Gang, "devices", ["some", 1], "one of own, all"),
    (Gang, "gpu_check", ["full", None, True, 1], "'off', 'quick' or a function of a GPU's index"),
    (Gang, "ranks_per_worker", ["all", *NOT_A_COUNT], f"'auto' or {A_COUNT}"),
    (Gang, "min_workers", [0, -1, 1.5, True], f"None or {A_COUNT}"),
    (Gang, "workers", [0, -1, 1.5, True, "2"], f"None or {A_COUNT}"),
    (Gang, "max_restarts", [-1, 1.5, None, False, 0.0, 10**30], "a whole number from 0 to 1000000"),
    (Gang, "start_timeout", [0, -3.5, float("nan"), float("inf"), "600"], SECONDS),
    (Gang, "grace_period", [0, None, float("nan")], SECONDS),
    (Gang, "hang_timeout", [0, True, 1e-9, float("inf")], "'auto', None or seconds from 0.1 to 1209600"),
    (Gang, "environment", [["A"], None], "a mapping of names to texts"),
    (Gang, "environment", [{"A": 1}, {"A": "1\0"}], "a mapping of names to texts, also for A, and without zero bytes"),
    (Gang, "environment", [{"A=B": "1"}], "a mapping of names to texts, without 'A=B', which is no name of a variable"),
    (Gang, "environment", [{"": "1"}, {1: "1"}], "a mapping of names to texts, without "),
    (Gang, "environment", [{"RANK": "1"}], "a mapping without RANK, which the gang itself sets"),
    (Gang, "environment", [{"A": "", "CUDA_VISIBLE_DEVICES": "1"}], "a mapping without CUDA_VISIBLE_DEVICES"),
    (Gang, "log_dir", ["", 7, "s3://bucket/logs"], "None or a folder's path"),
    (Gang, "key", ["", "../other", 7], "None, up to 100 of the characters"),
    (Gang, "keep", [3, None], "a Keep"),
    (Gang, "profile", [(1, 2)], "None or a Profile"),
    (Gang, "checkpoint_uri", NO_URIS, A_URI),
    (Gang, "shard_cache", ["kept", 7], "None or an absolute path"),
    (Gang, "observers", [1, (1,)], "a tuple of classes of observers"),
    (Keep, "last", NOT_A_COUNT, A_COUNT),
    (Keep, "best", [-1, 1.0], "a whole number from 0 to 1000000"),
    (Keep, "best", [2], "0 if metric is None"),
    (Keep, "metric", ["loss"], "None if best is 0"),
    (Keep, "mode", ["least"], MODES),
    (EarlyStopping, "metric", [""], "a metric's name"),
    (EarlyStopping, "mode", ["least"], MODES),
    (EarlyStopping, "reduction_factor", [1, *NOT_A_COUNT], "a whole number from 2 to 1000000"),
    (EarlyStopping, "grace_period", NOT_A_COUNT, A_COUNT),
    (Profile, "steps", [(0, 1), (3, 2), (1,), 5, (1.0, 2)], "the first and the last step"),
    (Profile, "ranks", [(-1,), 0], "a tuple of ranks, counted from 0"),
    (Profile, "folder", ["nowhere://x"], "None, a folder or an fsspec URL"),
    (Search, "study", ["rates"], "an optuna.Study"),
    (Search, "suggest", [5], "a function that makes an experiment of a trial"),
    (Search, "num_models", NOT_A_COUNT, A_COUNT),
    (Search, "metric", ["", 5], "None or a metric's name"),
    (Wandb, "project", ["", " ", 5], "a project's name"),
    (Wandb, "entity", [b"me"], "None or a text"),
    (Wandb, "secret", ["key"], "None or a flytekit.Secret"),
    (Wandb, "mode", ["sometimes", ["online"]], "None or one of online, offline, disabled"),
    (Wandb, "id", ["a/b"], r"None or a text of up to 128 characters without any of /\#?%:"),
    (Wandb, "name", [3], "None or a text"),
    (Wandb, "group", ["a\0b"], "None or a text"),
    (Wandb, "tags", ["tag", ("a", 1)], "a tuple of texts"),
    (Wandb, "config", [[1], {1: 2}], "a dictionary whose keys are texts"),
    (Wandb, "host", [None], "a server's address"),
    (Wandb, "dir", [4], "None or a folder's path"),
    (DaskDDP, "scheduler", [{"a": 1}], "a Scheduler"),
    (DaskDDP, "workers", [{"a": 1}], "a WorkerGroup"),
    (DaskDDP, "gang", [{"a": 1}], "a Gang"),
    (DaskDDP, "wandb", [{"a": 1}], "None or a Wandb"),
    (DaskCluster, "start_timeout", [-1], SECONDS),
    (SpawnDDP, "nproc", NOT_A_COUNT, f"'auto' or {A_COUNT}"),
    (SpawnDDP, "start_method", ["fork"], "one of forkserver, spawn"),
]
NEEDED: dict[Any, dict[str, Any]] = {
    EarlyStopping: {"metric": "loss"},
    Profile: {"steps": (1, 2)},
    Search: {"study": optuna.create_study(), "suggest": len, "num_models": 1},
    Wandb: {"project": "p"},
}


@pytest.mark.parametrize(
    ("kind", "name", "value", "allowed"),
    [
        pytest.param(kind, name, value, allowed, id=f"{kind.__name__}-{name}-{value!r:.20}")
        for kind, name, values, allowed in REFUSED
        for value in values
    ],
)
def test_an_error_names_the_field_the_value_and_what_is_allowed(kind: Any, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        kind(**NEEDED.get(kind, {}) | {name: value})
    assert f"{kind.__name__}({name}={value!r}): must be {allowed}" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (Gang, {"backend": "mpi", "min_workers": -1, "start_timeout": 0}, ["backend", "min_workers", "start_timeout"]),
        (EarlyStopping, {"metric": "", "mode": "least", "grace_period": 0}, ["metric", "mode", "grace_period"]),
        (Wandb, {"project": "", "mode": "sometimes"}, ["project", "mode"]),
        (
            DaskCluster,
            {"workers": WorkerGroup(number_of_workers=0), "start_timeout": -1},
            ["workers.number_of_workers", "start_timeout"],
        ),
        (
            SpawnDDP,
            {"nproc": 0, "start_method": "fork", "gang": Gang(ranks_per_worker=2, workers=2, min_workers=2)},
            ["nproc", "start_method", "gang.ranks_per_worker", "gang.workers", "gang.min_workers"],
        ),
    ],
)
def test_one_error_names_all_that_is_wrong(kind: Any, values: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        kind(**values)
    assert re.findall(rf"{kind.__name__}\(([\w.]+)=", str(caught.value)) == named


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        *((WorkerGroup(number_of_workers=number), rf"workers\.number_of_workers={number!r}") for number in NOT_A_COUNT),
        (WorkerGroup(number_of_workers=2, image=5), r"workers\.image=5"),  # type: ignore[arg-type]
        (WorkerGroup(number_of_workers=2, limits="2 GPUs"), r"workers\.limits='2 GPUs'"),  # type: ignore[arg-type]
        (WorkerGroup(number_of_workers=2, limits=Resources(gpu="two")), r"workers\.limits\.gpu='two'"),
        (WorkerGroup(number_of_workers=2, requests=Resources(cpu=("1", "2"))), r"workers\.requests=Resources\(cpu="),
        (Scheduler(image=[]), r"scheduler\.image=\[\]"),  # type: ignore[arg-type]
    ],
)
def test_what_the_pods_are_given_is_looked_at(pods: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DaskDDP(**{"workers" if isinstance(pods, WorkerGroup) else "scheduler": pods})


def test_min_workers_above_number_of_workers_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"gang\.min_workers=3.*number_of_workers, which is 2"):
        DaskDDP(workers=WorkerGroup(number_of_workers=2), gang=Gang(min_workers=3))
    assert DaskDDP(workers=WorkerGroup(number_of_workers=2), gang=Gang(min_workers=2)).num_workers == 2
    with pytest.raises(ValueError, match=r"Gang\(min_workers=3\): must be at most workers, which is 2"):
        Gang(workers=2, min_workers=3)


def test_a_task_has_its_own_number_of_workers() -> None:
    with pytest.raises(
        ValueError, match=r"gang\.workers=2\): must be left out; workers\.number_of_workers is the number"
    ):
        DaskDDP(gang=Gang(workers=2))


@pytest.mark.parametrize("uri", [None, "kept", "/kept", "~/kept", "file:///kept", "s3://bucket/kept"])
def test_a_folder_and_a_url_of_what_is_installed_may_keep_checkpoints(uri: str | None) -> None:
    assert Gang(checkpoint_uri=uri).checkpoint_uri == uri


def test_the_environment_of_this_process_travels() -> None:
    gang = Gang(environment=os.environ)
    assert pickle.loads(pickle.dumps(gang)).environment == dict(os.environ)
    assert "PATH" not in repr(gang)  # may hold secrets
    assert hash(gang) == hash(Gang())


def test_the_package_that_a_url_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_installed", lambda _: False)
    with pytest.raises(ValueError, match=r"Gang\(checkpoint_uri='oci://b/kept'\): must be None or a URL .* ocifs"):
        Gang(checkpoint_uri="oci://b/kept")


def test_what_nobody_has_said_is_the_default() -> None:
    gang, stop = Gang(), EarlyStopping(metric="loss")
    assert (gang.max_restarts, gang.hang_timeout, gang.keep) == (3, "auto", Keep(last=2, best=0, metric=None))
    assert (stop.mode, stop.reduction_factor, stop.grace_period) == ("min", 4, 1)
    assert DaskDDP().num_workers == 2


@pytest.mark.parametrize(
    ("requests", "limits", "expected"),
    [
        (None, "2", 2),
        ("3", None, 3),
        ("3", "2", 2),
        (None, "0", 1),
        (None, None, 1),
    ],
)
def test_auto_ranks_per_worker_is_the_gpus_in_limits_else_requests_else_one(
    requests: str | None, limits: str | None, expected: int
) -> None:
    asked = {"requests": Resources(cpu="4", gpu=requests), "limits": Resources(mem="4Gi", gpu=limits)}
    workers = WorkerGroup(number_of_workers=2, **asked)
    assert make(DaskDDP(workers=workers))._num_ranks_per_worker() == expected
    assert make(DaskDDP(workers=workers, gang=Gang(ranks_per_worker=2)))._num_ranks_per_worker() == 2


@pytest.mark.parametrize("kind", [DaskDDP, DaskCluster, SpawnDDP, EarlyStopping, Gang, Keep, Profile, Wandb])
def test_configs_are_frozen_and_take_keywords_only(kind: Any) -> None:
    config = kind(**NEEDED.get(kind, {}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, None)
    with pytest.raises(TypeError, match="positional argument"):
        kind("loss")


# ---- Imports

SLOW = {"torch", "distributed", "dask", "optuna", "flytekit", "wandb"}
"""Imports that take long, for those who do not need them."""


@pytest.mark.parametrize(
    "statement, allowed",
    [
        ("import flytekitplugins.daskpytorch", set()),
        ("from flytekitplugins.daskpytorch import Gang, Wandb, current_rank", set()),
        ("from flytekitplugins.daskpytorch import DaskDDP, SpawnDDP, WorkerGroup", {"flytekit"}),
        ("from flytekitplugins.daskpytorch import dispatch", {"dask", "distributed"}),
        ("from flytekitplugins.daskpytorch.rank import main", set()),
    ],
)
def test_import_loads_what_it_needs(statement: str, allowed: set[str]) -> None:
    script = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "flytekitplugins.daskpytorch" in loaded
    assert loaded & SLOW == allowed


def test_a_task_is_of_its_type_wherever_its_config_comes_from(tmp_path: Path) -> None:
    script = """
from flytekit import task
from flytekitplugins import daskpytorch
from flytekitplugins.daskpytorch.flyte import config

for name in ("DaskCluster", "DaskDDP", "SpawnDDP"):
    for module in (daskpytorch, config):
        @task(task_config=getattr(module, name)())
        def train() -> None: ...

        assert type(train).__name__ == f"{name}Task", (name, module)
"""
    (tmp_path / "flow.py").write_text(script)
    done = run_program(["flow.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# ---- Random values: what is made of them is used as the engine uses it

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
TIMES = st.floats(1e-3, 2_000_000) | st.integers(1, 2_000_000)
WORDS = st.text(min_size=1, max_size=10)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Values for some of the fields: mostly such as make sense, now and then any."""
    mixed = {name: st.one_of(sensible, sensible, sensible, ANYTHING) for name, sensible in fields.items()}
    return st.fixed_dictionaries({}, optional=mixed)


GANG = some(
    backend=st.sampled_from(["auto", "gloo", "nccl"]),
    devices=st.sampled_from(["own", "all"]),
    gpu_check=st.sampled_from(["off", "quick", len]),
    ranks_per_worker=COUNTS | st.just("auto"),
    min_workers=COUNTS | st.none(),
    max_restarts=st.integers(0, 5),
    start_timeout=TIMES,
    hang_timeout=TIMES | st.sampled_from(["auto", None]),
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
    """Return the result of a call and "", or None and the text of the refusal."""
    try:
        return call(), ""
    except ValueError as error:
        return None, str(error)


def built(kind: Any, values: dict[str, Any]) -> Any | None:
    """Return the config of these values, or None if the config refuses them with a `ValueError`."""
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
        assert 0 < 1_000 * seconds < 2**31  # what waits for sockets counts in milliseconds
    taken = Keys().take(len, gang.key, ["-0", "-1"], object())
    assert all(re.fullmatch(r"[\w.-]+", key, re.ASCII) for key in taken)
    ranks = 1 if gang.ranks_per_worker == "auto" else min(gang.ranks_per_worker, 8)
    nodes = [_node(f"tcp://10.0.0.{index}:1", ranks) for index in range(2)]
    places = place_ranks(nodes, ranks, gang.devices)
    job = Job(
        sharding=Sharding(base="", nonce=""),
        gang="gang",
        attempt=0,
        call=b"",
        backend=choose_backend(gang.backend, nodes, places),
        store=("127.0.0.1", 1),
        settings=gang,
    )
    variables = environment({}, places[1][0], job, "lo", Path("/scratch"))
    assert variables["WORLD_SIZE"] == str(2 * ranks)
    assert int(variables["LOCAL_RANK"]) < len(variables["CUDA_VISIBLE_DEVICES"].split(","))  # it names a device
    assert all(isinstance(value, str) for value in variables.values())


def _node(worker: str, num_gpus: int) -> Node:
    gpus = tuple(map(str, range(num_gpus)))
    return Node(
        worker=worker, host=worker, num_cores=2, gpus=gpus, gpu_names=gpus, interface="lo", versions={"torch": "2"}
    )


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
    some(nproc=COUNTS | st.just("auto"), start_method=st.just("spawn"), start_timeout=TIMES),
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
    task = make(config)
    template = serialised(task)
    assert template.to_flyte_idl().SerializeToString()
    if kind is not SpawnDDP:
        assert template.custom["workers"]["numberOfWorkers"] == config.num_workers
    if kind is DaskDDP:
        assert task._num_ranks_per_worker() >= 1


@thoroughly
@given(
    st.sampled_from([dispatch.run, dispatch.map]),
    ANYTHING,
    st.one_of(ANYTHING, st.just(len)),
    ANYTHING,
    some(gang=st.none(), pass_local_rank=st.booleans(), stop_early=st.none(), wandb=st.none()),
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
GIVEN = {
    "epochs": st.integers() | JSON,
    "rate": st.floats(allow_nan=False) | JSON,
    "shuffle": st.booleans() | JSON,
    "name": st.text() | JSON,
    "layers": st.lists(st.integers()) | JSON,
    "seed": st.integers() | JSON,
    "epoch": st.just(1),
}


@thoroughly
@given(st.fixed_dictionaries({}, optional=GIVEN))
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
