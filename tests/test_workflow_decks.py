"""The workflows' Decks, made from numbers without a training."""

from __future__ import annotations

from flytekitplugins.daskpytorch.report.pieces import shared
from tasks import quality
from tasks.registry import Promotion
from test_challenger import CARD
from test_report import Parts, chart_data, rows_of
from workflows import retrain


def checked(page: str) -> str:
    """The page, which has been parsed, and has what all share once."""
    assert page.count(shared()) == 1
    Parts(bare := page.replace(shared(), ""))
    return bare


def test_pet_names_are_beside_a_bigram_model() -> None:
    found = quality.Quality(loss=1.5, accuracy=0.25, bigram_loss=2.0)
    page = checked(quality.page([2.0, 1.5], [0.2, 0.25], found, ["Bello", "<b>"]))
    loss, accuracy = chart_data(page)
    assert [(line["name"], line["y"]) for line in loss["lines"]] == [("LSTM", [2, 1.5]), ("bigram model", [2, 2])]
    assert loss["lines"][1]["dashed"]
    assert accuracy["lines"][0]["best"] == [2, 0.25]
    assert "the LSTM is 0.5000 better than it" in page
    assert "Bello, &lt;b&gt;" in page


def test_a_retraining_is_beside_its_champion() -> None:
    history = [
        Promotion(number=number, version=f"v{number}", previous=None, reason="better", at="2026-01-31")
        for number in (1, 2)
    ]
    curves = {"challenger": [(1.0, 2.0), (2.0, 1.5)], "champion": [(1.0, 1.75), (2.0, 1.75)]}
    page = checked(retrain._page("v2 was promoted", "v2", CARD, history, curves, CARD.comparison))
    [chart] = chart_data(page)
    assert [line["name"] for line in chart["lines"] if line["dashed"]] == ["champion"]
    rows = rows_of(page)
    assert rows.index(["2", "v2", "", "2026-01-31", "better"]) < rows.index(["1", "v1", "", "2026-01-31", "better"])
    assert "Model card of v2" in page
