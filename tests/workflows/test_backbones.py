"""The networks of transfer learning: their heads, and the weights from which they start."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torchvision import models

from tasks.backbones import Start, build, head_of, load_start, read_start, save_start

CLASSES = ["beagle", "boxer", "collie"]


@pytest.mark.parametrize(
    ("backbone", "head"),
    [
        ("small", "classifier"),
        ("squeezenet1_1", "classifier.1"),  # a convolution
        ("googlenet", "fc"),  # with two more heads, which are left out
    ],
)
def test_every_backbone_scores_the_classes_by_its_head(backbone: str, head: str) -> None:
    model = build(backbone, 3)
    name, layer = head_of(model)
    assert name == head
    assert getattr(layer, "out_features", None) or layer.out_channels == 3
    assert model(torch.zeros(2, 3, 96, 96)).shape == (2, 3)


@pytest.mark.parametrize("backbone", ["resnet18", "squeezenet1_1"])
def test_weights_for_other_classes_leave_the_head_as_it_is(backbone: str) -> None:
    given, model = models.get_model(backbone, weights=None).state_dict(), build(backbone, 3)
    head, before = head_of(model)[0], {name: weight.clone() for name, weight in model.state_dict().items()}
    load_start(model, Start(weights=given), CLASSES)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name] if name.startswith(f"{head}.") else given[name]), name


@pytest.mark.parametrize(("classes", "is_taken"), [(CLASSES, True), (["cat", "dog", "fox"], False), (None, True)])
def test_the_head_of_an_earlier_run_is_taken_for_the_same_classes(
    classes: Sequence[str] | None, is_taken: bool
) -> None:
    earlier, model = build("small", 3), build("small", 3)
    load_start(model, Start(weights=earlier.state_dict(), classes=classes), CLASSES)
    assert torch.equal(model.classifier.weight, earlier.classifier.weight) == is_taken
    assert torch.equal(model.features[0].weight, earlier.features[0].weight)


def test_a_start_is_read_as_it_was_saved(tmp_path: Path) -> None:
    weights = build("small", 3).state_dict()
    for classes in (None, CLASSES):
        save_start(Start(weights=weights, classes=classes), tmp_path / "start.pt")
        found = read_start(tmp_path / "start.pt")
        assert found.classes == classes
        torch.testing.assert_close(dict(found.weights), dict(weights), rtol=0, atol=0)
    torch.save({f"module.{name}": weight for name, weight in weights.items()}, tmp_path / "wrapped.pt")
    assert read_start(tmp_path / "wrapped.pt").weights.keys() == weights.keys()
