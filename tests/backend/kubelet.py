"""A kubelet that runs pods as processes of this machine, each with the pod's own command, environment and address."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from backend.control_plane import ROUND, ControlPlane, Object

NETWORK = Path(__file__).parent / "network"
"""A `sitecustomize` that gives a Python the address and the names of its pod."""


@dataclass
class Container:
    """The first container of a pod, which is a process."""

    pod: Object
    address: str
    process: subprocess.Popen[bytes]

    def signal(self, number: int) -> None:
        """Send the main process a signal; with SIGKILL, all of its processes."""
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            children = psutil.Process(self.process.pid).children(recursive=True) if number == signal.SIGKILL else []
            self.process.send_signal(number)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


@dataclass(kw_only=True)
class Kubelet:
    """One node on which all pods run that may."""

    plane: ControlPlane
    folder: Path
    scripts: Path
    """Where the image has its commands."""
    environment: Mapping[str, str]
    """What the image sets."""
    grace_period: float = 30.0
    """Seconds from SIGTERM to SIGKILL."""
    containers: dict[str, Container] = field(default_factory=dict)
    """By the pods' names."""
    ending: set[asyncio.Task[None]] = field(default_factory=set)
    num_addresses: int = 1

    @property
    def names(self) -> Path:
        """A file for each name of a service, with its address."""
        return self.folder / "names"

    async def run(self) -> None:
        """Bring the processes to what the pods say, for ever."""
        self.names.mkdir()
        while True:
            pods = {pod["metadata"]["name"]: pod for pod in self.plane.alive("pods")}
            for name in self.containers.keys() - pods.keys():
                self._end_later(self.containers.pop(name))
            for name, pod in pods.items():
                await self._look_after(name, pod)
            self._publish()
            await asyncio.sleep(ROUND)

    async def evict(self, name: str) -> None:
        """As where a node lacks memory or shuts down: a grace period, then the end. The pod's object stays."""
        container = self.containers.pop(name)
        await self._end(container)
        await self._report(container.pod, "Failed", reason="Evicted")

    async def drain(self, name: str) -> None:
        """As where a node is drained: the pod is marked as deleted, ends within a grace period, and is gone."""
        container = self.containers.pop(name)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await self.plane.change("pods", container.pod, {"metadata": {"deletionTimestamp": now}})
        await self._end(container)
        await self._report(container.pod, "Failed" if container.process.returncode else "Succeeded")
        await self.plane.remove("pods", container.pod)

    def kill(self, name: str) -> None:
        """As where the kernel kills for memory: all processes of the container at once."""
        self.containers[name].signal(signal.SIGKILL)

    async def close(self) -> None:
        """End all."""
        for container in self.containers.values():
            container.signal(signal.SIGKILL)
            container.process.wait()
        await asyncio.gather(*self.ending)

    async def _look_after(self, name: str, pod: Object) -> None:
        container = self.containers.get(name)
        phase = pod["status"]["phase"]
        if container is None and phase == "Pending":
            await self._admit(name, pod)
        elif container is not None and phase == "Running" and (code := container.process.poll()) is not None:
            if pod["spec"]["restartPolicy"] == "Always":
                container.process = self._start(pod, container.address)
            else:
                await self._report(pod, "Failed" if code else "Succeeded", exitCode=code)

    async def _admit(self, name: str, pod: Object) -> None:
        self.num_addresses += 1
        address = f"127.1.{os.getpid() % 256}.{self.num_addresses}"  # other runs of the tests have theirs
        self.containers[name] = Container(pod, address, self._start(pod, address))
        await self._report(pod, "Running", podIP=address)

    async def _report(self, pod: Object, phase: str, **status: Any) -> None:
        await self.plane.change("pods", pod, {"status": {"phase": phase, **status}})

    def _publish(self) -> None:
        """Have the services' names resolve to the pods that they select."""
        for service in self.plane.alive("services"):
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            for container in self.containers.values():
                if service["spec"]["selector"].items() <= container.pod["metadata"]["labels"].items():
                    file = self.names / f"{name}.{namespace}.svc.cluster.local"
                    if not file.exists() or file.read_text() != container.address:
                        (new := self.folder / "new-name").write_text(container.address)
                        new.replace(file)  # a pod never reads half of it

    def _start(self, pod: Object, address: str) -> subprocess.Popen[bytes]:
        container = pod["spec"]["containers"][0]
        own = {pair["name"]: pair.get("value", "") for pair in container.get("env", ())}
        words = [re.sub(r"\$\((\w+)\)", lambda found: own[found[1]], word) for word in container["args"]]
        name = pod["metadata"]["name"]
        network = {"HOSTNAME": name, "POD_IP": address, "POD_NAMES": str(self.names)}
        environment = {**self.environment, **network, **own}
        environment["PYTHONPATH"] = os.pathsep.join([str(NETWORK), self.environment["PYTHONPATH"]])
        place = self.folder / name
        place.mkdir(exist_ok=True)
        with (place / "log").open("ab") as log:
            return subprocess.Popen(
                [str(self.scripts / words[0]), *words[1:]],
                cwd=place,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _end_later(self, container: Container) -> None:
        task = asyncio.create_task(self._end(container))
        self.ending.add(task)
        task.add_done_callback(self.ending.discard)

    async def _end(self, container: Container) -> None:
        container.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(container.process.wait, self.grace_period)
        container.signal(signal.SIGKILL)
        await asyncio.to_thread(container.process.wait)
