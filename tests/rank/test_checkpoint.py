"""A rank's checkpoints: copied at once, written in a thread, complete or absent, loaded by the next attempt."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flytekitplugins.daskpytorch.context import Checkpoint, Progress, current_rank
from flytekitplugins.daskpytorch.protocol.checkpoints import LENT, CheckpointEntry, Written, digest_of
from flytekitplugins.daskpytorch.protocol.messages import Answer, Question
from flytekitplugins.daskpytorch.rank import checkpoint as checkpoint_module
from flytekitplugins.daskpytorch.rank.checkpoint import RankCheckpoint
from flytekitplugins.daskpytorch.rank.link import Transfers, unwrapped
from flytekitplugins.daskpytorch.records import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Gang, Keep
from gangs import order_for
from processes import until


@dataclasses.dataclass
class TrainingState:
    epoch: int
    weights: dict[str, torch.Tensor]
    seen: list[tuple[str, torch.Tensor]]


@dataclasses.dataclass
class FakeLink:
    """Announces what was saved, and has each checkpoint arrive in the same way."""

    transfers: Transfers
    progress: Progress
    announce: Callable[[CheckpointEntry], None]
    awaited: Future[Answer]
    kept: Sequence[SavedCheckpoint] = ()

    def send(self, said: Written) -> None:
        assert said.failure is None
        self.announce(said.entry)

    def ask(self, question: Question, about: tuple[bool, int | None]) -> Future[Answer]:
        return self.awaited

    def saving(self, step: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclasses.dataclass
class Rank:
    """A rank's checkpoint, and what it has announced."""

    folder: Path
    announced: list[CheckpointEntry] = dataclasses.field(default_factory=list)
    progress: Progress = dataclasses.field(default_factory=Progress)

    def checkpoint(
        self,
        *,
        start: CheckpointEntry | None = None,
        is_main: bool = True,
        timeout: float = 10.0,
        arrival: Future[Answer] | None = None,
        announce: Callable[[CheckpointEntry], None] | None = None,
        best_by: str | None = None,
    ) -> RankCheckpoint:
        keep = Keep(best=1, metric=best_by) if best_by is not None else Keep()
        order = order_for(attempt=2, checkpoint=start, settings=Gang(start_timeout=timeout, keep=keep))
        transfers = Transfers(dataclasses.replace(order, driver_folder=str(self.folder)))
        link: Any = FakeLink(transfers, self.progress, announce or self.lend, arrival or arrived())
        return RankCheckpoint(order.job, int(not is_main), link)

    def lend(self, file: CheckpointEntry) -> None:
        """Note what was saved, and give it the name by which a driver lends it."""
        self.announced.append(file)
        (self.folder / LENT).mkdir(exist_ok=True)
        (self.folder / LENT / file.name).hardlink_to(self.folder / file.name)

    def through(self, state: Any, then: Callable[[], None] = lambda: None) -> Any:
        """What comes back of a state that was saved, where `then` happens right after `save` has returned."""
        checkpoint = self.checkpoint()
        checkpoint.save(state, 1)
        then()
        checkpoint.flush()
        return self.checkpoint(start=self.announced[-1]).load()


def arrived(value: object = None) -> Future[Answer]:
    """What a rank waits for, which has happened."""
    arrival: Future[Answer] = Future()
    arrival.set_result(Answer(0, value))
    return arrival


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


# ---- What is saved --------------------------------------------------------------------------------------------------


def test_a_state_that_cannot_be_written_is_told_and_the_training_goes_on(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Written] = []
    monkeypatch.setattr(FakeLink, "send", lambda _, said: told.append(said))
    monkeypatch.setattr(torch, "save", mock.Mock(side_effect=OSError(28, "No space left on device")))
    checkpoint = rank.checkpoint()
    checkpoint.save({}, 3)
    checkpoint.flush()
    assert told == [Written(CheckpointEntry(attempt=2, step=3), "OSError: [Errno 28] No space left on device")]
    assert list(rank.folder.iterdir()) == []


def test_state_comes_back_as_it_was_when_it_was_saved(rank: Rank) -> None:
    base, array, tied, plain = torch.zeros(10), np.zeros(3), torch.ones(3), {"epoch": [1], "name": "x", "none": None}
    dtypes = (torch.float64, torch.bfloat16, torch.bool, torch.complex64)
    kinds = [torch.tensor([0, 1, 1]).to(dtype) for dtype in dtypes]
    training = TrainingState(3, {"w": torch.ones(2)}, [("a", torch.zeros(1))])

    def change() -> None:
        for tensor in (base, tied, *kinds, training.weights["w"], training.seen[0][1]):
            tensor.fill_(7.0)
        array.fill(1.0)
        plain["epoch"].append(2)  # type: ignore[union-attr, attr-defined]

    values = {"part": base[2:5], "array": array, "plain": plain, "kinds": kinds, "training": training}
    again = rank.through({**values, "encoder": tied, "decoder": [tied], "other": torch.ones(3)}, change)
    assert again["part"].equal(torch.zeros(3))
    assert not again["array"].any()
    assert again["plain"] == {"epoch": [1], "name": "x", "none": None}
    assert tuple(kind.dtype for kind in again["kinds"]) == dtypes
    assert all(kind.to(torch.int).equal(torch.tensor([0, 1, 1], dtype=torch.int)) for kind in again["kinds"][:3])
    assert (type(again["training"]), again["training"].epoch) == (TrainingState, 3)
    assert again["training"].weights["w"].equal(torch.ones(2))
    assert again["training"].seen[0][1].equal(torch.zeros(1))
    assert again["encoder"] is again["decoder"][0]
    assert again["encoder"] is not again["other"]


def test_what_is_loaded_is_shared_by_the_ranks_of_a_node_until_one_changes_it(rank: Rank) -> None:
    state = {"weights": torch.ones(100_000)}
    again = rank.through(state)
    address = again["weights"].data_ptr()
    pages = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    [path] = [page[-1] for page in pages if int(page[0].split("-")[0], 16) <= address < int(page[0].split("-")[1], 16)]
    assert path == str(rank.folder / LENT / rank.announced[-1].name)
    again["weights"].zero_()
    assert rank.checkpoint(start=rank.announced[-1]).load()["weights"].eq(1).all()


def test_small_part_of_a_large_tensor_is_saved_small(rank: Rank) -> None:
    rank.through({"part": torch.zeros(1_000_000)[:10]})
    assert rank.announced[0].size < 10_000


def test_weights_that_a_model_ties_stay_tied(rank: Rank) -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    again = rank.through(torch.nn.Sequential(first, second).state_dict())  # which has tensors of its own for each name
    again["0.weight"][0, 0] = 7.0
    assert again["1.weight"][0, 0] == 7.0


def test_tensors_come_without_gradient_and_graph(rank: Rank) -> None:
    weights = torch.ones(2, requires_grad=True)
    again = rank.through({"loss": (weights * 2).sum(), "grad": torch.autograd.grad((weights * 3).sum(), weights)[0]})
    assert again["loss"].item() == 4.0
    assert again["loss"].grad_fn is None
    assert again["grad"].equal(torch.full((2,), 3.0))


def test_model_that_is_saved_itself_comes_back_trainable(rank: Rank) -> None:
    again = rank.through(torch.nn.Linear(2, 1))
    assert all(type(weights) is torch.nn.Parameter and weights.requires_grad for weights in again.parameters())


@pytest.mark.parametrize(
    "state",
    [threading.Lock(), {"model": [lambda: 0]}, {"b": torch.ones(2, device="meta")}],
    ids=["lock", "lambda", "meta"],
)
def test_state_that_cannot_be_pickled_is_refused_with_advice(rank: Rank, state: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled: .*state_dict\(\)"):
        rank.checkpoint().save(state, 1)
    assert not list(rank.folder.iterdir())


# ---- What is sharded ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """Of one rank."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Please use DTensor")
def test_sharded_state_is_refused(rank: Rank, mesh: DeviceMesh) -> None:
    weights = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    weights.sum().backward()
    optimizer.step()
    of_fsdp1 = sharded_tensor.zeros(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 4, 2)  # type: ignore[arg-type]
    checkpoint = rank.checkpoint()
    for state in ({"model": [torch.zeros(3), {"weight": weights}]}, optimizer.state_dict(), {"w": of_fsdp1}):
        with pytest.raises(TypeError, match=r"it has a \w+ of shape \(4, 2\), .*save_sharded\(state, step\)"):
            checkpoint.save(state, 1)
    checkpoint.flush()
    assert not list(rank.folder.iterdir())
    with pytest.raises(TypeError, match="a ShardedTensor belongs to all ranks together"):
        unwrapped([of_fsdp1])


# ---- What it costs --------------------------------------------------------------------------------------------------


def test_copies_and_originals_die_with_their_last_reference(rank: Rank) -> None:
    checkpoint = rank.checkpoint()
    gc.collect()
    gc.disable()
    before = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
    try:
        checkpoint.save({"model": {"w": torch.ones(3)}, "tied": [torch.zeros(2)] * 2}, 1)
        checkpoint.flush()
        until(lambda: before.issuperset(id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)), "their end")
    finally:
        gc.enable()


# ---- How it is written ----------------------------------------------------------------------------------------------


def test_file_is_announced_when_it_is_whole(rank: Rank) -> None:
    seen = []

    def announce(file: CheckpointEntry) -> None:
        path = rank.folder / file.name
        seen.append((path.stat().st_size == file.size, digest_of(path) == file.digest, list(rank.folder.iterdir())))
        rank.announced.append(file)

    checkpoint = rank.checkpoint(announce=announce)
    checkpoint.save({"w": torch.zeros(1000)}, step=5)
    checkpoint.flush()
    [file] = rank.announced
    assert (file.attempt, file.step) == (2, 5)
    assert file.name == f"step-5-{file.digest[:16]}.pt"
    assert seen == [(True, True, [rank.folder / file.name])]
    assert torch.load(rank.folder / file.name, weights_only=True)["w"].equal(torch.zeros(1000))


def test_only_rank_0_writes(rank: Rank) -> None:
    checkpoint = rank.checkpoint(is_main=False)
    checkpoint.save({"w": torch.zeros(10)}, 1)
    checkpoint.save(threading.Lock(), 2)  # not even looked at
    checkpoint.flush()
    assert rank.announced == []
    assert not list(rank.folder.iterdir())
    assert rank.progress.step == 2


def test_save_returns_before_the_file_is_announced_and_the_next_one_waits_for_it(rank: Rank) -> None:
    go_on = threading.Event()

    def announce_slowly(file: CheckpointEntry) -> None:
        go_on.wait()
        rank.announced.append(file)

    checkpoint = rank.checkpoint(announce=announce_slowly)
    checkpoint.save({"w": torch.zeros(10)}, 1)
    assert rank.announced == []
    second = threading.Thread(target=checkpoint.save, args=({"w": torch.ones(10)}, 2))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    go_on.set()
    second.join()
    assert not second.is_alive()
    checkpoint.flush()
    assert [file.step for file in rank.announced] == [1, 2]


def test_flush_waits_no_longer_than_it_is_told(rank: Rank) -> None:
    go_on = threading.Event()
    checkpoint = rank.checkpoint(announce=lambda file: rank.announced.append(file) if go_on.wait() else None)
    checkpoint.flush()  # nothing to wait for
    checkpoint.save(1, 1)
    checkpoint.flush(0.1)
    assert rank.announced == []
    go_on.set()
    checkpoint.flush()
    assert len(rank.announced) == 1


# ---- Metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "taken"),
    [
        (None, {}),
        ({"loss": 0.5, "hits": 3}, {"loss": 0.5, "hits": 3.0}),
        ({"loss": torch.tensor([[0.5]], requires_grad=True)}, {"loss": 0.5}),
        ({"loss": np.float32(0.5), "hits": np.array([2])}, {"loss": 0.5, "hits": 2.0}),
        ({"many": 10**400}, {"many": float("inf")}),
    ],
)
def test_metrics_travel_as_plain_numbers(rank: Rank, metrics: Any, taken: dict[str, float]) -> None:
    checkpoint = rank.checkpoint()
    checkpoint.save({}, 1, metrics)
    checkpoint.flush()
    assert rank.announced[0].metrics == taken
    assert {type(value) for value in rank.announced[0].metrics.values()} <= {float}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (0.5, r"save\(metrics=0.5\): must be a dictionary of names and numbers"),
        ({"loss": "low"}, r"save\(metrics={'loss': 'low'}\): must be a name and a number, or a tensor that holds one"),
        ({"loss": torch.ones(2)}, r"save\(metrics={'loss': tensor\(\[1., 1.\]\)}\)"),
        ({3: 0.5}, r"save\(metrics={3: 0.5}\)"),
    ],
)
@pytest.mark.parametrize("where", ["other", "no gang"])
def test_what_is_no_metric_is_refused_before_anything_is_copied(
    rank: Rank, metrics: Any, said: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Any] = []
    monkeypatch.setattr(checkpoint_module, "copy_of", copied.append)
    checkpoint = current_rank().checkpoint if where == "no gang" else rank.checkpoint(is_main=False)
    with pytest.raises(TypeError, match=said):
        checkpoint.save({}, 1, metrics)
    assert copied == []


# ---- Another one than the start -------------------------------------------------------------------------------------


def test_nobody_waits_for_ever_for_rank_0_to_ask(rank: Rank) -> None:
    checkpoint = rank.checkpoint(is_main=False, timeout=0.01, arrival=Future(), best_by="loss")
    with pytest.raises(TimeoutError, match=r"the best checkpoint, for which rank 0 has to ask, too, did not arrive"):
        checkpoint.load(best=True)


@pytest.mark.parametrize(("best_by", "step"), [(None, None), ("loss", 3)])
def test_the_best_must_be_said_and_be_all_that_is_asked_for(rank: Rank, best_by: str | None, step: Any) -> None:
    checkpoint = rank.checkpoint(best_by=best_by)
    with pytest.raises(ValueError, match=r"Gang\(keep=Keep\(best=1, metric=...\)\)\. The gang's metric is"):
        checkpoint.load(best=True, step=step)


def test_what_is_saved_just_before_is_written_before_the_best_is_asked_for(rank: Rank) -> None:
    checkpoint = rank.checkpoint(announce=lambda file: (time.sleep(0.3), rank.lend(file))[1], best_by="loss")
    checkpoint.save({}, 4)
    assert checkpoint.load(best=True) is None
    assert [file.step for file in rank.announced] == [4]


# ---- How it is read -------------------------------------------------------------------------------------------------


def test_outside_a_gang_nothing_is_kept() -> None:
    checkpoint = Checkpoint()
    checkpoint.save(threading.Lock(), 1, metrics={"loss": 1.0})
    checkpoint.save_sharded({"weights": torch.ones(2)}, 1, {"loss": 0.5})
    checkpoint.flush()
    assert checkpoint.load() is checkpoint.load(best=True) is checkpoint.load(step=1) is checkpoint.loaded is None
    assert list(checkpoint.list()) == []
    assert checkpoint.load_sharded({"weights": torch.ones(2)}) is None


# ---- What the hang detector sees of it ------------------------------------------------------------------------------


def test_load_names_the_step_that_training_goes_on_from(rank: Rank) -> None:
    first = rank.checkpoint()
    first.save({}, 40)
    first.flush()
    [saved] = rank.announced
    rank.progress = Progress()
    checkpoint = rank.checkpoint(start=saved, is_main=False)
    assert checkpoint.loaded is None
    assert checkpoint.load() == {}
    assert checkpoint.loaded == saved.saved(None)
    assert (rank.progress.step, rank.progress.num_moves_since) == (40, 0)
