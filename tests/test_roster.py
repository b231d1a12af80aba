"""The agents of one gang: who is asked, who is there, who has gone, and when the scheduler counts as lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe

import pytest

from flytekitplugins.daskpytorch.driver import agents as roster_module
from flytekitplugins.daskpytorch.driver.agents import MAX_SILENCE, SILENCE_INTERVAL, Peer, Roster
from flytekitplugins.daskpytorch.protocol.handshake import hang_up
from flytekitplugins.daskpytorch.protocol.launcher import AgentLauncher
from flytekitplugins.daskpytorch.protocol.messages import AgentOrder, Beat, Hello
from flytekitplugins.daskpytorch.protocol.placement import Node

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
def roster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Roster:
    """A roster that looks at the cluster whenever it is asked to."""
    monkeypatch.setattr(roster_module, "RECRUIT_INTERVAL", 0.0)
    return make(cluster)


def make(cluster: Cluster) -> Roster:
    return Roster(
        launcher=cluster,
        num_ranks=4,
        address=("127.0.0.1", 4711),
        on_failure=lambda *_: None,
        token=b"secret",
    )


def silent(roster: Roster) -> list[Peer]:
    """Look at once, not only when it is time again."""
    roster._looked_at -= SILENCE_INTERVAL
    return roster.silent()


def hello(roster: Roster, *workers: str) -> list[Connection]:
    """Agents dial in; the connections as the driver has them."""
    ours = []
    for worker in workers:
        mine, theirs = Pipe()
        agents.append(theirs)
        node = Node(worker=worker, host="h", num_cores=1, gpus=(), gpu_names=(), interface=None, versions={})
        roster.welcome(Hello(node), mine)
        ours.append(mine)
    return ours


agents: list[Connection] = []
"""The other ends, kept open."""


@pytest.fixture(autouse=True)
def hang_up_afterwards() -> Iterator[None]:
    yield
    while agents:
        agents.pop().close()


def workers(roster: Roster) -> list[str]:
    return [node.worker for node in roster.nodes()]


# ---- Coming and going -----------------------------------------------------------------------------------------------


def test_agents_are_told_all_they_need(roster: Roster, cluster: Cluster) -> None:
    roster.launch([W1])
    [order] = cluster.orders
    assert order == AgentOrder(worker=W1, driver=("127.0.0.1", 4711), num_ranks=4, token=b"secret")
    assert roster.expected == {W1}


def test_agent_that_says_hello_is_no_longer_expected(roster: Roster) -> None:
    roster.launch([W1, W2])
    [connection] = hello(roster, W1)
    assert roster.expected == {W2}
    assert workers(roster) == [W1]
    peer = roster.find(connection)
    assert peer is not None
    assert peer.node.worker == W1


def test_nodes_stand_in_the_order_of_their_addresses(roster: Roster) -> None:
    hello(roster, W10, W2, W1)
    assert workers(roster) == [W1, W2, W10]


def test_worker_that_is_leaving_carries_no_ranks_but_may_still_speak(roster: Roster) -> None:
    connection, _ = hello(roster, W1, W2)
    roster.leaving.add(W1)
    assert workers(roster) == [W2]
    assert roster.find(connection) is roster.peers[W1]


def test_agent_whose_connection_ended_is_lost(roster: Roster) -> None:
    connection, _ = hello(roster, W1, W2)
    peer = roster.forget(connection)
    assert peer is not None
    assert peer.node.worker == W1
    assert workers(roster) == [W2]
    assert str(roster.lost[W1]) == "the worker was lost"
    assert roster.forget(connection) is None


def test_worker_that_says_hello_again_is_no_longer_lost(roster: Roster) -> None:
    [connection] = hello(roster, W1)
    roster.forget(connection)
    hello(roster, W1)
    assert roster.lost == {}
    assert workers(roster) == [W1]


def test_second_agent_of_a_worker_takes_the_place_of_the_first(roster: Roster) -> None:
    first = hello(roster, W1)
    displaced = roster.peers[W1]
    mine, theirs = Pipe()
    agents.append(theirs)
    assert roster.welcome(Hello(displaced.node), mine) is displaced
    second = [mine]
    assert roster.find(first[0]) is None
    assert roster.find(second[0]) is roster.peers[W1]
    assert roster.forget(first[0]) is None
    assert workers(roster) == [W1]
    with pytest.raises(EOFError):  # the first one was sent away
        agents[0].recv()


def test_worker_that_was_asked_and_failed_is_refused(roster: Roster) -> None:
    roster.launch([W1])
    error = ModuleNotFoundError("No module named 'flytekitplugins'")
    roster.refuse(W1, error, 1)
    assert roster.expected == set()
    assert roster.refused == {W1: error}


def test_failure_of_an_agent_that_had_said_hello_refuses_nobody(roster: Roster) -> None:
    roster.launch([W1])
    hello(roster, W1)
    roster.refuse(W1, ConnectionError("its worker was lost"), 1)
    assert roster.refused == {}
    assert workers(roster) == [W1]


def test_broadcast_reaches_all_and_does_not_mind_those_that_have_gone(roster: Roster) -> None:
    hello(roster, W1, W2)
    agents[0].close()
    roster.broadcast(Beat())
    assert agents[1].recv() == Beat()


def test_hanging_up_wakes_the_other_side_and_a_reader_on_this_side() -> None:
    ours, theirs = Pipe()
    hang_up(ours)
    for end in (ours, theirs):
        with pytest.raises(EOFError):
            end.recv()


# ---- Recruiting -----------------------------------------------------------------------------------------------------


def test_only_what_is_missing_is_recruited(roster: Roster, cluster: Cluster) -> None:
    hello(roster, W1)
    cluster.here = [W10, W3, W2, W1]
    roster.recruit(2)
    assert cluster.asked() == [W2]
    roster.recruit(2)
    assert cluster.asked() == []
    roster.recruit(4)
    assert cluster.asked() == [W3, W10]


def test_nobody_is_recruited_where_all_are_here(roster: Roster, cluster: Cluster) -> None:
    hello(roster, W1, W2)
    cluster.here.append(W3)
    roster.recruit(2)
    assert cluster.asked() == []


def test_worker_that_is_leaving_is_replaced(roster: Roster, cluster: Cluster) -> None:
    hello(roster, W1, W2)
    roster.leaving.add(W1)
    cluster.here.append(W3)
    roster.recruit(2)
    assert cluster.asked() == [W3]


def test_worker_that_was_leaving_counts_again_when_it_comes_back(roster: Roster) -> None:
    [gone, replaced, _] = hello(roster, W1, W2, W3)
    roster.leaving |= {W1, W2}
    assert roster.num_nodes == 1
    roster.forget(gone)
    assert roster.num_nodes == 1
    hello(roster, W1)
    assert workers(roster) == [W1, W3]
    hello(roster, W2)  # another agent, before the first one's end was noticed
    assert roster.forget(replaced) is None
    assert workers(roster) == [W1, W2, W3]
    assert roster.num_nodes == 3


def test_refused_worker_is_not_asked_again(roster: Roster, cluster: Cluster) -> None:
    roster.launch([W1])
    roster.refuse(W1, ImportError("no torch"), 1)
    cluster.asked()
    roster.recruit(2)
    assert cluster.asked() == [W2]


def test_silent_worker_is_asked_again_but_nobody_counts_on_it_until_it_speaks(roster: Roster, cluster: Cluster) -> None:
    hello(roster, W1, W2)
    roster.peers[W1].heard_at -= MAX_SILENCE + 1
    for peer in silent(roster):
        roster.forget(peer.connection)
        roster.give_up_silent(peer)
    assert cluster.asked() == [W1]
    assert roster.expected == set()
    cluster.here.append(W3)
    roster.recruit(2)
    assert cluster.asked() == [W3]
    [connection] = hello(roster, W1)
    assert workers(roster) == [W1, W2]
    roster.forget(connection)
    cluster.here.append(W3)
    roster.recruit(3)
    assert cluster.asked() == [W1]


def test_failure_of_an_earlier_launch_does_not_refuse_a_worker_that_was_asked_again(
    roster: Roster, cluster: Cluster
) -> None:
    roster.launch([W1])
    [connection] = hello(roster, W1)
    roster.forget(connection)
    roster.recruit(1)
    assert roster.expected == {W1}
    roster.refuse(W1, RuntimeError("the agent of before"), 1)
    assert roster.refused == {}
    assert roster.expected == {W1}
    roster.refuse(W1, RuntimeError("this one"), 2)
    assert roster.refused.keys() == {W1}


def test_worker_that_cannot_be_asked_for_want_of_a_scheduler_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the client is closed")

    monkeypatch.setattr(cluster, "launch", refuse)
    failures: list[tuple[str, Exception, int]] = []
    roster = make(cluster)
    roster.on_failure = lambda *failure: failures.append(failure)
    roster.launch([W1])
    [(worker, error, number)] = failures
    assert (worker, str(error)) == (W1, "its agent could not be started: the client is closed")
    roster.refuse(worker, error, number)
    assert roster.expected == set()
    assert roster.refused == {}
    assert roster.lost.keys() == {W1}


def test_worker_whose_agent_fails_again_and_again_is_not_asked_any_more(roster: Roster, cluster: Cluster) -> None:
    roster.note_broken(W1, "Traceback ...\nOSError: a full disk\n")
    assert roster.refused == {}
    roster.note_broken(W1, "Traceback ...\nOSError: a full disk\n")
    assert str(roster.refused[W1]) == "its agent failed 2 times: OSError: a full disk"
    roster.recruit(2)
    assert cluster.asked() == [W2]


def test_lost_worker_that_comes_back_under_its_address_is_asked_again(roster: Roster, cluster: Cluster) -> None:
    connection, _ = hello(roster, W1, W2)
    roster.forget(connection)
    cluster.here = [W2]
    roster.recruit(2)
    assert cluster.asked() == []
    cluster.here = [W1, W2]
    roster.recruit(2)
    assert cluster.asked() == [W1]
    hello(roster, W1)
    assert workers(roster) == [W1, W2]


def test_worker_that_went_before_it_answered_is_replaced(roster: Roster, cluster: Cluster) -> None:
    roster.launch([W1, W2])
    cluster.asked()
    hello(roster, W1)
    cluster.here = [W1, W3]
    roster.recruit(2)
    assert cluster.asked() == [W3]
    assert roster.expected == {W3}
    assert str(roster.lost[W2]) == "the worker was lost before the gang was formed"


def test_absence_is_noted_without_recruiting(roster: Roster, cluster: Cluster) -> None:
    roster.launch([W1, W2])
    cluster.asked()
    cluster.here = [W1, W3]
    roster.note_absences()
    assert roster.expected == {W1}
    assert list(roster.lost) == [W2]
    assert cluster.asked() == []


def test_cluster_is_not_looked_at_all_the_time(cluster: Cluster) -> None:
    roster = make(cluster)
    roster.recruit(2)
    assert cluster.num_looks == 0  # those that were there a moment ago have been asked
    time.sleep(roster_module.RECRUIT_INTERVAL)
    for _ in range(5):
        roster.recruit(2)
    assert cluster.num_looks == 1
    assert cluster.asked() == [W1, W2]


# ---- Without a scheduler --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, connected",
    [(ConnectionRefusedError("refused"), False), (TimeoutError("no answer"), False), (TimeoutError("no answer"), True)],
)
def test_scheduler_that_does_not_answer_for_long_is_lost(
    roster: Roster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: Exception, *, connected: bool
) -> None:
    patience = "BUSY_SCHEDULER_PATIENCE" if connected else "SCHEDULER_PATIENCE"
    monkeypatch.setattr(roster_module, patience, 0.2)
    cluster.error, cluster.connected = error, connected
    roster.recruit(2)  # once is nothing yet
    time.sleep(0.25)
    with pytest.raises(ConnectionError, match=f"the Dask scheduler was lost, no answer for 0 s: {error}"):
        roster.recruit(2)


def test_scheduler_that_is_busy_has_more_time_than_one_that_hangs_up(
    roster: Roster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_module, "SCHEDULER_PATIENCE", 0.0)
    cluster.error, cluster.connected = TimeoutError("no answer"), True
    roster.recruit(2)
    roster.recruit(2)
    cluster.connected = False
    with pytest.raises(ConnectionError, match="was lost"):
        roster.recruit(2)


def test_scheduler_that_answers_again_in_time_is_not_lost(
    roster: Roster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster_module, "SCHEDULER_PATIENCE", 0.2)
    for _ in range(3):
        cluster.error = ConnectionRefusedError("refused")
        roster.recruit(0)
        cluster.error = None
        time.sleep(0.1)
        roster.recruit(0)


def test_unanswered_look_gives_nobody_up(roster: Roster, cluster: Cluster) -> None:
    roster.launch([W1, W2])
    cluster.error = ConnectionRefusedError("refused")
    roster.recruit(2)
    roster.note_absences()
    assert roster.expected == {W1, W2}
    assert roster.lost == {}


# ---- Silence --------------------------------------------------------------------------------------------------------


def test_agent_that_has_not_spoken_for_long_is_silent(roster: Roster) -> None:
    hello(roster, W1, W2)
    assert silent(roster) == []
    roster.peers[W1].heard_at -= MAX_SILENCE - 1
    assert silent(roster) == []
    roster.peers[W1].heard_at -= 2
    assert [peer.node.worker for peer in silent(roster)] == [W1]


def test_nobody_is_silent_when_this_process_was_asleep(roster: Roster) -> None:
    hello(roster, W1, W2)
    for peer in roster.peers.values():
        peer.heard_at -= MAX_SILENCE + 1
    roster._looked_at -= MAX_SILENCE + 1
    assert silent(roster) == []
    assert silent(roster) == []
    roster.peers[W2].heard_at -= MAX_SILENCE + 1
    assert [peer.node.worker for peer in silent(roster)] == [W2]
