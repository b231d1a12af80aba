"""`SpawnDDP`: the task as Flyte's backend sees it, and its number of ranks on a node."""

from collections import OrderedDict
from typing import Any

import pytest
from flytekit import PodTemplate, Resources, TaskMetadata, task
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.extras.accelerators import A100
from flytekit.tools.translator import get_serializable
from kubernetes.client import V1Container, V1EmptyDirVolumeSource, V1PodSpec, V1Toleration, V1Volume, V1VolumeMount

from flytekitplugins.daskpytorch import Gang, SpawnDDP
from flytekitplugins.daskpytorch.node import hardware
from flytekitplugins.daskpytorch.node.hardware import FoundGpus
from flytekitplugins.daskpytorch.task.in_ranks import UNDISTURBED

HAS_ANNOTATIONS = "annotations" in TaskMetadata.__dataclass_fields__  # from flytekit 1.16.2 on
ANNOTATED: dict[str, Any] = {"annotations": UNDISTURBED} if HAS_ANNOTATIONS else {}


def template(config: object | None, **options: Any) -> Any:
    """What is registered for a task of this config."""

    @task(task_config=config, **options)
    def train(epochs: int = 1) -> float:
        return float(epochs)

    image = Image(name="default", fqn="registry.example/image", tag="v1")
    images = ImageConfig(default_image=image, images=[image])
    settings = SerializationSettings(project="p", domain="d", version="v", image_config=images)
    return get_serializable(OrderedDict(), settings, train).template.to_flyte_idl()


def pod(mount_path: str) -> PodTemplate:
    primary = V1Container(name="primary", volume_mounts=[V1VolumeMount(name="volume", mount_path=mount_path)])
    volume = V1Volume(name="volume", empty_dir=V1EmptyDirVolumeSource(medium="Memory", size_limit="1Gi"))
    toleration = V1Toleration(key="nvidia.com/gpu", operator="Exists")
    return PodTemplate(
        pod_spec=V1PodSpec(containers=[primary], volumes=[volume], tolerations=[toleration]),
        primary_container_name="primary",
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"requests": Resources(cpu="8", mem="32Gi", gpu="4"), "accelerator": A100, "environment": {"A": "B"}},
        {"pod_template": pod("/data")},
    ],
    ids=["plain", "resources", "pod_template"],
)
def test_it_is_an_ordinary_python_task_with_shared_memory(options: dict[str, Any]) -> None:
    made = template(SpawnDDP(nproc=4, gang=Gang(max_restarts=1)), **options)
    assert made.type == "python-task"
    assert made == template(None, shared_memory=True, **ANNOTATED, **options)
    assert made.extended_resources.shared_memory.mount_path == "/dev/shm"


def test_shared_memory_that_the_pod_template_mounts_is_left_alone() -> None:
    made = template(SpawnDDP(), pod_template=pod("/dev/shm"))
    assert made == template(None, pod_template=pod("/dev/shm"), **ANNOTATED)
    assert not made.extended_resources.HasField("shared_memory")


# ---- How many ranks


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with that many GPUs."""
    found = FoundGpus({str(i): "NVIDIA H100" for i in range(request.param)})
    monkeypatch.setattr(hardware, "gpus_here", lambda: found)


@pytest.mark.parametrize(
    ("gpus", "nproc", "backend", "ranks"),
    [
        (0, "auto", "auto", 1),
        (0, 3, "gloo", 3),
        (1, "auto", "nccl", 1),
        (4, "auto", "auto", 4),
        (4, 2, "nccl", 2),
        (1, 2, "gloo", 2),  # they share it
        (1, 2, "auto", 2),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_ranks_on_a_node(nproc: int | str, backend: str, ranks: int) -> None:
    assert hardware.num_ranks_here(nproc, backend) == ranks


@pytest.mark.parametrize(
    ("gpus", "nproc", "said"),
    [
        (0, "auto", r"each of 1 ranks; torch finds 0 on this node\. Ask"),
        (0, 2, r"each of 2 ranks; torch finds 0 on this node\. Ask"),
        (2, 3, r"nproc=3.* each of 3 ranks; torch finds 2 on this node \(GPU 0: NVIDIA H100, GPU 1: NVIDIA H100\)"),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_nccl_needs_a_gpu_for_every_rank(nproc: int | str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hardware.num_ranks_here(nproc, "nccl")
