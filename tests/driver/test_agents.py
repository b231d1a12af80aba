"""The driver's list of agents: workers that are asked again, and the loss of the scheduler.

What follows from agents that come, go and fall silent is in `test_brain`.
"""

import pytest

from clock import Clock
from flytekitplugins.daskpytorch.driver.agents import (
    BUSY_SCHEDULER_TIMEOUT,
    RECRUIT_INTERVAL,
    SCHEDULER_TIMEOUT,
    Action,
    Agents,
)
from flytekitplugins.daskpytorch.errors import WorkerLostError
from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from flytekitplugins.daskpytorch.protocol.messages import Hello
from flytekitplugins.daskpytorch.protocol.placement import Node
from simulated_gang import Agent, Cluster

W1, W2, W3, W10 = (f"tcp://10.0.0.{number}:4000" for number in (1, 2, 3, 10))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster([W1, W2])


@pytest.fixture
def calls() -> list[Action]:
    """The calls that wait for the gang's thread."""
    return []


@pytest.fixture
def agents(cluster: Cluster, calls: list[Action]) -> Agents:
    return Agents(
        launcher=cluster,
        order=AgentOrder(driver=("127.0.0.1", 4711), token=b"secret"),
        post=calls.append,
        clock=Clock(),
    )


def hello(agents: Agents, *workers: str) -> None:
    """Agents dial in."""
    for worker in workers:
        node = Node(worker=worker, host="h", num_cores=1, gpus=(), gpu_names=(), interface=None, versions={})
        agents.welcome(Hello(node, ("h", 1)), Agent(worker))  # type: ignore[arg-type]


def recruit(agents: Agents, num_wanted: int = 2) -> list[str]:
    """Look at the cluster again; the workers that are asked."""
    agents.launcher.num_wanted = num_wanted
    agents.clock.now += RECRUIT_INTERVAL  # type: ignore[attr-defined]
    agents.launcher.asked.clear()  # type: ignore[attr-defined]
    agents.recruit()
    return list(agents.launcher.asked)  # type: ignore[attr-defined]


def test_only_what_is_missing_is_recruited_in_the_order_of_the_ranks(agents: Agents, cluster: Cluster) -> None:
    hello(agents, W1)
    cluster.here = {W10, W3, W2, W1}
    assert recruit(agents) == [W2]
    assert recruit(agents) == []
    assert recruit(agents, 4) == [W3, W10]
    hello(agents, W10, W2)
    assert [node.worker for node in agents.best_nodes()] == [W1, W2, W10]


def test_worker_that_was_leaving_is_replaced_and_counts_again_when_it_comes_back(
    agents: Agents, cluster: Cluster
) -> None:
    hello(agents, W1, W2)
    agents.leaving.add(W1)
    cluster.here.add(W3)
    assert recruit(agents) == [W3]
    assert agents.num_nodes == 1
    hello(agents, W1)
    assert agents.num_nodes == 2


@pytest.mark.parametrize("error", [ImportError("no torch"), RuntimeError("no disk")])
def test_worker_whose_agent_cannot_start_is_not_asked_again(agents: Agents, error: Exception) -> None:
    agents.launch([W1])
    agents.refuse(W1, error, 1)
    assert recruit(agents) == [W2]
    told = str(agents.too_few_came("train", 600.0))
    assert told == (
        f"1 of 2 workers could not take part in train; the first, pod-of-{W1}: {type(error).__name__}: {error}. "
        "That worker's log may say more."
    )


def test_failure_of_an_earlier_launch_does_not_refuse_a_worker_that_was_asked_again(agents: Agents) -> None:
    agents.launch([W1])
    hello(agents, W1)
    agents.refuse(W1, RuntimeError("late"), 1)
    assert agents.refused == {}
    agents.forget(agents.peers[W1].connection)
    recruit(agents)
    agents.refuse(W1, RuntimeError("the agent of before"), 1)
    assert agents.refused == {}
    agents.refuse(W1, RuntimeError("this one"), 2)
    assert agents.refused.keys() == {W1}


def test_worker_that_cannot_be_asked_for_want_of_a_scheduler_is_given_up(
    agents: Agents, calls: list[Action], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the client is closed")

    monkeypatch.setattr(agents.launcher, "launch", refuse)
    agents.launch([W1])
    [call] = calls
    call()
    assert (agents.expected, agents.refused) == ({}, {})
    assert f"{W1}: WorkerLostError: its agent could not be started: the client is closed." in str(
        agents.too_few_came("g", 1)
    )


def test_worker_that_went_before_it_answered_is_lost(agents: Agents, cluster: Cluster) -> None:
    agents.launch([W1, W2])
    hello(agents, W1)
    cluster.here = {W1, W3}
    assert recruit(agents) == [W3]
    assert str(agents.lost[W2]) == "the worker was lost before the gang was formed"


@pytest.mark.parametrize(("is_connected", "patience"), [(False, SCHEDULER_TIMEOUT), (True, BUSY_SCHEDULER_TIMEOUT)])
def test_scheduler_that_does_not_answer_for_long_is_lost_and_gives_nobody_up_before(
    agents: Agents, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *, is_connected: bool, patience: float
) -> None:
    agents.launch([W1, W2])
    cluster.is_there = False
    monkeypatch.setattr(cluster, "is_connected", lambda: is_connected)
    recruit(agents)  # once is nothing yet
    agents.clock.now += patience - 2 * RECRUIT_INTERVAL  # type: ignore[attr-defined]
    recruit(agents)
    assert agents.expected.keys() == {W1, W2}
    with pytest.raises(WorkerLostError, match=f"the Dask scheduler was lost, no answer for {patience:.0f} s: no answ"):
        recruit(agents)


def test_scheduler_that_answers_again_in_time_is_not_lost(agents: Agents, cluster: Cluster) -> None:
    for _ in range(3):
        cluster.is_there = False
        recruit(agents)
        agents.clock.now += SCHEDULER_TIMEOUT / 2  # type: ignore[attr-defined]
        cluster.is_there = True
        recruit(agents)
