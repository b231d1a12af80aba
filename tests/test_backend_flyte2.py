"""What Flyte 2's own code makes of our tasks for its SDK, as a golden file: whether it is what the docs promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flyteplugins.dask")

from backend import render, render_flyte2
from flytekitplugins.daskpytorch.task.in_ranks import CLUSTER_SETTINGS, GANG_SETTINGS

Made = dict[str, Any]
GOLDEN = render.golden("flyte2")
ROLES = ("job-runner", "scheduler", "dask-worker")
GPU = "nvidia.com/gpu"
JOBS = {name: made for name, made in GOLDEN["resources"].items() if made["kind"] == "DaskJob"}
OF_THE_CODE = ["a rank raises", "a rank crashes", "a rank hangs"]
OF_THE_INFRASTRUCTURE = ["a worker is lost", "the task is told to end", "workers do not come"]


def pods(name: str) -> dict[str, Made]:
    """The specs of a DaskJob's three kinds of pods."""
    spec, cluster = JOBS[name]["spec"], JOBS[name]["spec"]["cluster"]["spec"]
    found = [part["spec"] for part in (spec["job"], cluster["scheduler"], cluster["worker"])]
    assert [pod["containers"][0]["name"] for pod in found] == list(ROLES)
    return dict(zip(ROLES, found, strict=True))


def containers(name: str) -> dict[str, Made]:
    return {role: pod["containers"][0] for role, pod in pods(name).items()}


def environment(container: Made) -> dict[str, str]:
    return {pair["name"]: pair.get("value", "") for pair in container["env"]}


def attempts(what: str) -> list[Made]:
    return list(GOLDEN["attempts"][what]["attempts"])


def end(what: str) -> tuple[str, str]:
    return GOLDEN["attempts"][what]["end"], GOLDEN["attempts"][what].get("message", "")


# ---- Whether it is of these tasks


def test_the_golden_file_is_of_the_tasks_as_they_are() -> None:
    assert GOLDEN["digests"] == render_flyte2.digests(), (
        "is that meant? Then run, with FLYTE2 set: python tests/backend/render.py, and commit what it writes"
    )


@pytest.mark.slow  # needs Go, the source code of Flyte 2, and minutes
@pytest.mark.skipif(render.GO is None or render_flyte2.CHECKOUT is None, reason="Go or FLYTE2 is missing")
def test_flyte_makes_of_them_what_it_made_before(tmp_path: Path) -> None:
    assert render_flyte2.contents(tmp_path, str(render.GO)) == GOLDEN


def test_what_attempts_leave_is_as_the_executor_was_shown_it(tmp_path: Path) -> None:
    left = {name: render_flyte2.document(raised, tmp_path / name) for name, raised in render_flyte2.errors()}
    assert {name: render_flyte2.described(each) for name, each in left.items()} == GOLDEN["failures"]


# ---- What starts in the pods


@pytest.mark.parametrize("name", JOBS)
def test_the_pods_run_flytes_runtime_and_dasks_own_commands(name: str) -> None:
    found = containers(name)
    assert found["job-runner"]["args"][0] == "a0"
    assert found["job-runner"]["args"][-1] == name.partition(".")[2]
    assert found["scheduler"]["args"] == ["dask", "scheduler"]
    assert found["dask-worker"]["args"][:4] == ["dask", "worker", "--name", "$(DASK_WORKER_NAME)"]


@pytest.mark.parametrize("name", JOBS)
def test_our_settings_of_dask_reach_all_the_pods(name: str) -> None:
    settings = CLUSTER_SETTINGS if name.startswith("with_client") else GANG_SETTINGS
    for container in containers(name).values():
        found = environment(container)
        assert settings.keys() <= found.keys()
        assert found["DASK_DISTRIBUTED__WORKER__PRELOAD"] == "flyteplugins.daskpytorch.preload"


def test_what_an_environment_says_of_dask_wins() -> None:
    for container in containers("with_client.own_environment").values():
        assert environment(container)["DASK_DISTRIBUTED__WORKER__DAEMON"] == "True"
        assert environment(container)["OMP_NUM_THREADS"] == "1"


def test_workers_are_as_many_and_have_what_their_group_asks_for() -> None:
    name = "pet_names_training.train"
    assert JOBS[name]["spec"]["cluster"]["spec"]["worker"]["replicas"] == 2
    assert containers(name)["dask-worker"]["resources"]["limits"] == {"cpu": "1", "memory": "2Gi"}


# ---- GPUs


def test_gpus_of_the_environment_are_those_of_job_runner_and_workers_and_bind_them_to_the_accelerators_nodes() -> None:
    name = "all_on_gpus.gpus_of_all"
    limits = {role: container["resources"]["limits"].get(GPU) for role, container in containers(name).items()}
    assert limits == {"job-runner": "4", "scheduler": None, "dask-worker": "4"}
    for pod in pods(name).values():
        assert "nvidia-tesla-a100" in str(pod["affinity"])
        assert {toleration["key"] for toleration in pod["tolerations"]} == {GPU, "example.com/gpu"}
        assert pod["containers"][0]["volumeMounts"] == [{"mountPath": "/dev/shm", "name": "flyte-shm"}]


def test_gpus_of_the_workers_group_are_asked_for_by_a_name_that_kubernetes_does_not_know() -> None:
    """Why `DaskDDP` warns of them: see test_flyte2.py. Once this fails, the warning may go."""
    asked = containers("on_gpus.gpus_of_workers")["dask-worker"]["resources"]
    assert (asked["requests"].get("gpu"), GPU in asked["requests"], GPU in asked["limits"]) == ("4", False, False)


def test_one_node_is_a_pod_with_its_gpus_and_shared_memory() -> None:
    pod = GOLDEN["resources"]["on_one_node.gpus_of_the_node"]
    [container] = pod["spec"]["containers"]
    assert (pod["kind"], container["resources"]["limits"][GPU]) == ("Pod", "4")
    assert container["volumeMounts"] == [{"mountPath": "/dev/shm", "name": "flyte-shm"}]


# ---- What becomes of attempts: the task has retries=2


@pytest.mark.parametrize("what", [*OF_THE_CODE, "the job runner's pod fails"])
def test_what_counts_as_the_tasks_own_is_tried_again_from_its_retries(what: str) -> None:
    found = attempts(what)
    assert [each["job"] for each in found] == ["run-a0-0", "run-a0-1", "run-a0-2"]
    assert [each["previous checkpoint"] for each in found] == ['""', *(each["checkpoint"] for each in found[:-1])]
    assert end(what)[0] == "Failed"
    assert end(what)[1].startswith("USER: ")


def test_the_same_error_at_the_same_step_ends_the_task() -> None:
    assert len(attempts("a rank raises the same at the same step")) == 1
    assert end("a rank raises the same at the same step") == ("Failed", "USER: no such label: 12")


@pytest.mark.parametrize("what", [*OF_THE_INFRASTRUCTURE, "somebody deletes the DaskJob"])
def test_a_system_error_has_the_same_attempt_start_again_without_a_limit(what: str) -> None:
    """With the same places for outputs and checkpoints: why our tasks count, and go on from their own."""
    found = attempts(what)
    assert len(found) == 5
    assert all(each == found[0] for each in found)
    assert end(what) == ("Progressing", "")


@pytest.mark.parametrize("what", OF_THE_INFRASTRUCTURE)
def test_a_start_after_a_system_error_succeeds_only_where_that_errors_document_is_gone(what: str) -> None:
    assert end(f"{what}, once") == ("Succeeded", "")
    assert len(attempts(f"{what}, once")) == 2
    assert end(f"{what}, once, and its error stays") == ("Progressing", "")


def test_the_console_shows_that_a_task_waits_runs_and_ends() -> None:
    phases = [phase.removeprefix("ACTION_PHASE_") for phase in GOLDEN["attempts"]["it ends with outputs"]["phases"]]
    assert phases == ["QUEUED", "INITIALIZING", "RUNNING", "SUCCEEDED"]
    assert end("it ends with outputs") == ("Succeeded", "")
