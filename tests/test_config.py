"""What a user may ask for: all problems at once, frozen keyword-only fields, and an import that costs nothing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flytekit import Resources, Secret

from flytekitplugins.daskpytorch import (
    DaskCluster,
    DaskDDP,
    EarlyStopping,
    Gang,
    Keep,
    Profile,
    Scheduler,
    SpawnDDP,
    Wandb,
    WorkerGroup,
    settings,
)
from processes import run_program

NOT_A_COUNT = [0, -1, None, 1.5, True, "2"]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("backend", "mpi", "one of auto, gloo, nccl"),
        ("ranks_per_worker", 0, "'auto' or a whole number from 1 to 1000000"),
        ("ranks_per_worker", "all", "'auto' or a whole number from 1 to 1000000"),
        ("ranks_per_worker", True, "'auto' or a whole number from 1 to 1000000"),
        ("min_workers", 0, "None or a whole number from 1 to 1000000"),
        ("min_workers", 1.5, "None or a whole number from 1 to 1000000"),
        ("start_timeout", 0, "seconds above 0 and at most 1209600"),
        ("start_timeout", -3.5, "seconds above 0 and at most 1209600"),
        ("start_timeout", float("nan"), "seconds above 0 and at most 1209600"),
        ("start_timeout", "600", "seconds above 0 and at most 1209600"),
        ("max_restarts", -1, "a whole number from 0 to 1000000"),
        ("max_restarts", 1.5, "a whole number from 0 to 1000000"),
        ("max_restarts", None, "a whole number from 0 to 1000000"),
        ("hang_timeout", 0, "'auto', None or seconds from 0.1 to 1209600"),
        ("start_timeout", float("inf"), "seconds above 0 and at most 1209600"),
        ("start_timeout", 10**400, "seconds above 0 and at most 1209600"),
        ("max_restarts", False, "a whole number from 0 to 1000000"),
        ("max_restarts", 0.0, "a whole number from 0 to 1000000"),
        ("max_restarts", 10**30, "a whole number from 0 to 1000000"),
        ("hang_timeout", float("inf"), "'auto', None or seconds from 0.1 to 1209600"),
        ("hang_timeout", 1e-9, "'auto', None or seconds from 0.1 to 1209600"),
        ("key", "", "None or up to 100 of the characters"),
        ("key", "../other", "None or up to 100 of the characters"),
        ("key", 7, "None or up to 100 of the characters"),
        ("hang_timeout", True, "'auto', None or seconds from 0.1 to 1209600"),
        ("keep", 3, "a Keep"),
        ("keep", None, "a Keep"),
        ("profile", (1, 2), "None or a Profile"),
        ("checkpoint_uri", "", "None, a folder or an fsspec URL such as s3://bucket/prefix"),
        ("checkpoint_uri", 7, "None, a folder or an fsspec URL such as s3://bucket/prefix"),
        ("checkpoint_uri", Path("/kept"), "None, a folder or an fsspec URL such as s3://bucket/prefix"),
        ("checkpoint_uri", "s4://bucket/kept", "None, a folder or an fsspec URL such as s3://bucket/prefix"),
        ("checkpoint_uri", "s3:/bucket/kept", "None, a folder or an fsspec URL such as s3://bucket/prefix"),
        ("checkpoint_uri", "s3//bucket/kept", "None, a folder or an fsspec URL such as s3://bucket/prefix"),
        ("checkpoint_uri", "s3://", "None, a folder or an fsspec URL such as s3://bucket/prefix"),
        ("checkpoint_uri", "memory://kept", "None, a folder or an fsspec URL such as s3://bucket/prefix, which every"),
    ],
)
def test_gang_error_has_field_value_and_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Gang(**{field: value})
    shown = repr(value) if value != 10**400 else f"1{'0' * 199}... (401 characters)"
    assert f"Gang({field}={shown}): must be {allowed}" in str(caught.value)


@pytest.mark.parametrize("uri", [None, "kept", "/kept", "~/kept", "file:///kept", "s3://bucket/kept"])
def test_a_folder_and_a_url_of_what_is_installed_may_keep_checkpoints(uri: str | None) -> None:
    assert Gang(checkpoint_uri=uri).checkpoint_uri == uri


def test_the_package_that_a_url_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "is_installed", lambda _: False)
    with pytest.raises(ValueError, match=r"Gang\(checkpoint_uri='oci://b/kept'\): must be reached by .* Install ocifs"):
        Gang(checkpoint_uri="oci://b/kept")


@pytest.mark.parametrize("value", ["x" * 100_000, 10**100_000, list(range(100_000))], ids=["text", "number", "list"])
def test_a_large_value_makes_no_large_message(value: object) -> None:
    with pytest.raises(ValueError, match=r"Gang\(backend=.*must be one of auto, gloo, nccl") as caught:
        Gang(backend=value)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1_000


def test_gang_names_all_its_problems_in_one_error() -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Gang(backend="mpi", ranks_per_worker=0, min_workers=-1, start_timeout=0)  # type: ignore[arg-type]
    text = str(caught.value)
    assert [
        name for name in ("backend='mpi'", "ranks_per_worker=0", "min_workers=-1", "start_timeout=0") if name in text
    ] == [
        "backend='mpi'",
        "ranks_per_worker=0",
        "min_workers=-1",
        "start_timeout=0",
    ]
    assert text.count("must be") == 4


def test_gang_accepts_what_it_allows() -> None:
    gang = Gang(backend="gloo", ranks_per_worker=4, min_workers=2, start_timeout=0.5)
    assert (gang.backend, gang.ranks_per_worker, gang.min_workers, gang.start_timeout) == ("gloo", 4, 2, 0.5)


def test_gang_starts_again_and_does_not_watch_for_hangs_unless_told() -> None:
    assert (Gang().max_restarts, Gang().hang_timeout) == (3, "auto")
    assert (Gang(max_restarts=0).max_restarts, Gang(hang_timeout=30).hang_timeout) == (0, 30)


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"last": 0}, "Keep(last=0): must be a whole number from 1 to 1000000"),
        ({"last": True}, "Keep(last=True): must be a whole number from 1 to 1000000"),
        ({"best": -1}, "Keep(best=-1): must be a whole number from 0 to 1000000"),
        ({"best": 1.0, "last": 2}, "Keep(best=1.0): must be a whole number from 0 to 1000000"),
        ({"best": 2}, "Keep(best=2): must be 0 without a metric to be best by"),
        ({"metric": "loss"}, "Keep(metric='loss'): must be None, unless best says how many are kept by it"),
        ({"metric": " ", "best": 1}, "Keep(metric=' '): must be None or a metric's name"),
        ({"mode": "least"}, "Keep(mode='least'): must be one of min, max"),
    ],
)
def test_keep_error_has_field_value_and_what_is_allowed(values: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Keep(**values)
    assert str(caught.value) == refusal


def test_by_default_the_last_two_checkpoints_stay_and_no_best_one() -> None:
    assert Gang().keep == Keep(last=2, best=0, metric=None, mode="min")
    assert Gang(keep=Keep(best=1, metric="loss")).keep.last == 2


def test_early_stopping_names_all_its_problems_in_one_error() -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        EarlyStopping(metric="", mode="least", reduction_factor=1, grace_period=0)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "EarlyStopping(metric=''): must be a metric's name; "
        "EarlyStopping(mode='least'): must be one of min, max; "
        "EarlyStopping(reduction_factor=1): must be a whole number from 2 to 1000000; "
        "EarlyStopping(grace_period=0): must be a whole number from 1 to 1000000"
    )


@pytest.mark.parametrize("field", ["reduction_factor", "grace_period"])
@pytest.mark.parametrize("number", NOT_A_COUNT)
def test_early_stopping_counts_in_whole_numbers(field: str, number: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number") as caught:
        EarlyStopping(metric="loss", **{field: number})
    assert f"EarlyStopping({field}={number!r})" in str(caught.value)


def test_early_stopping_by_default_keeps_the_lowest_quarter_after_one_epoch() -> None:
    stop = EarlyStopping(metric="loss")
    assert (stop.mode, stop.reduction_factor, stop.grace_period) == ("min", 4, 1)


def test_wandb_names_all_its_problems_in_one_error() -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Wandb(project="", mode="sometimes")  # type: ignore[arg-type]
    assert "Wandb(project=''): must be a project's name" in str(caught.value)
    assert "Wandb(mode='sometimes'): must be None or one of online, offline, disabled" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("project", 5, "a project's name"),
        ("project", " ", "a project's name"),
        ("entity", b"me", "None or a text"),
        ("secret", "key", "None or a flytekit.Secret"),
        ("mode", ["online"], "None or one of online, offline, disabled"),
        ("id", "a/b", r"None or a text of up to 128 characters without any of /\#?%:"),
        ("name", 3, "None or a text"),
        ("group", "a\0b", "None or a text"),
        ("tags", "tag", "a tuple of texts"),
        ("tags", ("a", 1), "a tuple of texts"),
        ("config", [1], "a dictionary whose keys are texts"),
        ("config", {1: 2}, "a dictionary whose keys are texts"),
        ("host", None, "a server's address"),
        ("dir", 4, "None or a folder's path"),
    ],
)
def test_every_field_of_wandb_is_looked_at(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Wandb(**{"project": "p", field: value})
    assert f"Wandb({field}={value!r}): must be {allowed}" in str(caught.value)


def test_wandb_accepts_what_it_allows() -> None:
    secret = Secret(group="wandb", key="api_key")
    Wandb(project="p", entity="me", secret=secret, id="f3a-n0", tags=("a", "b"), config={"x": 1}, dir="runs")


CONFIGS: list[Any] = [DaskDDP, DaskCluster, SpawnDDP]
HOLDERS = [
    (config, entry.name)
    for config in CONFIGS
    for entry in dataclasses.fields(config)
    if entry.name in ("scheduler", "workers", "gang", "wandb")
]


@pytest.mark.parametrize(("config", "field"), HOLDERS)
def test_fields_hold_what_they_are_called(config: Any, field: str) -> None:
    with pytest.raises(ValueError, match=rf"{config.__name__}\({field}=\{{'a': 1\}}\): must be .*a [A-Z]\w+"):
        config(**{field: {"a": 1}})


@pytest.mark.parametrize(
    ("pods", "said"),
    [
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


@pytest.mark.parametrize("config", [DaskDDP, DaskCluster])
@pytest.mark.parametrize("number", NOT_A_COUNT)
def test_workers_must_be_a_whole_number_from_one_up(config: Any, number: Any) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        config(workers=WorkerGroup(number_of_workers=number))
    assert str(caught.value) == (
        f"{config.__name__}(workers.number_of_workers={number!r}): must be a whole number from 1 to 1000000"
    )


def test_spawn_names_all_its_problems_in_one_error() -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        SpawnDDP(nproc=0, start_method="fork", gang=Gang(ranks_per_worker=2, min_workers=2))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "SpawnDDP(nproc=0): must be 'auto' or a whole number from 1 to 1000000; "
        "SpawnDDP(start_method='fork'): must be one of forkserver, spawn; "
        "SpawnDDP(gang.ranks_per_worker=2): must be left alone; nproc is the number of ranks; "
        "SpawnDDP(gang.min_workers=2): must be left alone; there is one node"
    )


def test_min_workers_above_number_of_workers_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        DaskDDP(workers=WorkerGroup(number_of_workers=2), gang=Gang(min_workers=3))
    assert "gang.min_workers=3" in str(caught.value)
    assert "number_of_workers, which is 2" in str(caught.value)


def test_min_workers_may_equal_number_of_workers() -> None:
    assert DaskDDP(workers=WorkerGroup(number_of_workers=2), gang=Gang(min_workers=2)).num_workers == 2


def test_dask_cluster_names_all_its_problems_in_one_error() -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        DaskCluster(workers=WorkerGroup(number_of_workers=0), start_timeout=-1)
    assert "DaskCluster(workers.number_of_workers=0)" in str(caught.value)
    assert "DaskCluster(start_timeout=-1)" in str(caught.value)


def test_default_is_two_workers_with_one_rank_each() -> None:
    config = DaskDDP()
    assert (config.num_workers, config.ranks_per_worker) == (2, 1)


@pytest.mark.parametrize(
    ("requests", "limits", "expected"),
    [
        (None, Resources(gpu="2"), 2),
        (Resources(gpu="3"), None, 3),
        (Resources(gpu="3"), Resources(gpu="2"), 2),
        (Resources(gpu="3"), Resources(mem="4Gi"), 3),
        (Resources(cpu="4"), Resources(cpu="8"), 1),
        (None, Resources(gpu="0"), 1),
        (None, None, 1),
    ],
)
def test_auto_ranks_per_worker_is_the_gpus_in_limits_else_requests_else_one(
    requests: Resources | None, limits: Resources | None, expected: int
) -> None:
    config = DaskDDP(workers=WorkerGroup(number_of_workers=2, requests=requests, limits=limits))
    assert config.ranks_per_worker == expected


def test_ranks_per_worker_as_asked_overrides_the_gpus() -> None:
    workers = WorkerGroup(number_of_workers=1, limits=Resources(gpu="8"))
    assert DaskDDP(workers=workers, gang=Gang(ranks_per_worker=2)).ranks_per_worker == 2


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        *(({"steps": steps}, "must be the first and the last step") for steps in [(0, 1), (3, 2), (1,), 5, (1.0, 2)]),
        ({"ranks": (-1,)}, "must be a tuple of ranks, counted from 0"),
        ({"ranks": 0}, "must be a tuple of ranks, counted from 0"),
        ({"with_stack": 1}, "must be True or False"),
        ({"folder": "nowhere://x"}, "must be None, a folder or an fsspec URL"),
    ],
)
def test_profiles_that_make_no_sense_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Profile(**{"steps": (1, 2)} | values)


@pytest.mark.parametrize(
    "config",
    [DaskDDP(), DaskCluster(), EarlyStopping(metric="m"), Gang(), Keep(), Profile(steps=(1, 2)), Wandb(project="p")],
)
def test_configs_are_frozen(config: Any) -> None:
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, None)


@pytest.mark.parametrize(
    ("config", "value"),
    [
        (DaskDDP, Scheduler()),
        (DaskCluster, Scheduler()),
        (EarlyStopping, "loss"),
        (Gang, "gloo"),
        (Keep, 3),
        (Profile, (1, 2)),
        (Wandb, "p"),
    ],
)
def test_configs_take_keywords_only(config: Any, value: Any) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        config(value)


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


@pytest.mark.parametrize("module", ["flytekitplugins.daskpytorch", "flytekitplugins.daskpytorch.flyte.config"])
@pytest.mark.parametrize("name", ["DaskCluster", "DaskDDP", "SpawnDDP"])
def test_a_task_is_of_its_type_wherever_its_config_comes_from(name: str, module: str, tmp_path: Path) -> None:
    script = f"""
from {module} import {name}
from flytekit import task

@task(task_config={name}())
def train() -> None: ...

print(type(train).__name__)
"""
    (tmp_path / "flow.py").write_text(script)
    done = run_program(["flow.py"], cwd=tmp_path)
    assert done.stdout.strip() == f"{name}Task", done.stderr
