"""A Kubernetes with the real Dask operator in it, for tests."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from anyio.from_thread import BlockingPortal, start_blocking_portal
from kmock import Server

from backend.control_plane import ControlPlane, Object
from backend.kubelet import Kubelet
from processes import SCRIPTS, end, until

NAMESPACE = "flytesnacks-development"


@dataclass
class Kube:
    """What tests do to it, and see of it."""

    plane: ControlPlane
    kubelet: Kubelet
    portal: BlockingPortal
    controllers: list[Future[Any]]

    def submit(self, job: Object) -> None:
        """As Flyte's propeller does."""
        self.portal.call(self.plane.make, "daskjobs", NAMESPACE, job)

    def status(self, name: str) -> str:
        """A DaskJob's state, as propeller sees it."""
        for controller in self.controllers:
            if controller.done():
                controller.result()
        job = self.plane.find("daskjobs", name)
        return str(job.get("status", {}).get("jobStatus", "")) if job else "deleted"

    def ends(self, name: str) -> str:
        """How a DaskJob ends."""
        until(lambda: self.status(name) in {"Successful", "Failed", "deleted"}, lambda: f"{name}\n{self.logs()}")
        return self.status(name)

    def pods(self, component: str) -> list[str]:
        """The names of pods of a kind that run or may."""
        return [
            pod["metadata"]["name"]
            for pod in self.plane.alive("pods")
            if pod["metadata"]["labels"].get("dask.org/component") == component
            and pod["status"]["phase"] in {"Pending", "Running"}
        ]

    def delete(self, plural: str, name: str) -> None:
        """As `kubectl delete` does."""
        found = self.plane.find(plural, name)
        assert found is not None
        self.portal.call(self.plane.remove, plural, found)

    def evict(self, name: str) -> None:
        """Have a pod's node evict it: SIGTERM, the grace period, SIGKILL."""
        self.portal.call(self.kubelet.evict, name)

    def drain(self, name: str) -> None:
        """Drain a pod's node: the same, and the pod's object is deleted."""
        self.portal.call(self.kubelet.drain, name)

    def kill(self, name: str) -> None:
        """Kill all processes of a pod."""
        self.portal.call(self._kill, name)

    def logs(self) -> str:
        """What all pods have said, and the operator."""
        return "\n".join(f"== {log}\n{log.read_text()[-4000:]}" for log in sorted(self.kubelet.folder.rglob("log")))

    async def _kill(self, name: str) -> None:
        self.kubelet.kill(name)


@contextlib.contextmanager
def kubernetes(folder: Path, image: Mapping[str, str], **kubelet: Any) -> Iterator[Kube]:
    """One with a node on which pods run as processes; `image` is the environment that the image sets."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        plane = ControlPlane()
        stack.enter_context(portal.wrap_async_context_manager(plane))
        server = Server(plane)
        stack.enter_context(portal.wrap_async_context_manager(server))
        node = Kubelet(plane=plane, folder=folder, scripts=SCRIPTS, environment=image, **kubelet)
        controllers = [portal.start_task_soon(plane.control), portal.start_task_soon(node.run)]
        stack.callback(portal.call, node.close)
        for controller in controllers:
            stack.callback(controller.cancel)
        stack.callback(end, _operator(folder, str(server.url).rstrip("/")))
        yield Kube(plane, node, portal, controllers)


def _operator(folder: Path, url: str) -> subprocess.Popen[bytes]:
    """The operator, by the command of its image."""
    named = {"name": "test", "cluster": {"server": url}, "user": {"token": "none"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
        "clusters": [{key: named[key] for key in ("name", "cluster")}],
        "users": [{key: named[key] for key in ("name", "user")}],
    }
    place = folder / "operator"
    place.mkdir()
    (place / "config").write_text(yaml.safe_dump(config))
    command = [str(SCRIPTS / "kopf"), "run", "--standalone", "--all-namespaces"]
    with (place / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, "-m", "dask_kubernetes.operator.controller"],
            cwd=place,
            env={**os.environ, "KUBECONFIG": str(place / "config")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def of_attempt(job: Object, storage: Path, number: int = 0, previous: str = '""') -> Object:
    """A DaskJob with a folder for Flyte's storage, as that of a later attempt."""
    name = f"f3a-n0-{number}"
    local = json.loads(json.dumps(job).replace("s3://flyte", str(storage)).replace("f3a-n0-0", name))
    runner = local["spec"]["job"]["spec"]["containers"][0]
    runner["args"][runner["args"].index("--prev-checkpoint") + 1] = previous
    prefix = runner["args"].index("--output-prefix") + 1
    runner["args"][prefix] = f"{Path(runner['args'][prefix]).parent}/{number}"
    cluster = local["spec"]["cluster"]["spec"]
    for part in (local["spec"]["job"], cluster["scheduler"], cluster["worker"]):
        for variable in part["spec"]["containers"][0]["env"]:
            if variable["name"] == "FLYTE_ATTEMPT_NUMBER":
                variable["value"] = str(number)
    return dict(local)


def argument(job: Object, name: str) -> Path:
    """What the job runner is given by that option."""
    given = job["spec"]["job"]["spec"]["containers"][0]["args"]
    return Path(given[given.index(name) + 1])
