"""The driver assigns workers, ranks, GPUs, cores and the backend correctly."""

import random

import pytest

from flytekitplugins.daskpytorch.protocol.placement import (
    Node,
    Place,
    choose_backend,
    one_per_gpu,
    place_ranks,
    worker_order,
)


def node(
    worker: str, *, host: str | None = None, cores: int = 8, gpus: tuple[str, ...] = (), uuids: tuple[str, ...] = ()
) -> Node:
    return Node(
        worker=worker,
        host=host or f"host-of-{worker}",
        num_cores=cores,
        gpus=gpus,
        gpu_names=("Test GPU",) * len(gpus),
        gpu_uuids=uuids,
        interface=None,
        versions={},
    )


def flat(places: list[list[Place]]) -> list[Place]:
    return [place for here in places for place in here]


@pytest.mark.parametrize(
    "ordered",
    [
        ["tcp://10.0.0.9:4000", "tcp://10.0.0.10:4000", "tcp://10.0.1.1:4000"],
        ["tcp://10.0.0.9:999", "tcp://10.0.0.9:4000", "tcp://10.0.0.9:40000"],
        ["tcp://[fe80::1]:5", "tcp://[fe80::2]:5", "tcp://[fe80::10]:5"],
        ["local worker 2", "local worker 10"],
        ["tcp://10.0.0.1:1", "tls://10.0.0.1:1", "tls://node-2:1"],
    ],
)
def test_worker_order_compares_numbers_as_numbers(ordered: list[str]) -> None:
    shuffled = random.Random(1).sample(ordered, len(ordered))
    assert sorted(shuffled, key=worker_order) == ordered
    backwards = ordered[::-1]
    assert sorted(backwards, key=worker_order) == ordered


def test_ranks_are_consecutive_in_the_order_of_the_workers() -> None:
    places = place_ranks([node("a"), node("b"), node("c")], 2)
    assert [[place.rank for place in here] for here in places] == [[0, 1], [2, 3], [4, 5]]
    assert [place.local_rank for place in flat(places)] == [0, 1, 0, 1, 0, 1]
    assert [place.group_rank for place in flat(places)] == [0, 0, 1, 1, 2, 2]
    assert {(place.world_size, place.local_world_size) for place in flat(places)} == {(6, 2)}


def test_ranks_of_one_host_are_counted_over_its_workers() -> None:
    places = place_ranks([node("a", host="h"), node("b", host="i"), node("c", host="h")], 2)
    assert [[place.host_rank for place in here] for here in places] == [[0, 1], [0, 1], [2, 3]]


ALL, ROTATED = ("0", "1", "2"), [("0", "1", "2"), ("1", "2", "0"), ("2", "0", "1")]


@pytest.mark.parametrize(
    ("nodes", "ranks_per_worker", "gpus"),
    [
        pytest.param([node("a"), node("b")], 1, [None, None], id="none"),
        pytest.param([node("a", gpus=ALL)], 3, ["0", "1", "2"], id="one each"),
        pytest.param([node(name, host="h", gpus=tuple("0123")) for name in "ab"], 2, [*"0123"], id="of one host"),
        pytest.param([node(name, host="h", gpus=("0", "1")) for name in "abcde"], 1, [*"01010"], id="in turn"),
        pytest.param([node(name, gpus=("0", "1")) for name in "ab"], 2, [*"0101"], id="of different hosts"),
        # dask-cuda gives every worker of a host all GPUs, its own first.
        pytest.param([node(f"w{i}", host="h", gpus=each) for i, each in enumerate(ROTATED)], 1, [*"012"], id="rotated"),
        pytest.param([node("a", gpus=("GPU-8f2c", "MIG-77aa"))], 2, ["GPU-8f2c", "MIG-77aa"], id="by their names"),
    ],
)
def test_each_rank_has_a_gpu_where_there_are_enough(
    nodes: list[Node], ranks_per_worker: int, gpus: list[str | None]
) -> None:
    assert [place.gpu for place in flat(place_ranks(nodes, ranks_per_worker))] == gpus


def seen(nodes: list[Node], ranks_per_worker: int) -> list[tuple[str, int | None]]:
    """What each rank sees where it sees all, and which of them is its own."""
    places = flat(place_ranks(nodes, ranks_per_worker, "all"))
    return [("".join(place.visible_gpus), place.device_index) for place in places]


def test_a_rank_sees_its_own_gpu_or_all_of_its_workers() -> None:
    alone = node("a", gpus=("0", "1", "2", "3"))
    assert [place.visible_gpus for place in flat(place_ranks([alone], 2))] == [("0",), ("1",)]
    assert [place.device_index for place in flat(place_ranks([alone], 2))] == [0, 0]
    assert seen([alone], 2) == [("0123", 0), ("0123", 1)]
    assert seen([alone], 1) == [("0123", 0)]
    assert seen([node("a", gpus=("0", "1"))], 3) == [("01", 0), ("01", 1), ("01", 0)]
    assert seen([node("a")], 2) == [("", None)] * 2


def test_of_all_gpus_a_rank_sees_none_of_another_workers() -> None:
    workers = [node(name, host="h", gpus=("0", "1", "2", "3", "4")) for name in "ab"]
    assert seen(workers, 2) == [("014", 0), ("014", 1), ("234", 0), ("234", 1)]
    assert seen([node("a", host="h", gpus=("0", "1")), node("b", host="h", gpus=("2", "3"))], 1) == [
        ("01", 0),
        ("23", 0),
    ]
    rotated = [node("a", host="h", gpus=("0", "1")), node("b", host="h", gpus=("1", "0"))]
    assert seen(rotated, 1) == [("0", 0), ("1", 0)]


def test_cores_are_shared_by_all_ranks_of_a_host() -> None:
    workers = [node("a", host="h", cores=8), node("b", host="h", cores=8), node("c", cores=8)]
    assert [place.num_threads for place in flat(place_ranks(workers, 2))] == [2, 2, 2, 2, 4, 4]
    assert [place.num_threads for place in flat(place_ranks([node("a", cores=2)], 3))] == [1, 1, 1]


def backend(asked: str, nodes: list[Node], ranks_per_worker: int = 1) -> str:
    return choose_backend(asked, nodes, place_ranks(nodes, ranks_per_worker))


@pytest.mark.parametrize(
    ("nodes", "ranks_per_worker", "expected", "lacking"),
    [
        ([node("a", gpus=("0", "1")), node("b", gpus=("0", "1"))], 2, "nccl", ""),
        ([node("a", gpus=("0",)), node("b", gpus=("0",))], 1, "nccl", ""),
        ([node("a"), node("b")], 1, "gloo", "rank 0 on a has none, rank 1 on b has none"),
        ([node("a", gpus=("0",)), node("b")], 1, "gloo", "rank 1 on b has none"),
        ([node("a", gpus=("5",))], 2, "gloo", "rank 1 on a shares GPU 5"),
        ([node(each, host="h", gpus=("0",)) for each in "ab"], 1, "gloo", "rank 1 on b shares GPU 0"),
        ([node("a", gpus=("0",)), node("b")], 2, "gloo", "rank 2 on b has none, rank 3 on b has none"),
    ],
)
def test_nccl_needs_a_gpu_of_its_own_for_every_rank(
    nodes: list[Node], ranks_per_worker: int, expected: str, lacking: str
) -> None:
    assert backend("auto", nodes, ranks_per_worker) == expected
    assert backend("gloo", nodes, ranks_per_worker) == "gloo"
    if expected == "nccl":
        assert backend("nccl", nodes, ranks_per_worker) == "nccl"
        return
    with pytest.raises(ValueError, match="needs a GPU of its own for every rank") as caught:
        backend("nccl", nodes, ranks_per_worker)
    assert lacking in str(caught.value)
    assert "backend='gloo'" in str(caught.value)


@pytest.mark.parametrize(
    ("found", "ranks"),
    [
        ({}, 1),
        ({"a": ("host-a", ()), "b": ("host-b", ())}, 1),
        ({"a": ("host-a", ("0", "1")), "b": ("host-b", ("0", "1"))}, 2),
        ({"a": ("host-a", ("0", "1", "2", "3"))}, 4),
        # Several workers of one host, which all see its GPUs, in whatever order.
        ({"a": ("host", ("0", "1")), "b": ("host", ("1", "0"))}, 1),
        ({"a": ("host", tuple("01234567")), "b": ("host", tuple("01234567"))}, 4),
        ({"a": ("host", ("0",)), "b": ("host", ("0",)), "c": ("host", ("0",))}, 1),
        # Each with those that it was given.
        ({"a": ("host", ("0", "1")), "b": ("host", ("2", "3"))}, 2),
        ({"a": ("host-a", ("0",)), "b": ("host-b", ())}, 1),
    ],
)
def test_one_rank_per_gpu(found: dict[str, tuple[str, tuple[str, ...]]], ranks: int) -> None:
    assert one_per_gpu(found) == ranks


def test_unequal_numbers_of_gpus_are_an_error_with_the_numbers() -> None:
    found = {"tcp://a": ("a", ("0", "1", "2")), "tcp://b": ("b", ("0",)), "tcp://c": ("c", ())}
    with pytest.raises(ValueError, match="1 rank on 2 workers, 3 ranks on 1 worker") as caught:
        one_per_gpu(found)
    assert "Gang(ranks_per_worker=...)" in str(caught.value)
    with pytest.raises(ValueError, match="1 rank on 1 worker, 2 ranks on 1 worker"):
        one_per_gpu({"a": ("host", ("0", "1", "2")), "b": ("host", ("3",))})


def test_pods_of_one_host_name_share_no_gpu_whose_uuids_differ() -> None:
    """With hostNetwork pods have the machine's name, and each counts its own GPUs from 0."""
    pods = [node(worker, host="machine", gpus=("0",), uuids=(uuid,)) for worker, uuid in (("a", "U1"), ("b", "U2"))]
    places = place_ranks(pods, 1)
    assert [place.gpu for place in flat(places)] == ["0", "0"]
    assert choose_backend("auto", pods, places) == "nccl"
    assert choose_backend("nccl", pods, places) == "nccl"
    same = [node(worker, host=host, gpus=("0",), uuids=("U1",)) for worker, host in (("a", "one"), ("b", "other"))]
    assert choose_backend("auto", same, place_ranks(same, 1)) == "gloo"
    alike = [node(host, host=host, gpus=("0",), uuids=("0000:43:00.0",)) for host in ("one", "other")]  # AMD's
    assert choose_backend("auto", alike, place_ranks(alike, 1)) == "nccl"
