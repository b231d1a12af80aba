"""The task types for Flyte 2, as its backend and its users see them. No rank runs."""

import asyncio
import os
import queue
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock
from urllib.parse import unquote

import fsspec
import obstore.fsspec
import pytest
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem
from s3fs import S3FileSystem

pytest.importorskip("flyteplugins.dask")

import flyte
import flyte.errors
import flyte.storage
from flyte._internal.runtime.convert import convert_error_to_native, convert_from_native_to_error
from flyte.models import SerializationContext
from flyteplugins.dask import Dask
from flyteplugins.dask import Scheduler as TheirScheduler
from flyteplugins.dask import WorkerGroup as TheirWorkers

import flytekitplugins.daskpytorch as for_flytekit
import flyteplugins.daskpytorch as for_flyte2
from flytekitplugins.daskpytorch.errors import PreemptedError, WorkerLostError
from flytekitplugins.daskpytorch.protocol import host
from flyteplugins.daskpytorch import DaskCluster, DaskDDP, Gang, Scheduler, SpawnDDP, WorkerGroup, context
from flyteplugins.daskpytorch import task as task_module
from pages import block

SERIALIZED = SerializationContext(version="v1", project="p", domain="d", org="o", root_dir=Path.cwd())


def one(x: int) -> int:
    return x


def made(config: Any, function: Any = one, *, options: dict[str, Any] | None = None, **of_environment: Any) -> Any:
    return flyte.TaskEnvironment("made", plugin_config=config, **of_environment).task(**(options or {}))(function)


def test_the_cluster_is_the_one_that_flytes_own_plugin_asks_for() -> None:
    resources = flyte.Resources(cpu=(1, 2), memory="2Gi", gpu=2)
    pods = {"image": "registry/image:1", "resources": resources}
    theirs = made(Dask(scheduler=TheirScheduler(**pods), workers=TheirWorkers(number_of_workers=3, **pods)))
    for kind in (DaskDDP, DaskCluster):
        ours = made(kind(scheduler=Scheduler(**pods), workers=WorkerGroup(number_of_workers=3, **pods)))
        assert ours.custom_config(SERIALIZED) == theirs.custom_config(SERIALIZED)
        assert ours.custom_config(SERIALIZED)["workers"]["numberOfWorkers"] == 3
        assert ours.task_type == theirs.task_type == "dask"
    assert ours.plugin_config.num_workers == 3
    assert made(DaskDDP(workers=WorkerGroup(**pods)))._num_ranks_per_worker() == 2


def test_gpus_that_flyte_would_ask_for_by_a_wrong_name_are_told_and_those_of_the_environment_are_the_workers() -> None:
    gpus = flyte.Resources(cpu=8, gpu="A100:4")
    for kind in (DaskDDP, DaskCluster):
        with pytest.raises(ValueError, match=r"without their kind, .*Resources\(gpu='A100:4'\)"):
            made(kind(workers=WorkerGroup(number_of_workers=2, resources=gpus)))
        with pytest.warns(UserWarning, match=r"made.one: Flyte 2's plugin for Dask, as of 2\.0\.43, .* `gpu`"):
            made(kind(workers=WorkerGroup(number_of_workers=2, resources=flyte.Resources(gpu=4))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inherited = made(DaskDDP(workers=WorkerGroup(number_of_workers=2)), resources=gpus)
        asked = made(DaskDDP(gang=Gang(ranks_per_worker=2)), resources=gpus)
        none = made(DaskDDP())
        names: dict[str, Any] = {}
        exec(block("resources=flyte.Resources(cpu=16"), names)
    assert isinstance(names["training"].plugin_config, DaskDDP)
    assert [task._num_ranks_per_worker() for task in (inherited, asked, none)] == [4, 2, 1]


def test_one_node_is_an_ordinary_task() -> None:
    task = made(SpawnDDP(nproc=2))
    assert task.task_type == flyte.TaskEnvironment("plain").task(one).task_type
    assert not task.custom_config(SERIALIZED)
    assert task.env_vars is None


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        ("GPU 3 of host a failed: CUDA error: uncorrectable ECC error encountered", "GpuEccUncorrectable"),
        ("... found: 3 uncorrectable memory errors (ECC) since its driver was loaded", "GpuEccUncorrectable"),
        ("... found: a row of its memory waits to be remapped at a reset", "GpuRowRemapPending"),
        ("... found: a row of its memory could not be remapped", "GpuXidError"),
        ("GPU 3 of host a failed: NVML_ERROR_GPU_IS_LOST: GPU is lost", "GpuFallenOffBus"),
        ("GPU 3 of host a failed: CUDA error: uncorrectable NVLink error", "GpuNvlinkError"),
        ("... found: other processes hold 3.0 of 8.0 GiB of its memory (process 7)", None),
        ("its worker was lost", None),
    ],
)
def test_a_broken_gpu_is_flytes_typed_error(cause: str, code: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flyte, "ctx", lambda: REMOTE)
    task = made(SpawnDDP())
    monkeypatch.setattr(task, "_run", AsyncMock(side_effect=WorkerLostError(cause, cause=cause)))
    with pytest.raises(flyte.errors.RuntimeSystemError, match=re.escape(cause)) as raised:
        asyncio.run(task.execute(x=1))
    assert raised.value.code == (code or "WorkerLostError")
    assert isinstance(raised.value, flyte.errors.GPUFaultSystemError) == (code is not None)
    if code is not None:
        left = convert_error_to_native(convert_from_native_to_error(raised.value))
        assert isinstance(left, flyte.errors.GPUFaultSystemError)


def test_all_else_is_the_same_objects() -> None:
    assert set(for_flyte2.__all__) == set(for_flytekit.__all__)
    own = set(for_flytekit.OF_FLYTE)
    for name in set(for_flyte2.__all__) - own:
        assert getattr(for_flyte2, name) is getattr(for_flytekit, name)
    assert for_flyte2.dispatch is for_flytekit.dispatch
    for name in own:
        assert getattr(for_flyte2, name) is not getattr(for_flytekit, name)
    with pytest.raises(AttributeError, match="settings"):
        for_flyte2.settings  # noqa: B018


@pytest.mark.parametrize("package", [for_flyte2, for_flytekit])
def test_type_checkers_see_the_names_that_are_there(package: ModuleType) -> None:
    files = Path(package.__file__ or ""), Path(for_flytekit.__file__ or "").with_name("public.py")
    seen = [name for file in files for name in re.findall(r"from \S+ import (\w+) as \1\n", file.read_text())]
    assert sorted(seen) == sorted(package.__all__)
    assert set(seen) < set(dir(package))


def test_it_cannot_be_reusable() -> None:
    policy = flyte.ReusePolicy(replicas=1)
    with pytest.raises(ValueError, match="reusable"):
        flyte.TaskEnvironment("made", plugin_config=SpawnDDP(), reusable=policy)
    with pytest.raises(ValueError, match="SpawnDDP has a cluster or ranks of its own, and cannot be reusable"):
        made(SpawnDDP()).override(reusable=policy)


REMOTE = SimpleNamespace(
    mode="remote", output_path="memory://none", action=SimpleNamespace(run_name="r", name="a0"), report=object()
)
"""The context of a task on a backend."""


@pytest.mark.parametrize(("trains", "said"), [(True, r"SIGTERM\)$"), (False, "no gang was running")])
def test_sigterm_ends_the_gang_or_without_one_the_task(
    trains: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flyte, "ctx", lambda: REMOTE)
    before, reasons = signal.getsignal(signal.SIGTERM), queue.SimpleQueue[str]()
    gang, task = Mock(preempt=reasons.put), made(SpawnDDP())

    def train() -> None:
        host.running.add(gang)
        os.kill(os.getpid(), signal.SIGTERM)
        raise PreemptedError(reasons.get(timeout=60))

    async def run(_: object) -> None:
        if trains:
            await task_module.run_sync_in_thread(train)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(600)

    monkeypatch.setattr(task, "_run", run)
    with pytest.raises(flyte.errors.RuntimeSystemError, match=said):
        asyncio.run(task.execute(x=1))
    host.running.discard(gang)
    assert signal.getsignal(signal.SIGTERM) == before


def test_checkpoints_lie_beside_the_one_object_of_an_attempt() -> None:
    action = SimpleNamespace(run_name="r", name="a0")
    paths = SimpleNamespace(
        checkpoint_path="memory://b/r/2/_flytecheckpoints", prev_checkpoint_path="memory://b/r/1/_flytecheckpoints "
    )
    ctx: Any = SimpleNamespace(
        mode="remote", action=action, report=object(), raw_data_path=None, checkpoint_paths=paths
    )
    execution = context.Flyte2Execution(ctx, None)
    found = execution.checkpoint_paths("gang")
    assert found is not None
    assert found.own == "memory://b/r/2/_flytecheckpoints.daskpytorch/gang"
    assert found.previous == "memory://b/r/1/_flytecheckpoints.daskpytorch/gang"
    assert execution.name == "r-a0"
    paths.prev_checkpoint_path = ""
    first = execution.checkpoint_paths("gang")
    assert first is not None
    assert first.previous is None


def test_secrets_are_found_as_flyte_mounts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execution = context.Flyte2Execution(flyte.ctx(), None)
    monkeypatch.setattr(context, "SECRETS_FOLDER", tmp_path)
    secret = SimpleNamespace(group="wandb", key="api-key")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ValueError, match="neither is the variable WANDB_API_KEY set"):
        execution.secret(secret)
    (tmp_path / "api-key").write_text("of the file\n")
    assert execution.secret(secret) == "of the file"
    monkeypatch.setenv("WANDB_API_KEY", "of the variable")
    assert execution.secret(secret) == "of the variable"
    monkeypatch.setenv("OWN_NAME", "own")
    assert execution.secret(flyte.Secret(key="api-key", as_env_var="OWN_NAME")) == "own"


@pytest.fixture
def of_the_sdk() -> Iterator[None]:
    """What an import of the SDK does to fsspec."""
    obstore.fsspec.register(["s3", "gs", "abfs", "abfss"], asynchronous=True)
    yield
    for name in ("gs", "gcs", "abfs", "abfss", "az"):
        _registry.pop(name, None)
    fsspec.register_implementation("s3", S3FileSystem, clobber=True)
    S3FileSystem.clear_instance_cache()  # what was opened here speaks for nobody else


def test_s3_is_read_by_functions_and_by_the_settings_that_flyte_was_given(
    of_the_sdk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"access_key_id": "access", "secret_access_key": "hush"}
    given = flyte.storage.S3(
        endpoint="http://storage.example", region="eu-central-1", addressing_style="virtual", **keys
    )
    for files in (context.opened("s3://bucket/prefix", given), host.open_filesystem("s3://bucket")):
        assert isinstance(files, S3FileSystem)
        assert not files.asynchronous
    found = context.opened("s3://bucket/prefix", given)
    assert (found.storage_options["key"], found.storage_options["secret"]) == ("access", "hush")
    signed = found.sign("s3://bucket/a")
    assert signed.startswith("http://bucket.storage.example/a?")
    assert "/eu-central-1/s3/" in unquote(signed)
    monkeypatch.setenv("FLYTE_AWS_S3_ADDRESSING_STYLE", "virtual")
    by_variable = context.opened("s3://bucket/prefix", None).storage_options
    assert by_variable == {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}


class Bucket(AbstractFileSystem):
    """In place of gcsfs's and adlfs's, which look for credentials."""

    protocol = ("gs", "gcs", "abfs", "az")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"of_url": path}


@pytest.mark.parametrize(
    ("protocol", "other", "package", "kind"), [("gs", "gcs", "gcsfs", "GCS"), ("abfs", "az", "adlfs", "AzureBlob")]
)
def test_other_buckets_are_opened_as_without_the_sdk(
    of_the_sdk: None, monkeypatch: pytest.MonkeyPatch, protocol: str, other: str, package: str, kind: str
) -> None:
    uri = f"{protocol}://bucket/a/b"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=f"(?i)install {package} to access"):
            host.open_filesystem(uri)
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(**{f"{kind}FileSystem": Bucket}))
    files, path = for_flyte2.url_to_fs(uri, own="x")
    assert (type(files), path) == (Bucket, "bucket/a/b")
    assert files.storage_options == {"of_url": f"{other}://bucket/a/b", "own": "x"}


def test_azure_is_opened_by_the_keys_that_flyte_was_given(of_the_sdk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", SimpleNamespace(AzureBlobFileSystem=Bucket))
    given = flyte.storage.ABFS(account_name="account", account_key="hush")
    found = context.opened("abfs://bucket/a", given).storage_options
    assert found == {"of_url": "az://bucket/", "account_name": "account", "account_key": "hush"}
