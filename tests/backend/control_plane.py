"""A Kubernetes for the Dask operator: kmock's API server, and the controllers of Deployments and of owned objects."""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import attrs
from kmock import KubernetesEmulator, action

Object = dict[str, Any]

RESOURCES = {
    ("", "v1", "namespaces"): "Namespace",
    ("", "v1", "events"): "Event",
    ("", "v1", "pods"): "Pod",
    ("", "v1", "services"): "Service",
    ("apps", "v1", "deployments"): "Deployment",
    ("apiextensions.k8s.io", "v1", "customresourcedefinitions"): "CustomResourceDefinition",
    ("kubernetes.dask.org", "v1", "daskclusters"): "DaskCluster",
    ("kubernetes.dask.org", "v1", "daskworkergroups"): "DaskWorkerGroup",
    ("kubernetes.dask.org", "v1", "daskjobs"): "DaskJob",
    ("kubernetes.dask.org", "v1", "daskautoscalers"): "DaskAutoscaler",
}
OF_THE_CLUSTER = ("namespaces", "customresourcedefinitions")
VERBS = {"create", "delete", "get", "list", "patch", "update", "watch"}
ROUND = 0.1
"""Seconds between two looks of the controllers."""


@attrs.define(kw_only=True)
class ControlPlane(KubernetesEmulator):
    """What kmock has not: identities and versions of objects, selectors, Deployments, the end of what is owned."""

    _versions: Iterator[int] = attrs.field(factory=lambda: itertools.count(1), init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.fallback["get /version/"] << self._serve_server_version  # kr8s puts a slash behind both
        self.fallback["get /api/"] << self._serve_api
        for (group, version, plural), kind in RESOURCES.items():
            self.resources[group, version, plural] = self.ResourceInfo(
                kind=kind,
                singular=kind.lower(),
                namespaced=plural not in OF_THE_CLUSTER,
                verbs=set(VERBS),
                subresources={"status"},
            )

    # ---- Requests

    async def _handle(self, request: Any) -> Any:
        if request.resource is not None and isinstance(request.data, dict):
            metadata = request.data.setdefault("metadata", {})
            if request.action is action.CREATE:
                self._complete(request, metadata)
            metadata["resourceVersion"] = str(next(self._versions))
        elif request.resource is not None and isinstance(request.data, list):
            version = str(next(self._versions))
            request.data.append({"op": "add", "path": "/metadata/resourceVersion", "value": version})
        return await super()._handle(request)

    def _complete(self, request: Any, metadata: Object) -> None:
        """What the server itself gives to a new object."""
        kind = RESOURCES[request.resource.group, request.resource.version, request.resource.plural]
        request.data.setdefault("kind", kind)
        request.data.setdefault("apiVersion", f"{request.resource.group}/{request.resource.version}".lstrip("/"))
        metadata.setdefault("name", f"{metadata.get('generateName', '')}{uuid.uuid4().hex[:5]}")
        if request.namespace is not None:
            metadata.setdefault("namespace", request.namespace)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if kind == "Service":
            request.data["status"] = {"loadBalancer": {}}
        if kind == "Pod":
            request.data["status"] = {"phase": "Pending"}

    async def _serve_list(self, request: Any) -> Any:
        found = await super()._serve_list(request)
        found["items"] = [each for each in found["items"] if _is_selected(each, request.params)]
        found["metadata"]["resourceVersion"] = str(next(self._versions))
        return found

    async def _serve_watch(self, request: Any) -> AsyncIterator[Any]:
        async for event in super()._serve_watch(request):
            if not event or _is_selected(event["object"], request.params):
                yield event

    # ---- Controllers

    def alive(self, plural: str) -> list[Object]:
        """The objects of a kind, in the order in which they were made."""
        found = [object_ for (kind, *_), object_ in self.objects.items() if kind.plural == plural]
        return [object_.raw for object_ in found if not object_.deleted]

    def find(self, plural: str, name: str) -> Object | None:
        """An object by its name."""
        return next((each for each in self.alive(plural) if each["metadata"]["name"] == name), None)

    async def control(self) -> None:
        """Keep Deployments at their number of pods, and delete what has lost its owner; for ever."""
        while True:
            await self._collect()
            for deployment in self.alive("deployments"):
                await self._reconcile(deployment)
            await asyncio.sleep(ROUND)

    async def _collect(self) -> None:
        kinds = [key for key in RESOURCES if key[2] not in OF_THE_CLUSTER]
        uids = {each["metadata"].get("uid") for _, _, plural in kinds for each in self.alive(plural)}
        orphans = [
            (plural, each)
            for _, _, plural in kinds
            for each in self.alive(plural)
            if (owners := [uid for uid in _owners(each) if uid]) and not uids.intersection(owners)
        ]
        for plural, each in orphans:  # an owner that is made meanwhile is not among `uids`
            await self.remove(plural, each)

    async def _reconcile(self, deployment: Object) -> None:
        uid, template = deployment["metadata"]["uid"], deployment["spec"]["template"]
        pods = [pod for pod in self.alive("pods") if _owners(pod) == [uid] and not _has_ended(pod)]
        for _ in range(deployment["spec"]["replicas"] - len(pods)):
            owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment["metadata"]["name"], "uid": uid}
            metadata = {
                **template["metadata"],
                "name": f"{deployment['metadata']['name']}-{uuid.uuid4().hex[:5]}",
                "ownerReferences": [owner],
            }
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            await self.make("pods", deployment["metadata"]["namespace"], pod)

    # ---- For those who use it as a client does

    async def make(self, plural: str, namespace: str, object_: Object) -> None:
        """Create an object."""
        await self._done(self.post(_path(plural, namespace), json=object_))

    async def change(self, plural: str, object_: Object, change: Object) -> None:
        """Merge that into an object, unless it is gone."""
        metadata = object_["metadata"]
        await self._done(self.patch(_path(plural, metadata["namespace"], metadata["name"]), json=change))

    async def remove(self, plural: str, object_: Object) -> None:
        """Delete an object, unless it is gone."""
        metadata = object_["metadata"]
        await self._done(self.delete(_path(plural, metadata["namespace"], metadata["name"])))

    async def _done(self, call: Any) -> None:
        with contextlib.suppress(KeyError):
            async with call as response:
                assert response.status in {200, 201, 404, 409}, await response.text()


def _path(plural: str, namespace: str, name: str | None = None) -> str:
    [(group, version)] = [key[:2] for key in RESOURCES if key[2] == plural]
    root = f"/apis/{group}/{version}" if group else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


def _is_selected(object_: Object, params: Any) -> bool:
    metadata = object_.get("metadata", {})
    labels = {**metadata.get("labels", {})}
    fields = {"metadata.name": metadata.get("name"), "metadata.namespace": metadata.get("namespace")}
    wanted = (_pairs(params.get("labelSelector")), labels), (_pairs(params.get("fieldSelector")), fields)
    return all(known.get(name) == value for pairs, known in wanted for name, value in pairs)


def _pairs(selector: str | None) -> list[tuple[str, str]]:
    parts = [part.partition("=") for part in (selector or "").replace("==", "=").split(",") if part]
    return [(name, value) for name, _, value in parts]


def _owners(object_: Object) -> list[str]:
    return [owner["uid"] for owner in object_["metadata"].get("ownerReferences", ())]


def _has_ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}
