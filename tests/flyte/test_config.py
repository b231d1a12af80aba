"""Every config works, or is refused before anything starts, with an error that names the wrong field."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flytekit import Resources

from flytekitplugins.daskpytorch import (
    DaskCluster,
    DaskDDP,
    EarlyStopping,
    Gang,
    Keep,
    Profile,
    SpawnDDP,
    Wandb,
    WorkerGroup,
    checks,
    dispatch,
)
from test_task import make, serialised

# ---- Chosen values: what each field refuses, and what the error says

NOT_A_COUNT = [0, -1, None, 1.5, True, "2", 10**30]
A_COUNT = "a whole number from 1 to 1000000"
SECONDS = "seconds above 0 and at most 1209600"
A_URI = "None, a folder or an fsspec URL such as s3://bucket/prefix"
MODES = "None or one of min, max"
BOTH_WAYS = "given with mode='min' if low values are good, or mode='max' if high values are good"
NO_URIS = ["", 7, Path("/kept"), "s4://bucket/kept", "s3:/bucket/kept", "s3//bucket/kept", "s3://", "memory://kept"]
NO_URIS += [f"s3://bucket/{path}" for path in ("/kept", "a//b", "a/./b", "a/..", r"a\b", "a?versionId=b/c", "a\tb")]
REFUSED: list[tuple[Any, str, list[Any], str]] = [
    (Gang, "backend", ["mpi"], "one of auto, gloo, nccl"),
    (Gang, "gpu_check", ["full", None, True, 1], "'off', 'quick' or a function of a GPU's index"),
    (Gang, "ranks_per_worker", ["all", *NOT_A_COUNT], f"'auto' or {A_COUNT}"),
    (Gang, "min_workers", [0, -1, 1.5, True], f"None or {A_COUNT}"),
    (Gang, "start_timeout", [0, -3.5, float("nan"), float("inf"), "600"], SECONDS),
    (Gang, "hang_timeout", [0, True, 1e-9, float("inf")], "'auto', None or seconds from 0.1 to 1209600"),
    (Gang, "environment", [["A"], None], "a mapping of names to texts"),
    (Gang, "environment", [{"A": 1}, {"A": "1\0"}], "a mapping of names to texts, also for 'A'"),
    (Gang, "environment", [{"A=B": "1"}, {"": "1"}, {1: "1"}], "a mapping of names to texts, also for "),
    (Gang, "environment", [{"RANK": "1"}], "a mapping without RANK, which the gang itself sets"),
    (Gang, "environment", [{"A": "", "CUDA_VISIBLE_DEVICES": "1"}], "a mapping without CUDA_VISIBLE_DEVICES"),
    (Gang, "key", ["", "../other", 7], "None, up to 100 of the characters"),
    (Gang, "profile", [(1, 2)], "None or a Profile"),
    (Gang, "checkpoint_uri", NO_URIS, A_URI),
    (Keep, "best", [-1, 1.0], "a whole number from 0 to 1000000"),
    (Keep, "best", [2], "0 if metric is None"),
    (Keep, "metric", ["loss"], "None if best is 0"),
    (Keep, "mode", ["least"], MODES),
    (EarlyStopping, "metric", ["score", "accuracy_loss", "lossless"], BOTH_WAYS),
    (EarlyStopping, "metric", [""], "a metric's name"),
    (EarlyStopping, "reduction_factor", [1, *NOT_A_COUNT], "a whole number from 2 to 1000000"),
    (Profile, "steps", [(0, 1), (3, 2), (1,), 5, (1.0, 2)], "the first and the last step"),
    (Profile, "ranks", [(-1,), 0], "a tuple of ranks, counted from 0"),
    (Wandb, "project", ["", " ", 5], "a project's name"),
    (Wandb, "secret", ["key"], "None or a flytekit.Secret"),
    (Wandb, "mode", ["sometimes", ["online"]], "None or one of online, offline, disabled"),
    (Wandb, "id", ["a/b"], r"None or a text of up to 128 characters without any of /\#?%:"),
    (Wandb, "group", ["a\0b"], "None or a text"),
    (Wandb, "tags", ["tag", ("a", 1)], "a tuple of texts"),
    (Wandb, "config", [[1], {1: 2}], "a dictionary whose keys are texts"),
    (Wandb, "host", [None], "a server's address"),
    (DaskDDP, "workers", [{"a": 1}], "a WorkerGroup"),
    (SpawnDDP, "nproc", NOT_A_COUNT, f"'auto' or {A_COUNT}"),
]
NEEDED: dict[Any, dict[str, Any]] = {
    EarlyStopping: {"metric": "loss"},
    Profile: {"steps": (1, 2)},
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
        (
            DaskCluster,
            {"workers": WorkerGroup(number_of_workers=0), "start_timeout": -1},
            ["workers.number_of_workers", "start_timeout"],
        ),
        (
            SpawnDDP,
            {"nproc": 0, "gang": Gang(ranks_per_worker=2, workers=2, min_workers=2)},
            ["nproc", "gang.ranks_per_worker", "gang.workers", "gang.min_workers"],
        ),
    ],
)
def test_one_error_names_all_that_is_wrong(kind: Any, values: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        kind(**values)
    assert re.findall(rf"{kind.__name__}\(([\w.]+)=", str(caught.value)) == named


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DaskDDP(gang=Gang(min_workers=3)), r"gang\.min_workers=3.*number_of_workers, which is 2"),
        (lambda: Gang(workers=2, min_workers=3), r"Gang\(min_workers=3\): must be at most workers, which is 2"),
        (lambda: DaskDDP(gang=Gang(workers=2)), r"gang\.workers=2\): must be left out; workers\.number_of_workers is"),
        (lambda: SpawnDDP(gang=Gang(workers=2)), r"gang\.workers=2\): must be left out, since .* nproc is the number"),
        (
            lambda: dispatch.run(None, print, gang=Gang(workers=2)),
            r"gang\.workers=2\): must be .* ranks_per_worker is the number of ranks",
        ),
    ],
)
def test_a_wrong_number_of_workers_is_refused_with_the_setting_that_has_the_number(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    "uri", [None, "kept", "/kept", "~/kept", "file:///kept", "s3://bucket/kept", "s3://bucket/a[b]*?::c%20 #~.{x}/"]
)
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


# ---- Imports

SLOW = {"torch", "distributed", "dask", "flytekit", "wandb"}
"""Imports that take long, for those who do not need them."""


@pytest.mark.parametrize(
    "statement, allowed",
    [
        ("import flytekitplugins.daskpytorch", set()),
        ("from flytekitplugins.daskpytorch import Gang, Wandb, current_rank", set()),
        ("from flytekitplugins.daskpytorch import DaskDDP, SpawnDDP, WorkerGroup", {"flytekit"}),
        ("from flytekitplugins.daskpytorch import dispatch", {"dask", "distributed"}),
        ("from flytekitplugins.daskpytorch.rank import main", set()),
        ("from flytekitplugins.daskpytorch.node import agent, fork_server", set()),
    ],
)
def test_import_loads_what_it_needs(statement: str, allowed: set[str]) -> None:
    script = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "flytekitplugins.daskpytorch" in loaded
    assert loaded & SLOW == allowed


# ---- Odd values


class Unwritable:
    """A value of a user's whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


ODD: list[Any] = [
    *(0, -1, 1.5, 1 << 31, 1 << 63, 10**400, 10**5_000, 1e308, 5e-324, float("nan"), float("inf")),
    *("", " ", "\0", "\ud800", "auto", "x" * 100_000, "../..", "a\nb", b"", b"x" * 100_000),
    *(None, True, [None] * 50_000, {1: 2}, {"a"}, object(), Gang, Unwritable(), Gang(), Resources()),
]
MAX_MESSAGE = 500
"""Characters for each thing that is wrong."""
TASKS = (DaskDDP, DaskCluster, SpawnDDP)


def refusal_of(kind: Any, **values: Any) -> str:
    """Call this, and return the text of the refusal, or "" if there is none."""
    try:
        made = kind(**values)
    except ValueError as error:
        return str(error)
    assert pickle.loads(pickle.dumps(made)) is not None
    if kind in TASKS:
        assert serialised(make(made)).to_flyte_idl().SerializeToString()
    return ""


@pytest.mark.parametrize("kind", [*TASKS, Gang, Keep, EarlyStopping, Profile, Wandb])
def test_any_value_is_refused_in_few_words_that_name_the_field_or_can_be_used(kind: Any) -> None:
    for name in kind.__dataclass_fields__:
        for value in ODD:
            refusal = refusal_of(kind, **NEEDED.get(kind, {}) | {name: value})
            if refusal:
                named = re.findall(rf"(?:^|; ){kind.__name__}\((\w+)=", refusal)
                assert set(named) == {name}, refusal[:1_000]
                assert "must be" in refusal
                assert len(refusal) < MAX_MESSAGE * len(named)
