"""Start of one attempt: places ranks on workers, and sends each agent its orders. Runs in the driver."""

from collections.abc import Sequence
from dataclasses import replace

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.node.hardware import local_versions
from flytekitplugins.daskpytorch.protocol import journal, placement
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.job import Job, in_order, log_folder
from flytekitplugins.daskpytorch.protocol.messages import Start
from flytekitplugins.daskpytorch.protocol.placement import Node


def start_attempt(state: GangState, number: int, code: Code) -> Attempt:
    """`ValueError`: driver and workers differ in a package's version, or the workers do not suit the settings."""
    request, settings, agents = state.request, state.request.settings, state.agents
    agents.dismiss_leaving()
    nodes = agents.best_nodes()
    _check_versions(nodes)
    places = placement.place_ranks(nodes, request.ranks_per_worker, settings.devices)
    backend = placement.choose_backend(settings.backend, nodes, places)
    logs = log_folder(settings, state.id)
    shape = journal.Shape(
        name=request.name, backend=backend, nodes=nodes, places=places, log_folder=str(logs) if logs else None
    )
    state.observers.tell(journal.Placed(shape=shape))
    carriers = [agents.peers[node.worker] for node in nodes]
    store = carriers[0].meets_at if shape.world_size > 1 or backend == "nccl" else None
    job = _job(state, number, backend, store)
    for part in state.parts:
        job = part.equip(job)
    for peer, here in zip(carriers, places, strict=True):
        peer.send(Start(job, code, here))
    placed = {place.rank: (place, node) for node, here in zip(nodes, places, strict=True) for place in here}
    return Attempt(
        number=number,
        places=placed,
        carriers=carriers,
        has_observers=bool(job.observers),
        is_program=request.script is not None,
        clock=state.now,
    )


def _job(state: GangState, number: int, backend: str, store: tuple[str, int] | None) -> Job:
    request, settings = state.request, state.request.settings
    return Job(
        gang=state.id,
        attempt=number,
        num_after_memory=state.num_after_memory,
        call=in_order(request.call) if request.call is not None else None,
        pass_local_rank=request.pass_local_rank,
        backend=backend,
        store=store,
        settings=replace(
            settings,
            observers=(),
            evaluate=None,
            gpu_check="off" if settings.gpu_check == "off" else "quick",
        ),
        gpu_check=request.gpu_check,
        storage=request.storage.own if request.storage is not None else None,
        host=request.host,
        execution=request.execution,
        environment={**request.environment, **settings.environment},
        observers=state.observers.for_rank(),
        patience=settings.evaluate.timeout if settings.evaluate is not None else 0.0,
    )


def _check_versions(nodes: Sequence[Node]) -> None:
    mine = local_versions()
    differing = [
        f"{node.title} has {name} {theirs}, this process {mine.get(name)}"
        for node in nodes
        for name, theirs in node.versions.items()
        if theirs != mine.get(name)
    ]
    if differing:
        raise ValueError(
            f"driver and workers differ: {'; '.join(differing)}. Use one image for the task and its Dask cluster."
        )
