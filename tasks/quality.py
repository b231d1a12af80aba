"""Quality of a model of names, as a line and as a page."""

from __future__ import annotations

from dataclasses import dataclass

from flytekitplugins.daskpytorch import report as pieces


@dataclass
class Quality:
    """Loss and accuracy of the trained model on the held-out names."""

    loss: float
    """Cross-entropy of the next character, in nats."""
    accuracy: float
    bigram_loss: float
    """Loss of a model that knows only the previous character, in nats."""

    def verdict(self) -> str:
        """Return the loss, the comparison with a bigram model and the accuracy in a line."""
        return (
            f"held-out loss {self.loss:.4f} nats per character, {self.comparison()} a bigram model's "
            f"{self.bigram_loss:.4f}; {self.accuracy:.1%} of the characters right"
        )

    def comparison(self) -> str:
        """Return the difference from a bigram model's loss in words, such as `0.1000 better than`."""
        gain = self.bigram_loss - self.loss
        return f"{abs(gain):.4f} {'better' if gain >= 0 else 'worse'} than"


def page(epoch_losses: list[float], epoch_accuracies: list[float], quality: Quality, names: list[str]) -> str:
    """Return a page about the training and its result."""
    epochs = (1.0, float(max(2, len(epoch_losses))))
    losses = {"LSTM": list(enumerate(epoch_losses, 1)), "bigram model": [(x, quality.bigram_loss) for x in epochs]}
    accuracies = {"LSTM": list(enumerate(epoch_accuracies, 1))}
    return pieces.page(
        pieces.status("done", "Pet names", tone="good", note=f"{len(epoch_losses)} epochs"),
        pieces.figures(
            {
                "held-out loss": (quality.loss, "nats per character"),
                "a bigram model's": (quality.bigram_loss, f"the LSTM is {quality.comparison()} it"),
                "characters right": f"{quality.accuracy:.1%}",
            }
        ),
        pieces.section(
            "Is it learning?",
            pieces.grid(
                pieces.line_chart("held-out loss", losses, "epoch", best={"LSTM": "min"}, dashed=["bigram model"]),
                pieces.line_chart("held-out accuracy", accuracies, "epoch", best={"LSTM": "max"}),
            ),
        ),
        pieces.section("New names", pieces.card("Invented", pieces.text(", ".join(names)))),
    )
