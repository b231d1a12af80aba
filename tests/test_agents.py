"""The agents of one gang: who is asked, who is there, who has gone, and when the scheduler counts as lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from clock import Clock
from flytekitplugins.daskpytorch.driver import agents as roster_module
from flytekitplugins.daskpytorch.driver.agents import MAX_SILENCE, SILENCE_INTERVAL, Agents, Peer
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import AgentLauncher, AgentOrder, Close, Hello
from flytekitplugins.daskpytorch.protocol.placement import Node
from processes import ends

W1, W2, W3, W10 = (f"tcp://10.0.0.{number}:4000" for number in (1, 2, 3, 10))


class Cluster(AgentLauncher):
    """Workers that are there by name only; agents say hello when a test lets them."""

    def __init__(self, *workers: str) -> None:
        self.workers = workers
        self.num_wanted = len(workers)
        self.host = "127.0.0.1"
        self.here = list(workers)
        self.connected = False
        self.error: Exception | None = None
        self.num_looks = 0
        self.orders: list[AgentOrder] = []
        self.hindered_by = ""

    def hindrance(self) -> str:
        return self.hindered_by

    def launch(self, orders: Sequence[AgentOrder], on_failure: Callable[[str, Exception], None]) -> None:
        self.orders += orders

    def present(self) -> Sequence[str]:
        self.num_looks += 1
        if self.error is not None:
            raise self.error
        return self.here

    def is_connected(self) -> bool:
        return self.connected

    def close(self) -> None:
        pass

    def asked(self) -> list[str]:
        """The workers that were asked since the last call."""
        asked, self.orders = [order.worker for order in self.orders], []
        return asked


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(W1, W2)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def register(cluster: Cluster, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Agents:
    """A register that looks at the cluster whenever it is asked to."""
    monkeypatch.setattr(roster_module, "RECRUIT_INTERVAL", 0.0)
    return make(cluster, clock)


def make(cluster: Cluster, clock: Clock) -> Agents:
    return Agents(
        launcher=cluster,
        num_ranks=4,
        address=("127.0.0.1", 4711),
        on_failure=lambda *_: None,
        token=b"secret",
        clock=clock,
    )


def silent(register: Agents) -> list[Peer]:
    """Look at once, not only when it is time again."""
    register._looked_at -= SILENCE_INTERVAL
    return register.silent()


def hello(register: Agents, *workers: str) -> list[Connection]:
    """Agents dial in; the connections as the driver has them."""
    ours = []
    for worker in workers:
        mine, theirs = ends()
        agents.append(theirs)
        node = Node(worker=worker, host="h", num_cores=1, gpus=(), gpu_names=(), interface=None, versions={})
        register.welcome(Hello(node, MEETS_AT), mine)
        ours.append(mine)
    return ours


MEETS_AT = ("h", 1)
agents: list[Connection] = []
"""The other ends, kept open."""


@pytest.fixture(autouse=True)
def hang_up_afterwards() -> Iterator[None]:
    yield
    while agents:
        agents.pop().close()


def workers(register: Agents) -> list[str]:
    return [node.worker for node in register.nodes()]


# ---- Coming and going -----------------------------------------------------------------------------------------------


def test_agents_are_told_all_they_need(register: Agents, cluster: Cluster) -> None:
    register.launch([W1])
    [order] = cluster.orders
    assert order == AgentOrder(worker=W1, driver=("127.0.0.1", 4711), num_ranks=4, token=b"secret")
    assert register.expected == {W1}


def test_agent_that_says_hello_is_no_longer_expected(register: Agents) -> None:
    register.launch([W1, W2])
    [connection] = hello(register, W1)
    assert register.expected == {W2}
    assert workers(register) == [W1]
    peer = register.find(connection)
    assert peer is not None
    assert peer.node.worker == W1


def test_nodes_stand_in_the_order_of_their_addresses(register: Agents) -> None:
    hello(register, W10, W2, W1)
    assert workers(register) == [W1, W2, W10]


def test_worker_that_is_leaving_carries_no_ranks_but_may_still_speak(register: Agents) -> None:
    connection, _ = hello(register, W1, W2)
    register.leaving.add(W1)
    assert workers(register) == [W2]
    assert register.find(connection) is register.peers[W1]


def test_agent_whose_connection_ended_is_lost(register: Agents) -> None:
    connection, _ = hello(register, W1, W2)
    peer = register.forget(connection)
    assert peer is not None
    assert peer.node.worker == W1
    assert workers(register) == [W2]
    assert str(register.lost[W1]) == "the worker was lost"
    assert register.forget(connection) is None


def test_worker_that_says_hello_again_is_no_longer_lost(register: Agents) -> None:
    [connection] = hello(register, W1)
    register.forget(connection)
    hello(register, W1)
    assert register.lost == {}
    assert workers(register) == [W1]


def test_second_agent_of_a_worker_takes_the_place_of_the_first(register: Agents) -> None:
    first = hello(register, W1)
    displaced = register.peers[W1]
    mine, theirs = ends()
    agents.append(theirs)
    assert register.welcome(Hello(displaced.node, MEETS_AT), mine) is displaced
    second = [mine]
    assert register.find(first[0]) is None
    assert register.find(second[0]) is register.peers[W1]
    assert register.forget(first[0]) is None
    assert workers(register) == [W1]
    with pytest.raises(EOFError):  # the first one was sent away
        agents[0].recv()


def test_worker_that_was_asked_and_failed_is_refused(register: Agents) -> None:
    register.launch([W1])
    error = ModuleNotFoundError("No module named 'flytekitplugins'")
    register.refuse(W1, error, 1)
    assert register.expected == set()
    assert register.refused == {W1: error}


def test_failure_of_an_agent_that_had_said_hello_refuses_nobody(register: Agents) -> None:
    register.launch([W1])
    hello(register, W1)
    register.refuse(W1, ConnectionError("its worker was lost"), 1)
    assert register.refused == {}
    assert workers(register) == [W1]


def test_broadcast_reaches_all_and_does_not_mind_those_that_have_gone(register: Agents) -> None:
    hello(register, W1, W2)
    agents[0].close()
    register.broadcast(Close())
    assert agents[1].recv() == Close()


def test_hanging_up_wakes_the_other_side_and_a_reader_on_this_side() -> None:
    ours, theirs = ends()
    ours.hang_up()
    for end in (ours, theirs):
        with pytest.raises(EOFError):
            end.recv()


# ---- Recruiting -----------------------------------------------------------------------------------------------------


def test_only_what_is_missing_is_recruited(register: Agents, cluster: Cluster) -> None:
    hello(register, W1)
    cluster.here = [W10, W3, W2, W1]
    register.recruit(2)
    assert cluster.asked() == [W2]
    register.recruit(2)
    assert cluster.asked() == []
    register.recruit(4)
    assert cluster.asked() == [W3, W10]


def test_nobody_is_recruited_where_all_are_here(register: Agents, cluster: Cluster) -> None:
    hello(register, W1, W2)
    cluster.here.append(W3)
    register.recruit(2)
    assert cluster.asked() == []


def test_worker_that_is_leaving_is_replaced(register: Agents, cluster: Cluster) -> None:
    hello(register, W1, W2)
    register.leaving.add(W1)
    cluster.here.append(W3)
    register.recruit(2)
    assert cluster.asked() == [W3]


def test_worker_that_was_leaving_counts_again_when_it_comes_back(register: Agents) -> None:
    [gone, replaced, _] = hello(register, W1, W2, W3)
    register.leaving |= {W1, W2}
    assert register.num_nodes == 1
    register.forget(gone)
    assert register.num_nodes == 1
    hello(register, W1)
    assert workers(register) == [W1, W3]
    hello(register, W2)  # another agent, before the first one's end was noticed
    assert register.forget(replaced) is None
    assert workers(register) == [W1, W2, W3]
    assert register.num_nodes == 3


def test_refused_worker_is_not_asked_again(register: Agents, cluster: Cluster) -> None:
    register.launch([W1])
    register.refuse(W1, ImportError("no torch"), 1)
    cluster.asked()
    register.recruit(2)
    assert cluster.asked() == [W2]


def test_silent_worker_is_asked_again_but_nobody_counts_on_it_until_it_speaks(
    register: Agents, cluster: Cluster
) -> None:
    hello(register, W1, W2)
    register.peers[W1].connection.heard_at -= MAX_SILENCE + 1
    for peer in silent(register):
        register.forget(peer.connection)
        register.give_up_silent(peer)
    assert cluster.asked() == [W1]
    assert register.expected == set()
    cluster.here.append(W3)
    register.recruit(2)
    assert cluster.asked() == [W3]
    [connection] = hello(register, W1)
    assert workers(register) == [W1, W2]
    register.forget(connection)
    cluster.here.append(W3)
    register.recruit(3)
    assert cluster.asked() == [W1]


def test_failure_of_an_earlier_launch_does_not_refuse_a_worker_that_was_asked_again(
    register: Agents, cluster: Cluster
) -> None:
    register.launch([W1])
    [connection] = hello(register, W1)
    register.forget(connection)
    register.recruit(1)
    assert register.expected == {W1}
    register.refuse(W1, RuntimeError("the agent of before"), 1)
    assert register.refused == {}
    assert register.expected == {W1}
    register.refuse(W1, RuntimeError("this one"), 2)
    assert register.refused.keys() == {W1}


def test_worker_that_cannot_be_asked_for_want_of_a_scheduler_is_given_up(
    cluster: Cluster, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the client is closed")

    monkeypatch.setattr(cluster, "launch", refuse)
    failures: list[tuple[str, Exception, int]] = []
    register = make(cluster, clock)
    register.on_failure = lambda *failure: failures.append(failure)
    register.launch([W1])
    [(worker, error, number)] = failures
    assert (worker, str(error)) == (W1, "its agent could not be started: the client is closed")
    register.refuse(worker, error, number)
    assert register.expected == set()
    assert register.refused == {}
    assert register.lost.keys() == {W1}


def test_worker_whose_agent_fails_again_and_again_is_not_asked_any_more(register: Agents, cluster: Cluster) -> None:
    register.note_broken(W1, "Traceback ...\nOSError: a full disk\n")
    assert register.refused == {}
    register.note_broken(W1, "Traceback ...\nOSError: a full disk\n")
    assert str(register.refused[W1]) == "its agent failed 2 times: OSError: a full disk"
    register.recruit(2)
    assert cluster.asked() == [W2]


def test_lost_worker_that_comes_back_under_its_address_is_asked_again(register: Agents, cluster: Cluster) -> None:
    connection, _ = hello(register, W1, W2)
    register.forget(connection)
    cluster.here = [W2]
    register.recruit(2)
    assert cluster.asked() == []
    cluster.here = [W1, W2]
    register.recruit(2)
    assert cluster.asked() == [W1]
    hello(register, W1)
    assert workers(register) == [W1, W2]


def test_worker_that_went_before_it_answered_is_replaced(register: Agents, cluster: Cluster) -> None:
    register.launch([W1, W2])
    cluster.asked()
    hello(register, W1)
    cluster.here = [W1, W3]
    register.recruit(2)
    assert cluster.asked() == [W3]
    assert register.expected == {W3}
    assert str(register.lost[W2]) == "the worker was lost before the gang was formed"


def test_absence_is_noted_without_recruiting(register: Agents, cluster: Cluster) -> None:
    register.launch([W1, W2])
    cluster.asked()
    cluster.here = [W1, W3]
    register.note_absences()
    assert register.expected == {W1}
    assert list(register.lost) == [W2]
    assert cluster.asked() == []


def test_cluster_is_not_looked_at_all_the_time(cluster: Cluster, clock: Clock) -> None:
    register = make(cluster, clock)
    register.recruit(2)
    assert cluster.num_looks == 0  # those that were there a moment ago have been asked
    clock.now += roster_module.RECRUIT_INTERVAL
    for _ in range(5):
        register.recruit(2)
    assert cluster.num_looks == 1
    assert cluster.asked() == [W1, W2]


# ---- Without a scheduler --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, connected",
    [(ConnectionRefusedError("refused"), False), (TimeoutError("no answer"), False), (TimeoutError("no answer"), True)],
)
def test_scheduler_that_does_not_answer_for_long_is_lost(
    register: Agents, cluster: Cluster, clock: Clock, error: Exception, *, connected: bool
) -> None:
    cluster.error, cluster.connected = error, connected
    register.recruit(2)  # once is nothing yet
    patience = roster_module.BUSY_SCHEDULER_PATIENCE if connected else roster_module.SCHEDULER_PATIENCE
    clock.now += patience - 1
    register.recruit(2)
    clock.now += 1
    with pytest.raises(ConnectionError, match=f"the Dask scheduler was lost, no answer for {patience:.0f} s: {error}"):
        register.recruit(2)


def test_scheduler_that_is_busy_has_more_time_than_one_that_hangs_up(
    register: Agents, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_module, "SCHEDULER_PATIENCE", 0.0)
    cluster.error, cluster.connected = TimeoutError("no answer"), True
    register.recruit(2)
    register.recruit(2)
    cluster.connected = False
    with pytest.raises(ConnectionError, match="was lost"):
        register.recruit(2)


def test_scheduler_that_answers_again_in_time_is_not_lost(register: Agents, cluster: Cluster, clock: Clock) -> None:
    for _ in range(3):
        cluster.error = ConnectionRefusedError("refused")
        register.recruit(0)
        cluster.error = None
        clock.now += roster_module.SCHEDULER_PATIENCE / 2
        register.recruit(0)


def test_unanswered_look_gives_nobody_up(register: Agents, cluster: Cluster) -> None:
    register.launch([W1, W2])
    cluster.error = ConnectionRefusedError("refused")
    register.recruit(2)
    register.note_absences()
    assert register.expected == {W1, W2}
    assert register.lost == {}


# ---- Silence --------------------------------------------------------------------------------------------------------


def test_agent_that_has_not_spoken_for_long_is_silent(register: Agents) -> None:
    hello(register, W1, W2)
    assert silent(register) == []
    register.peers[W1].connection.heard_at -= MAX_SILENCE - 1
    assert silent(register) == []
    register.peers[W1].connection.heard_at -= 2
    assert [peer.node.worker for peer in silent(register)] == [W1]


def test_nobody_is_silent_when_this_process_was_asleep(register: Agents) -> None:
    hello(register, W1, W2)
    for peer in register.peers.values():
        peer.connection.heard_at -= MAX_SILENCE + 1
    register._looked_at -= MAX_SILENCE + 1
    assert silent(register) == []
    assert silent(register) == []
    register.peers[W2].connection.heard_at -= MAX_SILENCE + 1
    assert [peer.node.worker for peer in silent(register)] == [W2]
