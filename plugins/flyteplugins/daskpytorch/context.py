"""Flyte 2's context: as the plugin's `Execution` in the driver, and in ranks, with rank 0's outputs."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import flyte
from flyte._context import internal_ctx
from flyte._initialize import _get_init_config
from flyte._internal.runtime.io import error_path
from flyte._secret import secrets_from_request
from flyte.io import Dir
from flyte.models import TaskContext
from flyte.report import Report
from flyte.storage import ABFS, S3, Storage
from flyte.syncify import syncify

from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.protocol import host, pickling
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.task.local_runs import LocalRun, local_run

BESIDE = ".daskpytorch"
"""Suffix of Flyte's own checkpoint for our folder. Flyte's own is a single object, which the user may write."""
SECRETS_FOLDER = Path("/etc/flyte/secrets")
"""Where Flyte 2 mounts secrets as files."""
OF_AZURE = ("account_name", "account_key", "tenant_id", "client_id", "client_secret")
"""Storage options that are equal in Flyte's `ABFS` and in adlfs, the fsspec library for Azure."""
INHERITED = ("FLYTE_", "_U_", "_F_", "ACTION_NAME", "RUN_NAME")


class Flyte2Execution(host.Execution):
    def __init__(self, ctx: TaskContext, run: LocalRun | None) -> None:
        self._ctx = ctx
        self._run = run
        if ctx:
            self.name = "local" if ctx.mode == "local" else f"{ctx.action.run_name}-{ctx.action.name}"
            self.task = ctx.report  # each attempt has one report, while Flyte replaces contexts

    def checkpoint_paths(self, key: str) -> host.StoragePaths | None:
        if self._run is not None:
            return self._run.paths(key)
        paths = self._ctx.checkpoint_paths if self.task is not None and self._ctx.mode != "local" else None
        if paths is None or not paths.checkpoint_path:
            return None
        files = Files(self.filesystem(paths.checkpoint_path.strip()))
        own, previous = (_beside(files, path, key) for path in (paths.checkpoint_path, paths.prev_checkpoint_path))
        if files.fs.exists(f"{own}/{MANIFEST}"):  # by an earlier start of this attempt: see `earlier_system_errors`
            previous = own
        return host.StoragePaths(files=files, previous=previous, own=str(own))

    def opener(self) -> Callable[[str], Any]:
        return partial(opened, storage=storage())

    def new_folder(self) -> str | None:
        return str(self._ctx.raw_data_path.get_random_remote_path()) if self.task is not None else None

    def put_folder(self, folder: Path, uri: str) -> None:
        files = Files(self.filesystem(uri))
        for path in filter(Path.is_file, sorted(folder.rglob("*"))):
            files.put(path, f"{uri}/{path.relative_to(folder).as_posix()}")

    def secret(self, name: Any) -> str:
        """Return a secret from its environment variable or else its mounted file. Raises `ValueError` without both."""
        default = f"{name.group}_{name.key}" if name.group else name.key
        variable = getattr(name, "as_env_var", None) or default.replace("-", "_").upper()
        if variable in os.environ:
            return os.environ[variable]
        with contextlib.suppress(OSError):
            return (SECRETS_FOLDER / str(name.key)).read_text().strip()
        raise ValueError(
            f"there is no secret {name.key}: neither is the variable {variable} set nor is there a file of this name "
            f"in {SECRETS_FOLDER}. Is it among the environment's secrets?"
        )


def earlier_system_errors() -> int:
    """Return how often this task attempt has ended with a system error, and rename the last error's file.

    After a system error, Flyte 2 starts the same attempt again, with equal paths and without a limit. An error file of
    an earlier start would count as the outcome, even if the new start succeeds.
    """
    path = error_path(flyte.ctx().output_path)
    files, aside = opened(path, storage()), path.removesuffix(".pb")
    try:
        number = len(files.glob(f"{aside}-*.pb"))
        if files.exists(path):
            number += 1
            files.mv(path, f"{aside}-{number}.pb")
    except Exception as error:  # whatever a store's client raises
        say(
            f"cannot look for {path} of an earlier start of this attempt, or move the file aside "
            f"({type(error).__name__}: {error}). If the file is there, Flyte takes it for this start's outcome"
        )
        return 0
    return number


def _beside(files: Files, checkpoint: str | None, key: str) -> str | None:
    path = (checkpoint or "").strip()
    return f"{files.path(path)}{BESIDE}/{key}" if path else None


def rank_environment(secrets: Any) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
    for secret in secrets_from_request(secrets) if secrets else ():
        if secret.as_env_var in os.environ:
            inherited[secret.as_env_var] = os.environ[secret.as_env_var]
    return inherited


def storage() -> Storage | None:
    """Return the settings that were passed to `flyte.init`. None: clients use the environment's settings."""
    config = _get_init_config()
    return config.storage if config is not None else None


def opened(uri: str, storage: Storage | None) -> Any:
    told: dict[str, Any] = {}
    if uri.startswith(("s3://", "s3a://")):
        s3 = storage if isinstance(storage, S3) else S3.auto()
        told = {"key": s3.access_key_id, "secret": s3.secret_access_key, "endpoint_url": s3.endpoint}
        if s3.region:
            told["client_kwargs"] = {"region_name": s3.region}
        if s3.addressing_style:
            told["config_kwargs"] = {"s3": {"addressing_style": s3.addressing_style}}
    elif uri.startswith(("abfs://", "abfss://")):
        azure = storage if isinstance(storage, ABFS) else ABFS.auto()
        told = {name: getattr(azure, name) for name in OF_AZURE}
    return host.open_filesystem(uri, **{name: value for name, value in told.items() if value})


def current() -> Flyte2Execution:
    return Flyte2Execution(flyte.ctx(), local_run.get())


host.provide(current)


# ---- In a rank


@dataclass(frozen=True, kw_only=True)
class TaskOutput:
    value: Any
    tabs: Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Flyte2Rank:
    """Part of Flyte 2's context that the driver sends to ranks, so that Flyte's functions work there."""

    ctx: TaskContext
    storage: Storage | None
    inputs: bytes
    """Pickled. Files, folders and data frames are references, which each rank opens itself."""
    outputs_wanted: Sequence[str]
    task_name: str
    results: str
    """Folder or URI of the files that ranks submit, complete when the task has ended."""

    @classmethod
    def of_current_task(cls, task_name: str, inputs: Mapping[str, Any], outputs: Sequence[str], results: str) -> Self:
        ctx = flyte.ctx()
        return cls(
            ctx=dataclasses.replace(ctx, report=Report(ctx.report.name), compiled_image_cache=None, data={}),
            storage=storage(),
            inputs=pickling.dumps(dict(inputs)),
            outputs_wanted=outputs,
            task_name=task_name,
            results=results,
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """During the block, make `flyte.ctx()` and Flyte's functions work in this rank as in an ordinary task."""
        _revive()
        action, root = self.ctx.action, Path(self.ctx.run_base_dir)
        how = {"org": action.org, "project": action.project, "domain": action.domain, "root_dir": root}
        asyncio.run(flyte.init.aio(**how, storage=self.storage, sync_local_sys_paths=False))
        # Known even if the user's code imports another SDK.
        with internal_ctx().replace_task_context(self.ctx), host.known_to_threads(current()):
            yield

    def arguments(self) -> dict[str, Any]:
        return dict(pickling.loads(self.inputs))

    def outputs(self, returned: Any) -> TaskOutput:
        """Return rank 0's return value unconverted, with the tabs of its report.

        Raises `TypeError` if the number of values differs from the task's outputs.
        """
        host.check_count(self.task_name, returned, self.outputs_wanted)
        tabs = {name: tab.content for name, tab in self.ctx.report.tabs.items() if tab.content}
        return TaskOutput(value=returned, tabs=tabs)

    def results_folder(self) -> Dir[Any]:
        return Dir(path=self.results)


def _event_loop() -> Any:
    return syncify._bg_loop  # noqa: SLF001 - flyte 2.12


def _revive() -> None:
    """Give Flyte's event loop a new thread: a forked rank lacks the fork server's."""
    loop = _event_loop()
    if not loop.thread.is_alive():
        loop.__init__(loop.thread.name)


def put_to_sleep() -> None:
    """Import what ranks need, and end the thread of Flyte's event loop. Called by the fork server before it forks."""
    import flyte.types  # noqa: F401 - ranks need the module, whose import takes seconds

    _event_loop().stop()
