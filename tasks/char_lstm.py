"""Character model of names and its training loop. Runs in every rank of a gang, or in one process alone.

`current_rank()` says which rank this process is, and torch.distributed connects the ranks. Flyte and Dask are not
imported here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses
from torch import Tensor, nn

from flytekitplugins.daskpytorch import StrictInputs, current_rank
from flytekitplugins.daskpytorch.data import RankLoader
from tasks.checks import is_between, raise_if_wrong
from tasks.names import ALPHABET
from tasks.together import sum_over_ranks
from tasks.training import EpochMetrics as CommonMetrics
from tasks.training import Model, Rows, Trainer

logger = logging.getLogger(__name__)

NUM_SYMBOLS = len(ALPHABET)
BLANK = ALPHABET.index("*")
STOP = ALPHABET.index("+")
CONTEXT = 8
"""Number of characters that the model reads to predict the next."""
EVALUATION_BATCH = 4096
"""Windows per forward pass in evaluations."""
MAX_DRAWS = 20
"""Maximum number of draws of `sample_names` per requested name."""


@dataclass
class Hyperparameters(StrictInputs):
    """Hyper-parameters. A plain dataclass can be the input of a workflow."""

    epochs: int = 3
    """Number of epochs. Each sees every window once."""
    batch_size: int = 128
    """Windows per step and rank. A step of the gang sees this number times the number of ranks."""
    learning_rate: float = 5e-3
    """Adam's learning rate."""
    dropout: float = 0.1
    """Share of the activations that dropout zeroes between the layers of the LSTM, from 0 to below 1."""
    held_out: float = 0.1
    """Fraction of the different names that the model never trains on."""
    seed: int = 0
    """Seed of the split, the initial weights, the order of the windows and the dropout."""
    log_interval: int = 10
    """Number of steps between two reports of the loss. Each report waits for the device."""
    checkpoint_interval: int = 0
    """Number of steps between two checkpoints within an epoch. 0: only at the end of each epoch."""

    def __post_init__(self) -> None:
        is_share = self.dropout == 0 or is_between(self.dropout, 0, 1)
        raise_if_wrong(self, {"dropout": (is_share, "0, or a fraction above 0 and below 1")})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model's loss and accuracy in predicting the next character."""

    loss: float
    """Mean cross-entropy in nats per character, without padding."""
    accuracy: float
    """Share of the characters, without padding, that the model ranks first, from 0 to 1."""
    num_windows: int
    """Number of windows that the ranks evaluated together."""


@dataclass(frozen=True, kw_only=True)
class EpochMetrics(CommonMetrics):
    """Metrics of one epoch over all ranks. Losses are per character, without padding."""

    samples_seen: int
    """Number of training windows that the ranks saw. The training fails unless each was seen once."""
    epoch_seconds: float
    """Seconds of the epoch's training steps, without the evaluation and without time lost in interruptions."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Result of a training. Only the timing differs between ranks."""

    state_dict: dict[str, Tensor]
    """Trained weights as CPU tensors, for `CharLSTM.from_state_dict`."""
    epochs: list[EpochMetrics]
    """Metrics of the epochs, in order. A gang that was stopped has fewer epochs than `Hyperparameters.epochs`."""


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """Distinct prefixes of a batch of rows. All tensors are int64."""

    symbols: list[Tensor]
    """Last characters of the distinct prefixes, for each length."""
    parents: list[Tensor]
    """Index of each prefix's own prefix among those of the length before, for each length. Zero for the first
    length."""
    prefixes: Tensor
    """Index of each row's prefix at each position, counted over all lengths: (batch, length)."""

    @property
    def sizes(self) -> list[int]:
        """Return the number of distinct prefixes of each length."""
        return [len(level) for level in self.symbols]


class CharLSTM(Model):
    """Four LSTM layers of 128 units over one-hot characters, and a dense layer that scores the next character."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(NUM_SYMBOLS, 128, num_layers=4, dropout=dropout, batch_first=True)
        self.dense = nn.Linear(128, NUM_SYMBOLS)
        self._draw_input_weights()

    def _draw_input_weights(self) -> None:
        """Draw larger input weights, so that each layer's input has an effect from the first step.

        `nn.LSTM` draws all its weights from within 1/sqrt(128), which is too little here. In the first layer, one input
        in 31 is not zero. In the other layers, the inputs have a root mean square of about 0.3. Four layers would leave
        4e-5 of the difference that a character makes. Half of the training would pass before the weights have grown.
        Here the input's part of the gates has unit variance, as with `nn.Embedding`.
        """
        for layer, (input_weight, *_) in enumerate(self.lstm.all_weights):
            nn.init.normal_(input_weight, std=1 / (0.3 * math.sqrt(self.lstm.hidden_size)) if layer else 1)

    def forward(self, characters: Tensor) -> Tensor:
        """Score the character that follows each position.

        Args:
            characters: Indices into the alphabet, (batch, length), of any integer type.

        Returns:
            Logits of the next character, (batch, length, symbols), float.
        """
        characters = characters.long()
        if not characters.is_cuda:  # a GPU would wait for the host at every position
            tree = _tree_of(characters)
            if 2 * sum(tree.sizes) <= characters.numel():  # with more prefixes, the detour costs more than it saves
                return self._forward_by_prefix(tree)
        return self.dense(self.lstm(F.one_hot(characters, NUM_SYMBOLS).to(self.dense.weight.dtype))[0])

    def _forward_by_prefix(self, tree: _Tree) -> Tensor:
        """Run the LSTM once per distinct prefix instead of once per row.

        The LSTM's output at a position depends only on the row up to that position, and most rows share their
        beginning. Padding alone is a third of all characters. On a CPU this method is four times as fast at 1,024 rows.
        Rows with equal beginnings also share that beginning's dropout.

        The documentation of `torch.nn.LSTM` has the gates' formulas.
        """
        output = None
        for input_weight, hidden_weight, input_bias, hidden_bias in self.lstm.all_weights:
            bias = input_bias + hidden_bias
            # Inputs are independent of earlier positions, so one operation computes all positions.
            if output is None:
                inputs = F.embedding(torch.cat(tree.symbols), input_weight.t() + bias)  # equal to a one-hot product
            else:
                inputs = F.linear(F.dropout(output, self.lstm.dropout, self.training), input_weight, bias)
            state = inputs.new_zeros(1, 2 * self.lstm.hidden_size)
            hidden = []
            for level, gates in zip(tree.parents, inputs.split(tree.sizes), strict=True):
                before, cell = F.embedding(level, state).chunk(2, dim=1)
                let_in, keep, new, let_out = torch.addmm(gates, before, hidden_weight.t()).chunk(4, dim=1)
                cell = torch.addcmul(keep.sigmoid() * cell, let_in.sigmoid(), new.tanh())
                hidden.append(let_out.sigmoid() * cell.tanh())
                state = torch.cat([hidden[-1], cell], dim=1)
            output = torch.cat(hidden)
        return F.embedding(tree.prefixes, self.dense(output))


def windows(names: Iterable[str]) -> Tensor:
    """Cut names into windows, each with the context that the model reads and the character that it predicts.

    A name is written as eight blanks, its characters and the stop. Each character and the stop is the last character of
    one window, after the eight characters before it: `********m`, `*******ma`, `******max`, `*****max+`.

    Args:
        names: Clean names.

    Returns:
        Indices into the alphabet, (num_windows, 9), uint8, in the order of the names.

    Raises:
        ValueError: The list is empty, or a name has a character outside the alphabet.
    """
    text = "".join(f"{'*' * CONTEXT}{name}+" for name in names)
    if not text:
        raise ValueError("there are no names to cut into windows; check the list of names and the held-out fraction")
    if strangers := sorted(set(text) - set(ALPHABET)):
        raise ValueError(f"the characters {strangers} are outside the alphabet {ALPHABET!r}; clean the names first")
    index_of = torch.zeros(128, dtype=torch.uint8)
    index_of[list(ALPHABET.encode())] = torch.arange(NUM_SYMBOLS, dtype=torch.uint8)
    stream = index_of[torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8).long()]
    every = stream.unfold(0, CONTEXT + 1, 1)
    return every[every[:, -1] != BLANK]


def train(
    training_windows: Tensor,
    held_out_windows: Tensor,
    hp: Hyperparameters,
    start: Mapping[str, Tensor] | None = None,
) -> TrainingResult:
    """Train a `CharLSTM` together with the other ranks. Every rank calls this function with the same arguments.

    The loss is the cross-entropy of the next character at all eight positions of a window. Positions whose next
    character is a blank do not count, because padding is easy to predict and would lower the loss. Each epoch sees
    every window exactly once. Two ranks with batch size B make the same steps as one rank with 2B. `Trainer` describes
    checkpoints and the stop of a gang.

    Args:
        training_windows: (num_windows, 9), as from `windows`.
        held_out_windows: (num_windows, 9), evaluated after every epoch.
        hp: Hyper-parameters.
        start: Initial weights, as in `TrainingResult.state_dict`. None: random weights from the seed.

    Returns:
        Trained weights and metrics of each epoch. Only the timing differs between ranks.

    Raises:
        ValueError: The training windows are fewer than the ranks, there are no held-out windows, or the checkpoint has
            another number of training windows.
        RuntimeError: The ranks together did not see every training window exactly once, or `start` belongs to another
            model.
    """
    if not len(held_out_windows):
        raise ValueError("there are no held-out windows, so that no epoch can be judged; hold out at least one name")
    trainer = _Trainer(training_windows, held_out_windows, hp, start)
    trainer.train()
    return TrainingResult(state_dict=trainer.weights(), epochs=trainer.epochs)


class _Trainer(Trainer):
    """One rank's part in the training."""

    def __init__(
        self, training: Tensor, held_out: Tensor, hp: Hyperparameters, start: Mapping[str, Tensor] | None
    ) -> None:
        self.held_out = held_out
        self.num_targets = _is_target(training).sum(dim=1)
        device = current_rank().device
        torch.manual_seed(hp.seed)  # the same initial weights on every rank
        model = CharLSTM(hp.dropout).to(device)
        model.load_state_dict(start or model.state_dict() | {"dense.bias": _frequencies(training)})
        super().__init__(
            model,
            torch.optim.Adam(model.parameters(), lr=hp.learning_rate, fused=True),
            RankLoader(Rows(training.to(device)), hp.batch_size, seed=hp.seed, collate_fn=tuple),
            hp,
            checkpoint_interval=hp.checkpoint_interval,
        )

    def loss(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the gang's batch, and this rank's sum of the loss and number of characters."""
        loss_sum = _predict(self.gang_model, windows)[2].sum() * bool(self.loader.weight)
        # DDP averages the ranks' gradients as if all ranks had the same number of characters.
        loss = loss_sum * self.rank.world_size / self.num_targets[self.loader.global_batch].sum()
        num_targets = torch.full_like(loss_sum, self.num_targets[self.loader.share].sum())
        return loss, torch.stack([loss_sum.detach(), num_targets]).double()

    def try_out(self) -> Tensor:
        return _predict(self.gang_model, self.held_out[:1].to(self.rank.device))[2].sum()

    def judge(self, sums: Tensor, seconds: float) -> EpochMetrics:
        evaluation = evaluate(self.model, self.held_out)
        loss_sum, num_targets = sums.tolist()
        return EpochMetrics(
            epoch=len(self.epochs) + 1,
            loss=loss_sum / num_targets,
            held_out_loss=evaluation.loss,
            held_out_accuracy=evaluation.accuracy,
            samples_seen=self.loader.num_items,
            samples_per_second=self.loader.num_items / seconds,
            epoch_seconds=seconds,
        )


@torch.no_grad()
def evaluate(model: CharLSTM, windows: Tensor) -> Evaluation:
    """Measure the model's loss and accuracy over the positions that `train` counts.

    In a gang, every rank calls this function with the same arguments and evaluates its share. All ranks return the
    result for all windows. Without a gang, one process evaluates all windows. Equal windows are evaluated once, and
    their count is their weight. The model stays in evaluation mode.

    Args:
        model: The model, not wrapped in DistributedDataParallel.
        windows: (num_windows, 9), as from the function `windows`.

    Raises:
        ValueError: `windows` is empty.
    """
    if not len(windows):
        raise ValueError("there are no windows to evaluate; give at least one name")
    rank = current_rank()
    model.eval()
    distinct, counts = windows.to(rank.device).unique(dim=0, return_counts=True)
    totals = torch.zeros(4, dtype=torch.float64, device=rank.device)
    share = slice(rank.rank, None, rank.world_size)
    for part, weight in zip(
        distinct[share].split(EVALUATION_BATCH), counts[share].split(EVALUATION_BATCH), strict=True
    ):
        if len(part):  # a rank's share may be empty
            logits, targets, losses = _predict(model, part)
            counted = _is_target(part)
            correct = (logits.argmax(dim=2) == targets) & counted
            per_window = torch.stack([losses.sum(1), correct.sum(1), counted.sum(1), torch.ones_like(weight)])
            totals += per_window.double() @ weight.double()
    loss_sum, num_correct, num_targets, num_windows = sum_over_ranks(totals).tolist()
    return Evaluation(loss=loss_sum / num_targets, accuracy=num_correct / num_targets, num_windows=int(num_windows))


def bigram_loss(training_windows: Tensor, test_windows: Tensor) -> float:
    """Return the cross-entropy of a bigram model, which knows only the previous character. An LSTM should beat it.

    The bigram model counts the pairs of characters in the training windows and adds one to each count. The loss counts
    the same positions as `train` and `evaluate`.

    Args:
        training_windows: (num_windows, 9), as from `windows`.
        test_windows: (num_windows, 9), as from `windows`.

    Returns:
        Mean cross-entropy in nats per character.

    Raises:
        ValueError: `training_windows` or `test_windows` is empty.
    """
    if not len(training_windows) or not len(test_windows):
        raise ValueError(
            f"a bigram model needs windows on both sides, not {len(training_windows)} to train on and "
            f"{len(test_windows)} to test on; give more names"
        )
    training, test = _count_pairs(training_windows), _count_pairs(test_windows)
    smoothed = training + 1
    return float(-(test * (smoothed / smoothed.sum(dim=1, keepdim=True)).log()).sum() / test.sum())


@torch.inference_mode()
def sample_names(
    model: CharLSTM,
    count: int,
    *,
    exclude: Iterable[str],
    seed: int,
    temperature: float = 0.8,
    max_length: int = 16,
) -> list[str]:
    """Invent names. The model stays in evaluation mode.

    Args:
        model: A trained model.
        count: Number of names to invent.
        exclude: Known names, in upper or lower case, which are not returned.
        seed: Seed of the draws. The same seed gives the same names on the same kind of device.
        temperature: Spread of the draws. Values below 1 give more usual names, values above 1 more unusual ones.
        max_length: Most characters of a name. A longer draw is dropped.

    Returns:
        Different names of two letters or more, in title case. If too many draws fail, the list is shorter than `count`,
        and the log has a warning.

    Raises:
        ValueError: `count` is negative, `temperature` is not a finite number above 0, or `max_length` is below 2.
    """
    if count < 0 or not is_between(temperature, 0, math.inf) or max_length < 2:
        raise ValueError(
            f"cannot sample with count={count!r}, temperature={temperature!r}, max_length={max_length!r}: they must be "
            "0 or more, a finite number above 0, and 2 or more"
        )
    model.eval()
    generator = torch.Generator(model.dense.weight.device).manual_seed(seed)
    known = {name.lower() for name in exclude}
    found: dict[str, None] = {}  # a set that keeps its order
    num_drawn = 0
    while len(found) < count and num_drawn < MAX_DRAWS * count:
        # Draw 15 % more than the share of new names suggests, since an additional round costs more than these draws.
        share = len(found) / num_drawn if found else 1
        wanted = math.ceil(min(max(1.15 * (count - len(found)) / share, count / 4), 2 * count))
        drawn = _draw(model, wanted, generator, temperature, max_length)
        num_drawn += wanted
        found |= dict.fromkeys(name for name in drawn if sum(map(str.isalpha, name)) >= 2 and name not in known)
    if len(found) < count:
        logger.warning(
            "sampled %d new names instead of %d in %d draws; train longer or raise the temperature (%g)",
            *(len(found), count, num_drawn, temperature),
        )
    return [name.title() for name in found][:count]


def _draw(model: CharLSTM, count: int, generator: torch.Generator, temperature: float, max_length: int) -> list[str]:
    """Draw names in parallel, one character at a time. Draws that reach no end within `max_length` are dropped."""
    text = torch.full((count, CONTEXT), BLANK, device=generator.device)
    place = torch.arange(count, device=generator.device)
    names: dict[int, str] = {}
    for _ in range(max_length + 1):
        if not len(text):
            break
        logits = model(text[:, -CONTEXT:])[:, -1] / temperature
        logits[:, BLANK] = -math.inf
        text = torch.cat([text, logits.softmax(dim=1).multinomial(1, generator=generator)], dim=1)
        has_ended = text[:, -1] == STOP
        for index, row in zip(place[has_ended].tolist(), text[has_ended, CONTEXT:-1].tolist(), strict=True):
            names[index] = " ".join("".join(ALPHABET[character] for character in row).split())
        text, place = text[~has_ended], place[~has_ended]
    return [names[index] for index in sorted(names)]  # in the order of the draws, or short names would come first


def _predict(model: nn.Module, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Score the next characters of each window.

    Args:
        model: The model, wrapped in DistributedDataParallel or not.
        windows: (batch, 9), uint8.

    Returns:
        The logits, (batch, 8, symbols), the right characters, (batch, 8), int64, and the cross-entropy in nats, (batch,
        8). The cross-entropy is zero where the right character is padding.
    """
    windows = windows.long()
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=BLANK, reduction="none")
    return logits, targets, losses


def _tree_of(characters: Tensor) -> _Tree:
    """Return the distinct prefixes of rows of indices into the alphabet, (batch, length), int64."""
    prefix = characters.new_zeros(len(characters))
    symbols, parents, prefixes, offset = [], [], [], 0
    for column in characters.unbind(1):
        distinct, prefix = (prefix * NUM_SYMBOLS + column).unique(return_inverse=True)
        symbols.append(distinct % NUM_SYMBOLS)
        parents.append(distinct // NUM_SYMBOLS)
        prefixes.append(prefix + offset)
        offset += len(distinct)
    return _Tree(symbols=symbols, parents=parents, prefixes=torch.stack(prefixes, dim=1))


def _frequencies(windows: Tensor) -> Tensor:
    """Return the output's initial bias: the characters' frequencies, which take a hundred steps to learn."""
    counts = torch.bincount(windows[:, 1:][_is_target(windows)], minlength=NUM_SYMBOLS) + 1
    return (counts / counts.sum()).log()


def _is_target(windows: Tensor) -> Tensor:
    """Return True for each of the eight next characters that is not padding, (num_windows, 8), bool."""
    return windows[:, 1:] != BLANK


def _count_pairs(windows: Tensor) -> Tensor:
    """Return counts of the pairs of characters, (symbols, symbols), float64, without pairs that end in padding."""
    pairs = windows[:, :-1].long() * NUM_SYMBOLS + windows[:, 1:]
    counts = torch.bincount(pairs[_is_target(windows)], minlength=NUM_SYMBOLS**2)
    return counts.reshape(NUM_SYMBOLS, NUM_SYMBOLS).double()
