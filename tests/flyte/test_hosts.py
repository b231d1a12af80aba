"""Task types for flytekit and for Flyte 2 keep the same promises. No rank runs."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flyteplugins.dask")

import flyte
from flytekit import PodTemplate, Secret, task
from flytekit.core.base_task import TaskMetadata
from kubernetes.client import V1PodSpec

import flytekitplugins.daskpytorch as for_flytekit
import flyteplugins.daskpytorch as for_flyte2
from flytekitplugins.daskpytorch.task.in_ranks import UNDISTURBED

QUEUE, SIZE = {"kueue.x-k8s.io/queue-name": "training"}, "kueue.x-k8s.io/pod-group-total-count"
EVICT, DISRUPT = UNDISTURBED
FAILURES = "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES"
KINDS = ("DaskDDP", "SpawnDDP", "DaskCluster")


def one(x: int) -> int:
    return x


def generates(x: int) -> Iterator[int]:
    yield x


@dataclass(frozen=True)
class Made:
    task: Any
    environment: Any
    annotations: dict[str, str]
    secrets: list[tuple[str, str]]


def by_flytekit(
    config: Any, function: Any = one, *, labels: Any = None, annotations: Any = None, secrets: Any = (), **env: str
) -> Made:
    template = PodTemplate(pod_spec=V1PodSpec(containers=[]), labels=labels, annotations=annotations)
    requests = [Secret(group=group, key=key) for group, key in secrets]
    made = task(task_config=config, pod_template=template, environment=env, secret_requests=requests)(function)
    requested = [(each.group, each.key) for each in made.security_context.secrets] if made.security_context else []
    return Made(made, made.environment, {**(annotations or {}), **made.metadata.annotations}, requested)


def by_flyte2(
    config: Any, function: Any = one, *, labels: Any = None, annotations: Any = None, secrets: Any = (), **env: str
) -> Made:
    template = flyte.PodTemplate(labels=labels or {}, annotations=annotations or {})
    requests = [flyte.Secret(group=group, key=key) for group, key in secrets]
    how = {"pod_template": template, "env_vars": env, "secrets": requests or None}
    made = flyte.TaskEnvironment("made", plugin_config=config, **how).task(function)
    return Made(
        made, made.env_vars, made.pod_template.annotations, [(each.group, each.key) for each in made.secrets or []]
    )


HOSTS = [
    pytest.param(
        for_flytekit,
        for_flyte2,
        by_flytekit,
        marks=pytest.mark.skipif(
            "annotations" not in TaskMetadata.__dataclass_fields__, reason="flytekit 1.16.2 added annotations"
        ),
    ),
    (for_flyte2, for_flytekit, by_flyte2),
]
on_both = pytest.mark.parametrize(("host", "other", "make"), HOSTS)
Make = Callable[..., Made]


@on_both
@pytest.mark.parametrize("name", KINDS)
def test_a_config_stands_for_its_hosts_task_alone_and_so_does_a_users_subclass(
    host: ModuleType, other: ModuleType, make: Make, name: str
) -> None:
    ours, own = getattr(host, name), type("Own", (getattr(host, name),), {})
    assert type(make(ours()).task) is type(make(own()).task) is type(make(type("Nested", (own,), {})()).task)
    assert type(make(ours()).task).__name__ == f"{name}Task"
    for theirs in (getattr(other, name), type("Own", (getattr(other, name),), {})):
        with pytest.raises(TypeError, match=f"from {host.__name__} import {name}"):
            make(theirs())
    with pytest.raises(TypeError, match=rf"{name} is a class.*: {name}\(\)$"):
        make(ours)


@on_both
def test_the_pods_have_our_settings_of_dask_below_the_users(host: ModuleType, other: ModuleType, make: Make) -> None:
    assert make(host.DaskDDP()).environment[FAILURES] == "0"
    assert FAILURES not in make(host.DaskCluster()).environment
    found = make(host.DaskDDP(), **{FAILURES: "7", "OWN": "1"}).environment
    assert (found[FAILURES], found["OWN"], found["DASK_DISTRIBUTED__WORKER__DAEMON"]) == ("7", "1", "False")
    assert host.__name__ in found["DASK_DISTRIBUTED__WORKER__PRELOAD"]
    assert not make(host.SpawnDDP()).environment


@on_both
@pytest.mark.parametrize("name", KINDS)
def test_autoscalers_leave_the_nodes_of_a_tasks_pods_alone_unless_the_user_says_otherwise(
    host: ModuleType, other: ModuleType, make: Make, name: str
) -> None:
    assert make(getattr(host, name)()).annotations == UNDISTURBED
    found = make(getattr(host, name)(), annotations={DISRUPT: "false", "team": "names"}).annotations
    assert found == {EVICT: "false", DISRUPT: "false", "team": "names"}


@on_both
@pytest.mark.parametrize("name", ["DaskDDP", "DaskCluster"])
def test_pods_in_a_queue_of_kueue_are_admitted_together_and_a_wrong_number_is_refused(
    host: ModuleType, other: ModuleType, make: Make, name: str
) -> None:
    config = getattr(host, name)(workers=host.WorkerGroup(number_of_workers=3))
    assert make(config, labels=QUEUE).annotations[SIZE] == "5"
    assert make(config, labels=QUEUE, annotations={SIZE: "5"}).annotations[SIZE] == "5"
    assert SIZE not in make(config, labels={"team": "names"}).annotations
    with pytest.raises(ValueError, match=rf"{SIZE}='6' must be '5', for 3 workers, the scheduler"):
        make(config, labels=QUEUE, annotations={SIZE: "6"})


@on_both
def test_the_secret_of_weights_and_biases_is_requested_once(host: ModuleType, other: ModuleType, make: Make) -> None:
    secret: Any = SimpleNamespace(group="wandb", key="api-key", group_version=None)
    if host is for_flytekit:
        secret = Secret(group="wandb", key="api-key")
    config = host.SpawnDDP(wandb=host.Wandb(project="p", secret=secret))
    for given in ([], [("aws", "id")]):
        assert make(config, secrets=given).secrets == [*given, ("wandb", "api-key")]
    assert make(config, secrets=[("wandb", "api-key")]).secrets == [("wandb", "api-key")]


@on_both
def test_a_config_and_a_function_that_cannot_train_are_refused_where_the_task_is_defined(
    host: ModuleType, other: ModuleType, make: Make
) -> None:
    with pytest.raises(TypeError, match="generates is a generator function"):
        make(host.SpawnDDP(), generates)
    for wrong, named in (
        ({"workers": host.WorkerGroup(number_of_workers=0)}, "number_of_workers"),
        ({"gang": host.Gang(min_workers=3)}, r"at most workers\.number_of_workers"),
        ({"workers": other.WorkerGroup()}, "a WorkerGroup"),
    ):
        with pytest.raises(ValueError, match=named):
            host.DaskDDP(**wrong)


@on_both
def test_neither_host_needs_the_other(host: ModuleType, other: ModuleType, make: Make) -> None:
    blocked = "flyte" if host is for_flytekit else "flytekit"
    script = f"""
import sys
sys.modules[{blocked!r}] = None
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
assert sys.modules.get("flytekit") is sys.modules.get("flyte") is None
from {host.__name__} import DaskDDP, SpawnDDP, DaskCluster
DaskDDP(), SpawnDDP(), DaskCluster()
assert sys.modules.get({blocked!r}) is None
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
