"""Flyte's own code compiles and runs our tasks as the README promises. Golden files hold the results."""

from pathlib import Path
from typing import Any

import pytest

import specs
from backend import failures, render
from flytekitplugins.daskpytorch.flyte.task import PRELOAD
from flytekitplugins.daskpytorch.task.in_ranks import CLUSTER_SETTINGS, GANG_SETTINGS
from processes import SCRIPTS

Made = dict[str, Any]
ROLES = ("job-runner", "scheduler", "dask-worker")
PROFILES = ("sandbox", "gpu", "examples")
GPU = "nvidia.com/gpu"
ON_A_CLUSTER = {
    f"{profile} workflows.{task}"
    for profile in specs.PROFILES
    for task in ("pet_names_sweep.sweep", "pet_names_scaling.scale", "stores.forecast")
} | {"examples examples.more.own_environment"}


@pytest.fixture(scope="module")
def made() -> dict[str, Made]:
    """All resources, by profile and task."""
    return {f"{profile} {name}": made for profile in PROFILES for name, made in resources(profile).items()}


def resources(profile: str) -> Made:
    return dict(render.golden(profile)["resources"])


def jobs(made: dict[str, Made]) -> dict[str, Made]:
    return {name: each for name, each in made.items() if each["kind"] == "DaskJob"}


def pods(job: Made) -> dict[str, Made]:
    """The specs of a DaskJob's three kinds of pods."""
    spec, cluster = job["spec"], job["spec"]["cluster"]["spec"]
    return dict(
        zip(ROLES, (part["spec"] for part in (spec["job"], cluster["scheduler"], cluster["worker"])), strict=True)
    )


def containers(job: Made) -> dict[str, Made]:
    found = {role: pod["containers"][0] for role, pod in pods(job).items()}
    assert [container["name"] for container in found.values()] == list(ROLES)
    return found


def environment(container: Made) -> dict[str, str]:
    return {pair["name"]: pair.get("value", "") for pair in container["env"]}


def example(name: str) -> Made:
    return dict(resources("examples")[f"examples.{name}"])


def tolerated(pod: Made) -> set[str]:
    return {toleration["key"] for toleration in pod.get("tolerations", [])}


# ---- Whether they are of these tasks


def test_the_golden_files_are_of_the_tasks_as_they_are() -> None:
    assert render.golden("digests") == render.digests(), (
        "is that meant? Then run: python tests/backend/render.py, and commit what it writes"
    )


@pytest.mark.slow  # needs Go, and minutes
@pytest.mark.skipif(render.GO is None, reason="Go is not installed")
def test_flyte_makes_of_them_what_it_made_before(tmp_path: Path) -> None:
    render.lay_out(tmp_path)
    for name, content in render.contents(tmp_path).items():
        assert content == render.golden(name), name


@pytest.mark.parametrize("profile", specs.PROFILES)
def test_flytes_compiler_accepts_everything_that_is_registered(profile: str) -> None:
    assert sorted(render.golden(profile)["accepted"]) == sorted(specs.committed("sandbox"))


# ---- What starts in the pods


def test_each_tasks_pod_runs_the_tasks_own_command(made: dict[str, Made]) -> None:
    for name, each in made.items():
        pod = pods(each)["job-runner"] if each["kind"] == "DaskJob" else each["spec"]
        command = pod["containers"][0]["args"]
        assert command[0] == "pyflyte-execute"
        assert f"{name.split()[1].rpartition('.')[0]} task-name" in " ".join(command)
        assert "{{" not in " ".join(command)


def test_the_clusters_pods_run_commands_that_this_package_has(made: dict[str, Made]) -> None:
    for job in jobs(made).values():
        found = containers(job)
        assert found["scheduler"]["args"] == ["dask-scheduler"]
        worker = found["dask-worker"]
        assert worker["args"][:4] == ["dask-worker", "--name", "$(DASK_WORKER_NAME)", "--nthreads"]
        assert worker["args"][5:] == ["--memory-limit", worker["resources"]["limits"]["memory"]]
    assert {"dask-scheduler", "dask-worker"} <= {path.name for path in SCRIPTS.iterdir()}


def test_our_settings_of_dask_reach_all_the_pods(made: dict[str, Made]) -> None:
    for name, job in jobs(made).items():
        settings = PRELOAD | (CLUSTER_SETTINGS if name in ON_A_CLUSTER else GANG_SETTINGS)
        for container in containers(job).values():
            found = environment(container)
            assert settings.keys() <= found.keys(), name


# ---- What the console links to


def test_the_console_links_to_the_run_of_weights_and_biases_where_the_task_names_its_entity() -> None:
    links = {name: [uri for uri in uris if "wandb" in uri] for name, uris in render.golden("links").items()}
    assert links["examples.readme.train"] == ["https://wandb.ai/my-team/pet-names/runs/f3a-n0"]  # DaskDDP
    assert links["examples.more.on_one_node"] == ["https://wandb.ai/team/pets/runs/f3a-n0"]
    assert links["examples.more.gpus_of_workers"] == []  # without an entity
    assert "taskConfig" not in str(render.golden("links"))


def test_a_task_that_tracks_without_a_link_knows_its_executions_page() -> None:
    for container in containers(example("more.gpus_of_workers")).values():
        assert environment(container)["FLYTE_EXECUTION_URL"].startswith("https://flyte.example/console/")


# ---- GPUs


def test_flyte_gives_gpus_of_the_workers_group_alone_neither_tolerations_nor_the_accelerators_nodes() -> None:
    for pod in pods(example("more.gpus_of_workers")).values():
        assert tolerated(pod) == set()
        assert pod["affinity"] == {}


def test_with_gpus_of_the_tasks_own_flyte_binds_all_pods_to_the_accelerators_nodes() -> None:
    job = example("more.gpus_of_all")
    assert {tuple(sorted(tolerated(pod))) for pod in pods(job).values()} == {("example.com/gpu", GPU)}
    assert all("nvidia-tesla-a100" in str(pod["affinity"]) for pod in pods(job).values())
    limits = {role: container["resources"]["limits"].get(GPU) for role, container in containers(job).items()}
    assert limits == {"job-runner": "1", "scheduler": None, "dask-worker": "4"}


def test_a_task_on_one_node_has_its_gpus_their_nodes_and_shared_memory() -> None:
    pod = example("more.on_one_node")["spec"]
    assert pod["containers"][0]["resources"]["limits"][GPU] == "4"
    assert "nvidia-tesla-a100" in str(pod["affinity"])
    assert tolerated(pod) >= {GPU, "example.com/gpu"}
    assert pod["containers"][0]["volumeMounts"] == [{"mountPath": "/dev/shm", "name": "flyte-shared-memory"}]


@pytest.mark.parametrize("task", ["dogs.train", "pet_names.train", "retrain.train"])
def test_the_profile_with_gpus_gives_each_worker_one(task: str) -> None:
    limits = {
        profile: containers(resources(profile)[f"workflows.{task}"])["dask-worker"]["resources"]["limits"].get(GPU)
        for profile in specs.PROFILES
    }
    assert limits == {"sandbox": None, "gpu": "1"}


# ---- What becomes of attempts: the README's task has retries=3, and is interruptible


def attempts(what: str) -> list[Made]:
    return list(render.golden("attempts")[what]["attempts"])


def test_what_attempts_leave_is_as_flytes_propeller_was_shown_it(tmp_path: Path) -> None:
    render.lay_out_examples(tmp_path / "examples")
    left = {name: failures.described(document) for name, document in render.documents(tmp_path).items()}
    assert left == render.golden("failures")


def test_every_failure_was_shown_to_propeller() -> None:
    assert render.golden("failures").keys() <= render.golden("attempts").keys()


@pytest.mark.parametrize("what", ["a rank raises", "a rank crashes", "a rank hangs"])
def test_what_is_wrong_with_the_code_is_not_tried_again(what: str) -> None:
    assert len(attempts(what)) == 1
    assert render.golden("attempts")[what]["end"] == "Failed"


@pytest.mark.parametrize("what", ["a worker is lost", "the task is told to end", "workers do not come"])
def test_what_the_infrastructure_did_is_tried_again_from_flytes_budget_and_the_last_time_on_demand(what: str) -> None:
    assert [each["workers on spot machines"] for each in attempts(what)] == [True, True, True, False]
    assert render.golden("attempts")[what]["message"].startswith("[3/3] currentAttempt done. Last Error: SYSTEM::")


@pytest.mark.parametrize("what", ["a rank raises FlyteRecoverableException", "the job runner's pod fails"])
def test_what_counts_as_the_tasks_own_is_tried_again_from_its_retries_and_stays_on_spot_machines(what: str) -> None:
    assert [each["workers on spot machines"] for each in attempts(what)] == [True, True, True, True]
    assert render.golden("attempts")[what]["message"].startswith("[4/4] currentAttempt done. Last Error: USER::")
