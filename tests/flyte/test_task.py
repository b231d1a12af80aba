"""The task types as Flyte's backend sees them: their specs equal those of flytekitplugins-dask where they must."""

import contextlib
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from flytekit import Deck, Documentation, PodTemplate, Resources, Secret, dynamic, task
from flytekit.configuration import DataConfig, Image, ImageConfig, SerializationSettings
from flytekit.core.base_task import TaskMetadata
from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extras.accelerators import A100
from flytekit.interactive import vscode
from flytekit.models.literals import LiteralMap
from flytekit.models.task import TaskTemplate
from flytekit.tools.translator import get_serializable
from kubernetes.client import V1PodSpec

from flytekitplugins.daskpytorch import DaskCluster, DaskDDP, SpawnDDP, Wandb, WorkerGroup
from flytekitplugins.daskpytorch.errors import WorkerLostError
from flytekitplugins.daskpytorch.flyte.context import FlyteRank, TaskOutput
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.task.in_ranks import UNDISTURBED

WORKERS = WorkerGroup(
    number_of_workers=3,
    image="worker:v3",
    requests=Resources(cpu="4", mem="8Gi"),
    limits=Resources(cpu="8", mem="16Gi", gpu="2"),
)
CONFIGS = [DaskDDP, DaskCluster]
HAS_ANNOTATIONS = "annotations" in TaskMetadata.__dataclass_fields__
"""True from flytekit 1.16.2 on."""


def make(config: object, **options: Any) -> Any:
    """A task of this config, as a user's module would define it."""

    @task(task_config=config, **options)
    def train(epochs: int = 1) -> float:
        return float(epochs)

    return train


@contextlib.contextmanager
def in_mode(mode: ExecutionState.Mode) -> Iterator[FlyteContext]:
    """During the block, flytekit runs a task in this mode."""
    ctx = FlyteContextManager.current_context()
    state = ctx.new_execution_state().with_params(mode=mode)
    with FlyteContextManager.with_context(ctx.with_execution_state(state)) as ctx:
        yield ctx


def serialised(made: Any) -> TaskTemplate:
    return spec_of(made).template


def spec_of(made: Any) -> Any:
    image = Image(name="default", fqn="registry.example/image", tag="v1")
    settings = SerializationSettings(project="p", domain="d", version="v", image_config=ImageConfig(image, [image]))
    return get_serializable(OrderedDict(), settings, made)


# ---- What the backend gets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_an_accelerator_that_the_workers_would_not_get_is_refused_where_the_task_is_defined(config: type) -> None:
    with pytest.raises(ValueError, match=r"accelerator=nvidia-tesla-a100 does not reach the workers.*pod_template="):
        make(config(workers=WORKERS), accelerator=A100)


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        ({}, "MINE"),
        ({"requests": Resources(gpu="1"), "accelerator": A100}, "MINE"),
        ({"limits": Resources(gpu="1"), "accelerator": A100}, "MINE"),
        ({"pod_template": PodTemplate(), "accelerator": A100}, "MINE"),
        ({"accelerator": A100}, "DASK_SCHEDULER_ADDRESS"),  # pods and ranks do not repeat the warning
        ({"accelerator": A100}, "RANK"),
    ],
)
def test_an_accelerator_that_the_workers_get_is_accepted(
    options: dict[str, Any], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    make(DaskDDP(workers=WORKERS), **options)


# ---- Weights & Biases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_run", [{}, {"entity": "team", "id": "own"}, {"entity": "team", "mode": "offline"}])
def test_a_run_that_the_consoles_link_could_not_name_has_none(of_run: Any) -> None:
    template = serialised(make(DaskDDP(wandb=Wandb(project="names", **of_run))))
    assert template.config == {"link_type": "none"}  # by any type, Flyte tells the pod FLYTE_EXECUTION_URL


# ---- What a task may be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DaskDDP, SpawnDDP])
def test_gang_cannot_be_a_dynamic_workflow(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot be the task_config of a @dynamic"):

        @dynamic(task_config=kind())
        def spread() -> None:
            pass


@pytest.mark.parametrize("decorator", [lambda function: function, vscode(port=8090)])  # the console links to vscode
@pytest.mark.parametrize("config", [DaskDDP(), SpawnDDP(nproc=2), DaskCluster()])
def test_what_flytekit_says_of_a_plain_task_it_says_of_ours(config: Any, decorator: Callable[..., Any]) -> None:
    options = {
        "retries": 2,
        "timeout": 60,
        "cache": True,
        "cache_version": "1",
        "cache_serialize": True,
        "cache_ignore_input_vars": ("epochs",),
        "interruptible": True,
        "deprecated": "soon",
        "enable_deck": True,
        "docs": Documentation(short_description="short"),
        "secret_requests": [Secret(group="g", key="k")],
        "accelerator": A100,
        "pod_template": PodTemplate(pod_spec=V1PodSpec(containers=[]), labels={"team": "names"}),
        "pod_template_name": "template",
        **({"labels": {"team": "names"}, "annotations": {**UNDISTURBED, "team": "names"}} if HAS_ANNOTATIONS else {}),
    }

    @decorator
    def train(epochs: int = 1) -> float:
        """Train."""
        return float(epochs)

    expected, found = (spec_of(task(task_config=each, **options)(train)) for each in (None, config))
    assert found.docs == expected.docs
    for field in ("id", "metadata", "interface", "security_context", "config", "extended_resources"):
        ours, theirs = (getattr(each.template, field) for each in (found, expected))
        if field == "extended_resources":  # of the accelerator; ours has shared memory beside it
            ours, theirs = ours.gpu_accelerator, theirs.gpu_accelerator
        assert ours == theirs, field
    assert (found.template.config or {}).get("link_type") == (expected.template.config or {}).get("link_type")


def test_a_task_that_another_one_calls_has_its_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    @task(task_config=SpawnDDP())
    def inner(epochs: int) -> None:
        pass

    seen: list[LiteralMap] = []
    monkeypatch.setattr(inner, "_rank_host", seen.append)
    monkeypatch.setattr(inner, "_train", lambda *_: LiteralMap({}))

    @task(task_config=SpawnDDP())
    def outer(other: str) -> None:
        pass

    monkeypatch.setattr(outer, "_train", lambda *_: inner.execute(epochs=3) or LiteralMap({}))
    ctx = FlyteContextManager.current_context()
    outer.dispatch_execute(ctx, TypeEngine.dict_to_literal_map(ctx, {"other": "x"}, {"other": str}))
    [literals] = seen
    assert literals.literals["epochs"].scalar.primitive.integer == 3


def test_a_lost_worker_of_a_mapped_gang_is_retried_on_a_backend_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(SpawnDDP())

    def lose_a_worker(*_: object) -> LiteralMap:
        raise WorkerLostError("gone")

    monkeypatch.setattr(made, "_train", lose_a_worker)
    with pytest.raises(WorkerLostError):
        made.execute()
    with in_mode(ExecutionState.Mode.TASK_EXECUTION), pytest.raises(FlyteRecoverableException, match="gone"):
        made.execute()


# ---- The end of a local run ------------------------------------------------------------------------------------------


class _Trained:
    """In place of a `Supervisor`: a gang that logs a value and ends as the test says."""

    ends_by: BaseException | None = None

    def __init__(self, request: Any, *_: object) -> None:
        self._observers = request.observers

    def cancel(self) -> None:
        """Nobody calls it."""

    def run(self) -> list[bytes]:
        for observer in self._observers:
            observer.on_event(
                journal.Logged(record=LogRecord(rank=0, step=7, num_steps=8, time=0.0, metrics={"loss": 0.25}))
            )
        if self.ends_by is not None:
            raise self.ends_by
        return [pickle.dumps(TaskOutput(literal_map=LiteralMap({}).to_flyte_idl().SerializeToString(), decks=[]))]


@pytest.fixture
def files_below(tmp_path: Path) -> Iterator[None]:
    """Flytekit's files lie below the test's folder."""
    ctx = FlyteContextManager.current_context()
    access = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"), DataConfig.auto())
    with FlyteContextManager.with_context(ctx.with_file_access(access)):
        yield


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch, files_below: None) -> type[_Trained]:
    """No ranks are started."""

    class Trained(_Trained):
        pass

    monkeypatch.setattr("flytekitplugins.daskpytorch.driver.supervisor.Supervisor", Trained)
    monkeypatch.setattr(fork_client, "connect", Mock())
    return Trained


@task(task_config=SpawnDDP(nproc=1), enable_deck=True)
def with_deck(steps: int = 8) -> None:
    """Its function is never called."""


@pytest.mark.parametrize("error", [None, ValueError("spoilt"), KeyboardInterrupt()])
def test_the_last_lines_say_how_it_ended_and_where_the_deck_is(
    error: BaseException | None,
    without_processes: type[_Trained],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    without_processes.ends_by = error
    monkeypatch.setattr(subprocess, "Popen", None)  # pip takes seconds to say what is installed
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        with_deck(steps=8)
    announced, _, line, deck = capfd.readouterr().err.splitlines()
    how = {type(None): "done", ValueError: "failed", KeyboardInterrupt: "interrupted"}[type(error)]
    assert re.fullmatch(rf"with_deck: {how} after \S+ s, step 7/8  loss 0.25", line)
    file = Path(deck.removeprefix("  Deck: "))
    assert announced == f"with_deck: its Deck, to be opened and reloaded: {file}"
    html = file.read_text()
    assert 'class="dpt-card dpt-chart"' in html
    assert "with_deck" in html
    assert re.findall(r'handleLinkClick\(this\)">(.*?)</li>', html)[0] == "Training"


@task(task_config=SpawnDDP(nproc=1), enable_deck=True)
def returns_a_module(note: str) -> torch.nn.Module:
    """flytekit writes a module, and cannot read one: `Weights only load failed`."""
    Deck("Mine", f"<b>{note}</b>")
    return torch.nn.Linear(3, 2)


def test_the_decks_of_rank_0_are_tabs_and_the_driver_loads_no_output(
    without_processes: type[_Trained], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hosts: list[FlyteRank] = []

    def run(trained: _Trained) -> list[bytes]:
        params = FlyteContextManager.current_context().user_space_params  # in a rank, which has a list of its own
        before = list(params.decks)
        params.decks.clear()
        made = pickle.dumps(hosts[0].outputs(returns_a_module.task_function(**hosts[0].arguments())))
        params.decks[:] = before
        return [made]

    of_current_task = FlyteRank.of_current_task

    def of_task(*args: Any, **kwargs: Any) -> FlyteRank:
        hosts.append(of_current_task(*args, **kwargs))
        return hosts[0]

    monkeypatch.setattr(FlyteRank, "of_current_task", of_task)
    monkeypatch.setattr(without_processes, "run", run)
    made = in_a_local_run(returns_a_module, {"note": "loud"})
    assert sorted(made.literals) == ["o0"]
    [file] = tmp_path.rglob("deck.html")
    page = file.read_text()
    assert "<b>loud</b>" in page
    tabs = re.findall(r'handleLinkClick\(this\)">(.*?)</li>', page)
    assert tabs == ["Training", "Timeline", "Source Code", "Input", "Mine"]


def in_a_local_run(made: Any, inputs: dict[str, Any]) -> LiteralMap:
    """What flytekit makes of a call before it reads the outputs for the caller."""
    with in_mode(ExecutionState.Mode.LOCAL_TASK_EXECUTION) as ctx:
        literals = TypeEngine.dict_to_literal_map(ctx, inputs, made.python_interface.inputs)
        return made.sandbox_execute(ctx, literals)


@pytest.fixture
def without_a_cluster(monkeypatch: pytest.MonkeyPatch, files_below: None) -> None:
    """Tasks with `DaskCluster` get no client."""
    monkeypatch.setattr("flytekitplugins.daskpytorch.dask.cluster.opened", lambda **_: contextlib.nullcontext())


@pytest.mark.usefixtures("without_a_cluster")
def test_a_deck_that_cannot_be_written_ends_no_task(capfd: pytest.CaptureFixture[str]) -> None:
    class Unwilling(Deck):  # type: ignore[misc]
        @property
        def name(self) -> str:
            raise OSError("no name")

    @task(task_config=DaskCluster(), enable_deck=True)
    def orchestrate() -> int:
        Unwilling("Mine")
        return 3

    assert orchestrate() == 3
    assert "the Deck could not be written (OSError: no name)" in capfd.readouterr().err


@pytest.mark.usefixtures("without_a_cluster")
def test_a_local_dask_cluster_task_says_where_its_deck_is(capfd: pytest.CaptureFixture[str]) -> None:
    @task(task_config=DaskCluster(), enable_deck=True)
    def orchestrate() -> None:
        Deck("Mine", "<p>so far</p>")

    orchestrate()
    [line] = capfd.readouterr().err.splitlines()
    page = Path(line.removeprefix("orchestrate: Deck: ")).read_text()
    assert "<p>so far</p>" in page
    assert re.findall(r"<li[^>]*>\s*(\w+)", page)[:2] == ["Timeline", "Mine"]  # the tabs


def test_a_process_in_which_triton_is_imported_ends_without_a_list_of_its_garbage() -> None:
    pytest.importorskip("triton", reason="torch brings triton where it is built for CUDA alone")
    program = """
import atexit, sys
atexit.register(lambda: print("the last word", file=sys.stderr))
import torch._dynamo, triton
from flytekitplugins.daskpytorch.task.process import exit_quickly
exit_quickly()
sys.exit(3)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.stderr, ended.stdout, ended.returncode) == ("the last word\n", "", 3)
