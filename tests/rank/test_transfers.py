"""Ranks on other machines than the driver's upload checkpoints, and download what they need once a node."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from ear import listening
from ear import order as order_of_agent
from flytekitplugins.daskpytorch.driver.listener import Listener, Transfer
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.protocol import messages
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.job import LargeCall
from flytekitplugins.daskpytorch.rank.link import UNWRITTEN, Transfers
from flytekitplugins.daskpytorch.settings import Gang
from gangs import order_for

ARGUMENTS = b"arguments" * 1000


class Driver:
    """Takes and serves files, by a vault and over real connections."""

    def __init__(self, folder: Path) -> None:
        self.vault = Vault(Gang(), None, folder)
        self.requests: list[Transfer] = []
        self.meddle: Callable[[Connection], None] = lambda _: None
        self.listener: Listener = listening(self._serve)

    def _serve(self, connection: Connection, request: Transfer) -> None:
        self.requests.append(request)
        self.meddle(connection)
        if isinstance(request, messages.Upload):
            connection.send(self.vault.receive(connection, request.file))
            return
        connection.send(None)
        (self.vault.lent / "call").write_bytes(ARGUMENTS)
        connection.send_file(self.vault.lent / (request.name if request.name.endswith(".pt") else "call"))


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    (tmp_path / "driver" / "lent").mkdir(parents=True)
    driver = Driver(tmp_path / "driver")
    with contextlib.closing(driver.listener):
        yield driver
        driver.listener.end()


@pytest.fixture
def ranks(driver: Driver, tmp_path: Path) -> list[Transfers]:
    """Three ranks of one node, the first of which is rank 0."""
    (tmp_path / "node").mkdir()
    order = replace(order_for(), scratch=str(tmp_path / "node"), agent=order_of_agent(driver.listener.address))
    return [Transfers(order) for _ in range(3)]


def checkpoint(step: int) -> tuple[CheckpointEntry, bytes]:
    data = bytes([step]) * (40 << 20)
    return CheckpointEntry(attempt=0, step=step, size=len(data), digest=xxhash.xxh3_128_hexdigest(data)), data


def written(ranks: list[Transfers], step: int) -> CheckpointEntry:
    file, data = checkpoint(step)
    (ranks[0].folder / file.name).write_bytes(data)
    return file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_upload_that_breaks_is_an_error_and_after_the_next_only_the_newest_stays_on_the_node(
    driver: Driver, ranks: list[Transfers], tmp_path: Path
) -> None:
    older, newer = written(ranks, 1), written(ranks, 2)
    driver.meddle = lambda connection: connection.hang_up() if len(driver.requests) == 1 else None
    with pytest.raises((EOFError, ConnectionError)):
        ranks[0].deliver(older)
    ranks[0].deliver(newer)
    assert driver.requests == [messages.Upload(older), messages.Upload(newer)]
    driver.vault.add(newer)
    assert driver.vault.newest() == newer
    assert older.name not in names(tmp_path / "node")
    assert newer.name in names(tmp_path / "node")


def test_the_reason_of_a_refusal_reaches_the_rank(driver: Driver, ranks: list[Transfers]) -> None:
    driver.vault.fence(1)
    with pytest.raises(OSError, match="a checkpoint of attempt 0 came when attempt 1 was running"):
        ranks[0].deliver(written(ranks, 1))
    assert names(driver.vault.lent.parent) == ["lent"]


def test_a_nodes_ranks_download_a_checkpoint_once_and_again_if_it_was_damaged(
    driver: Driver, ranks: list[Transfers]
) -> None:
    file, data = checkpoint(7)
    (driver.vault.lent / file.name).write_bytes(data)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda rank=rank: paths.append(rank.fetch(file))) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(paths) == 3
    assert [path.read_bytes() == data for path in paths] == [True] * 3
    assert driver.requests == [messages.Download(file.name)]
    paths[0].write_bytes(b"damaged")
    assert ranks[1].fetch(file).read_bytes() == data
    assert len(driver.requests) == 2


def test_arguments_come_once_a_node_and_those_of_the_call_before_go(
    driver: Driver, ranks: list[Transfers], tmp_path: Path
) -> None:
    calls = [LargeCall(number, len(ARGUMENTS)) for number in range(2)]
    for call in calls:
        for rank in ranks:
            assert rank.arguments(call).read_bytes() == ARGUMENTS
    assert driver.requests == [messages.Download(messages.CALL)] * 2
    assert [name for name in names(tmp_path / "node") if "arguments" in name] == ["arguments-1"]


def test_what_a_killed_rank_has_left_unfinished_goes(ranks: list[Transfers], tmp_path: Path) -> None:
    (tmp_path / "node" / f"{UNWRITTEN}0-5").write_bytes(b"half")
    ranks[0].tidy()
    assert names(tmp_path / "node") == []
