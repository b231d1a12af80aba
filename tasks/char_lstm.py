"""A character model of names and its training loop. Runs in every rank of a gang, or in one process as rank 0 of 1.

There is neither Flyte nor Dask in here: `current_rank()` says who this process is, and torch.distributed does the rest.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flytekitplugins.daskpytorch import StrictInputs, current_rank
from tasks.checks import is_between, is_whole, raise_if_wrong
from tasks.names import ALPHABET
from tasks.together import gather_from_ranks, generators, set_generators, sum_over_ranks

__all__ = [
    "CharLSTM",
    "EpochMetrics",
    "Evaluation",
    "Hyperparameters",
    "TrainingResult",
    "bigram_loss",
    "evaluate",
    "sample_names",
    "train",
    "windows",
]

logger = logging.getLogger(__name__)

NUM_SYMBOLS = len(ALPHABET)
BLANK = ALPHABET.index("*")
STOP = ALPHABET.index("+")
CONTEXT = 8
"""How many characters the model reads to predict the next."""
EVALUATION_BATCH = 4096
"""Windows per forward pass where no gradient is kept."""
MAX_DRAWS = 20
"""How many names `sample_names` draws for each that it is to give, before it gives up."""


@dataclass
class Hyperparameters(StrictInputs):
    """How to train. A plain dataclass, so that it can be the input of a workflow."""

    epochs: int = 3
    """How often every window is seen."""
    batch_size: int = 128
    """Windows per step and rank; a step of the whole gang sees this times the number of ranks."""
    learning_rate: float = 5e-3
    """Adam's step size."""
    dropout: float = 0.1
    """The share of activations dropped between the layers of the LSTM."""
    held_out: float = 0.1
    """The fraction of the different names that the model never trains on."""
    seed: int = 0
    """Fixes the split, the initial weights, the order of the windows and the dropout."""
    log_interval: int = 10
    """Steps between two reports of the loss; each report waits for the device."""
    checkpoint_interval: int = 0
    """Steps between two checkpoints within an epoch; 0: only at the end of each epoch."""

    def __post_init__(self) -> None:
        fraction = "a fraction above 0 and below 1"
        checks = {
            "epochs": (is_whole(self.epochs, 1), "a whole number from 1 up"),
            "batch_size": (is_whole(self.batch_size, 1), "a whole number from 1 up"),
            "learning_rate": (is_between(self.learning_rate, 0, math.inf), "a finite number above 0"),
            "dropout": (self.dropout == 0 or is_between(self.dropout, 0, 1), "0, or " + fraction),
            "held_out": (is_between(self.held_out, 0, 1), fraction),
            "seed": (is_whole(self.seed, 0) and self.seed < 2**63, "a whole number from 0 up and below 2**63"),
            "log_interval": (is_whole(self.log_interval, 1), "a whole number from 1 up"),
            "checkpoint_interval": (is_whole(self.checkpoint_interval, 0), "a whole number from 0 up"),
        }
        raise_if_wrong(self, checks)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model predicts the next character."""

    loss: float
    """Mean cross-entropy in nats per character, padding left out."""
    accuracy: float
    """The share of these characters that the model ranks first."""
    num_windows: int
    """How many windows the ranks evaluated together."""


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """One epoch, as the whole gang saw it."""

    epoch: int
    """1 … epochs."""
    loss: float
    """Mean cross-entropy in nats per character over the epoch's training steps, with dropout."""
    held_out_loss: float
    """The same over the held-out windows, at the end of the epoch and without dropout."""
    held_out_accuracy: float
    """The share of the held-out characters that the model ranks first."""
    samples_seen: int
    """Training windows that the ranks saw; equal to their number, or the training fails."""
    samples_per_second: float
    """Training windows per second of all ranks together."""
    epoch_seconds: float
    """Seconds that the epoch's training steps took, without the evaluation and what an interruption lost."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training run leaves; the same on every rank."""

    state_dict: dict[str, Tensor]
    """The trained weights as CPU tensors, for `CharLSTM.from_state_dict`."""
    epochs: list[EpochMetrics]
    """One entry per epoch, in order; fewer than were wanted if the gang was told to stop."""


@dataclass(frozen=True, kw_only=True)
class _RankState:
    """What only one rank knows of the training."""

    loss_sum: float
    """The loss over the windows that this rank saw in the epoch so far."""
    generators: dict[str, Tensor]
    """The states of torch's global random generators, by the type of device; they draw the dropout."""


@dataclass(frozen=True, kw_only=True)
class _TrainingState:
    """A checkpoint: all that the steps to come depend on. The epoch that they are in is the one after `epochs`."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    step: int
    """Steps taken in all epochs."""
    epochs: list[EpochMetrics]
    """Of the epochs that are over."""
    order: Tensor
    """The state of the generator that draws the epoch's order, before it did."""
    position: int
    """How many windows of that order the gang has been through: samples, since other ranks may cut other batches."""
    times_seen: Tensor
    """How often the ranks together saw each window in the epoch so far."""
    seconds: float
    """What the epoch took so far."""
    ranks: list[_RankState]
    """Of each rank."""


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """The distinct prefixes of some rows. All tensors are int64."""

    symbols: list[Tensor]
    """For each length, the last characters of the distinct prefixes."""
    parents: list[Tensor]
    """Where each one's own prefix is among those of the length before; zero for the first."""
    prefixes: Tensor
    """Which prefix each row has at each position, as an index into those of all lengths: (batch, length)."""

    @property
    def sizes(self) -> list[int]:
        """How many distinct prefixes each length has."""
        return [len(level) for level in self.symbols]


class CharLSTM(nn.Module):
    """Four LSTM layers of 128 units over one-hot characters, and a dense layer that scores the next character."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(NUM_SYMBOLS, 128, num_layers=4, dropout=dropout, batch_first=True)
        self.dense = nn.Linear(128, NUM_SYMBOLS)
        self._draw_input_weights()

    def _draw_input_weights(self) -> None:
        """Let what a layer reads matter from the first step.

        `nn.LSTM` draws all its weights from within 1/sqrt(128). That is too little for inputs of which one in 31 is not
        zero, and for outputs of the layer below with a root mean square of some 0.3: of the difference that a character
        makes four layers leave 4e-5, and half of a training goes by before the weights have grown. Here what the first
        layer adds to its gates has unit variance, like an `nn.Embedding`, and so have the products in the others.
        """
        for layer, (input_weight, *_) in enumerate(self.lstm.all_weights):
            nn.init.normal_(input_weight, std=1 / (0.3 * math.sqrt(self.lstm.hidden_size)) if layer else 1)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Tensor]) -> CharLSTM:
        """A model with the weights of a `TrainingResult`, on this rank's device and without dropout.

        Raises:
            RuntimeError: The weights are those of another model.
        """
        model = cls().to(current_rank().device)
        model.load_state_dict(state_dict)
        return model.eval()

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
            if 2 * sum(tree.sizes) <= characters.numel():  # or else it does not pay
                return self._forward_by_prefix(tree)
        return self.dense(self.lstm(F.one_hot(characters, NUM_SYMBOLS).to(self.dense.weight.dtype))[0])

    def _forward_by_prefix(self, tree: _Tree) -> Tensor:
        """Run the same LSTM once per distinct prefix instead of once per row.

        What the LSTM has made of a row at some position depends on the row up to there, and most rows begin like
        others: padding is a third of all characters. On a CPU this is four times as fast at 1,024 rows. Rows that
        begin alike also share their dropout up to there.

        The gates are those of `torch.nn.LSTM`, whose documentation has the formulas.
        """
        output = None
        for input_weight, hidden_weight, input_bias, hidden_bias in self.lstm.all_weights:
            bias = input_bias + hidden_bias
            # What does not wait for the position before is done for all positions at once.
            if output is None:
                inputs = F.embedding(torch.cat(tree.symbols), input_weight.t() + bias)  # of a one-hot character
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
    """Cut names into what the model reads and predicts.

    A name is written as eight blanks, its characters and the stop; each character and the stop is the last of one
    window, with the eight characters before it: `********m`, `*******ma`, `******max`, `*****max+`.

    Args:
        names: Clean names.

    Returns:
        Indices into the alphabet, (num_windows, 9), uint8, in the order of the names.

    Raises:
        ValueError: There is no name, or a name has a character outside the alphabet.
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
    """Train a `CharLSTM` together with the other ranks of the gang; every rank calls this with the same arguments.

    The loss is the cross-entropy of the next character at all eight positions of a window, except where that next
    character is a blank: padding takes no skill to predict and would flatter the loss. Every window is seen exactly
    once per epoch, in an order that all ranks draw alike from the seed, so that two ranks with batch size B make the
    same steps as one rank with 2B. Seeds torch's global random generator.

    Saves a checkpoint after each epoch, every `hp.checkpoint_interval` steps, and when the gang is to stop; then it
    returns with what there is. Starts from the gang's checkpoint, where there is one: on a CPU and with as many ranks
    as before, the weights and losses are bit for bit those of a training without interruption. With another number of
    ranks it goes on with the next window, cutting the rest of the epoch into the batches of the new gang.

    Args:
        training_windows: (num_windows, 9), as from `windows`.
        held_out_windows: (num_windows, 9), evaluated after every epoch.
        hp: How to train.
        start: The weights to start from, as a `TrainingResult` has them; without them, random ones from the seed.

    Returns:
        The trained weights and one entry of metrics per epoch, the same on every rank but for the timing.

    Raises:
        ValueError: There are fewer training windows than ranks, no held-out windows, or the checkpoint is that of
            another number of training windows.
        RuntimeError: The ranks together did not see every training window exactly once, or `start` is of another model.
    """
    rank = current_rank()
    if len(training_windows) < rank.world_size:
        raise ValueError(
            f"{len(training_windows)} training windows are too few for {rank.world_size} ranks: every rank needs one. "
            "Give more names, hold out fewer of them, or use fewer ranks."
        )
    if not len(held_out_windows):
        raise ValueError("there are no held-out windows, so that no epoch can be judged; hold out at least one name")
    trainer = _Trainer(training_windows, hp, start)
    if (state := rank.checkpoint.load()) is not None:
        trainer.resume(state)
    trainer.run(held_out_windows)
    return TrainingResult(state_dict=trainer.state_dict(), epochs=trainer.epochs)


class _Trainer:
    """One rank's part in the training."""

    def __init__(self, training_windows: Tensor, hp: Hyperparameters, start: Mapping[str, Tensor] | None) -> None:
        self.rank = current_rank()
        self.hp = hp
        self.windows = training_windows.to(self.rank.device)
        self.num_targets = _is_target(self.windows).sum(dim=1)
        self.global_batch_size = hp.batch_size * self.rank.world_size
        self.step = 0
        self.epochs: list[EpochMetrics] = []
        self.order = torch.Generator().manual_seed(hp.seed)
        self._start_epoch()
        self.num_steps = self._count_steps()
        torch.manual_seed(hp.seed)  # the same initial weights on every rank …
        self.model = CharLSTM(hp.dropout).to(self.rank.device)
        if start:
            self.model.load_state_dict(start)
        else:
            self._start_from_frequencies()
        self.gang_model = DistributedDataParallel(self.model) if self.rank.world_size > 1 else self.model
        torch.manual_seed(hp.seed + self.rank.rank + 1)  # … but dropout of its own
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=hp.learning_rate, fused=True)
        if self.rank.is_main and self.global_batch_size > len(self.windows):
            logger.warning(
                "batch_size=%d on %d ranks is more than the %d training windows: every epoch is one step",
                hp.batch_size,
                self.rank.world_size,
                len(self.windows),
            )

    def _start_from_frequencies(self) -> None:
        """Let the model know how frequent each character is, or it would spend its first hundred steps on that."""
        counts = torch.bincount(self.windows[:, 1:][_is_target(self.windows)], minlength=NUM_SYMBOLS) + 1
        with torch.no_grad():
            self.model.dense.bias.copy_((counts / counts.sum()).log())

    def run(self, held_out_windows: Tensor) -> None:
        """Train to the end of the last epoch, or until the gang is to stop."""
        while len(self.epochs) < self.hp.epochs:
            if not self._take_steps():
                return
            self._end_epoch(held_out_windows)
            self._save()

    def resume(self, state: _TrainingState) -> None:
        """Go on from a checkpoint; every rank is given the same.

        Raises:
            ValueError: It is the checkpoint of another number of windows.
        """
        if len(state.times_seen) != len(self.windows):
            raise ValueError(
                f"the checkpoint of step {state.step} was saved with {len(state.times_seen)} training windows, but now "
                f"there are {len(self.windows)}. The likely cause is that the data changed between two starts of the "
                "task; give it the same data, or start a new execution."
            )
        # After its first backward pass DDP deals the gradients out anew, and with them the order in which the ranks add
        # them up. That pass is made here, for nothing, so that all steps to come add as they would have.
        _predict(self.gang_model, self.windows[:1])[2].sum().backward()
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
        self.step = state.step
        self.epochs = list(state.epochs)
        self.order.set_state(state.order)
        self._start_epoch()
        self.position = state.position
        self.started -= state.seconds
        self.num_steps = self._count_steps()
        if self.rank.rank < len(state.ranks):  # else the rank is new, and keeps the generators that it seeded
            own = state.ranks[self.rank.rank]
            self.loss_sum += own.loss_sum
            set_generators(own.generators)
        if self.rank.is_main:  # takes what the ranks found together, and the sums of ranks that are gone
            self.times_seen += state.times_seen.to(self.rank.device)
            self.loss_sum += sum(gone.loss_sum for gone in state.ranks[self.rank.world_size :])
        logger.info("goes on after step %d, in epoch %d", self.step, len(self.epochs) + 1)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights as CPU tensors, under the names that a `CharLSTM` without a gang gives them."""
        return {name: weight.detach().cpu().clone() for name, weight in self.model.state_dict().items()}

    def _count_steps(self) -> int:
        """How many steps there will be at the end: those taken, and those left with batches of this gang's size."""
        this_epoch = math.ceil((len(self.windows) - self.position) / self.global_batch_size)
        later_epochs = self.hp.epochs - len(self.epochs) - 1  # -1 after the last, when it makes up for "this"
        return self.step + this_epoch + later_epochs * math.ceil(len(self.windows) / self.global_batch_size)

    def _start_epoch(self) -> None:
        """Before the first window of an epoch."""
        self.started = time.perf_counter()
        self.position = 0
        self.order_state = self.order.get_state()
        self.times_seen = torch.zeros(len(self.windows), dtype=torch.int32, device=self.rank.device)
        # The loss stays on the device: to read it at every step would make the host wait for each.
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.rank.device)

    def _take_steps(self) -> bool:
        """See the windows that are left of the epoch; False if the gang is to stop before it is over."""
        self.model.train()
        for batch, share in self._batches():
            self.times_seen[share] += 1
            batch_loss = self._take_step(batch, share)
            self.loss_sum += batch_loss
            self.position += len(batch)
            if self.step % self.hp.log_interval == 0:
                self._log_step(batch, batch_loss)
            stops = self.rank.should_stop()
            if stops or self._is_save_due():
                self._save()
            if stops:
                return False
        return True

    def _end_epoch(self, held_out_windows: Tensor) -> None:
        """Evaluate, report, and be ready for the next epoch."""
        samples_seen = self._count_samples()
        loss = float(sum_over_ranks(self.loss_sum) / self.num_targets.sum())
        seconds = time.perf_counter() - self.started
        evaluation = evaluate(self.model, held_out_windows)
        metrics = EpochMetrics(
            epoch=len(self.epochs) + 1,
            loss=loss,
            held_out_loss=evaluation.loss,
            held_out_accuracy=evaluation.accuracy,
            samples_seen=samples_seen,
            samples_per_second=samples_seen / seconds,
            epoch_seconds=seconds,
        )
        self.rank.log(asdict(metrics), step=self.step, num_steps=self.num_steps)
        self.epochs.append(metrics)
        self._start_epoch()

    def _is_save_due(self) -> bool:
        """Whether to save within the epoch; at its end that is done after the evaluation."""
        interval = self.hp.checkpoint_interval
        return interval > 0 and self.step % interval == 0 and self.position < len(self.windows)

    def _save(self) -> None:
        """Save a checkpoint; all ranks call this at the same steps, since each has something to tell."""
        own = _RankState(loss_sum=float(self.loss_sum), generators=generators())
        state = _TrainingState(
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            step=self.step,
            epochs=self.epochs,
            order=self.order_state,
            position=self.position,
            times_seen=sum_over_ranks(self.times_seen.clone()),
            seconds=time.perf_counter() - self.started,
            ranks=gather_from_ranks(own),
        )
        self.rank.checkpoint.save(state, self.step)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches that are left of the epoch, and this rank's share of each, as indices of windows.

        All ranks draw the same permutation and cut it alike. Of the last batch the shares may differ in size, down to
        no window at all.
        """
        order = torch.randperm(len(self.windows), generator=self.order).to(self.rank.device)
        for start in range(self.position, len(order), self.global_batch_size):
            batch = order[start : start + self.global_batch_size]
            yield batch, batch.tensor_split(self.rank.world_size)[self.rank.rank]

    def _take_step(self, batch: Tensor, share: Tensor) -> Tensor:
        """Follow the gradient of the batch's mean loss; returns the loss summed over this rank's share."""
        # A rank without a window runs one with weight zero, since the others wait for its gradients.
        windows = self.windows[share if len(share) else batch[:1]]
        loss_sum = _predict(self.gang_model, windows)[2].sum() * (len(share) > 0)
        # DDP takes the mean of the ranks' gradients, as if every rank had equally many characters.
        loss = loss_sum * self.rank.world_size / self.num_targets[batch].sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss_sum.detach()

    def _log_step(self, batch: Tensor, batch_loss: Tensor) -> None:
        """Report the loss over the gang's batch; all ranks call this at the same steps."""
        loss = sum_over_ranks(batch_loss.clone()) / self.num_targets[batch].sum()
        samples_per_second = self.position / (time.perf_counter() - self.started)
        metrics = {"epoch": len(self.epochs) + 1, "loss": loss, "samples_per_second": samples_per_second}
        self.rank.log(metrics, step=self.step, num_steps=self.num_steps)

    def _count_samples(self) -> int:
        """How many windows the ranks saw in this epoch, after proof that it was each of them once."""
        times_seen = sum_over_ranks(self.times_seen)
        if not bool((times_seen == 1).all()):
            raise RuntimeError(
                f"the ranks saw {int((times_seen == 0).sum())} of {len(times_seen)} training windows not at all and "
                f"{int((times_seen > 1).sum())} more than once, but each must be seen once. The likely cause is that "
                "the ranks were given different windows or seeds; give all of them the same."
            )
        return int(times_seen.sum())


@torch.no_grad()
def evaluate(model: CharLSTM, windows: Tensor) -> Evaluation:
    """Measure how well the model predicts the next character, over the positions that `train` counts.

    In a gang every rank calls this with the same arguments, evaluates its share and gets the result for all windows;
    elsewhere one process evaluates them all. Equal windows are evaluated once, with their number as weight. Leaves the
    model in evaluation mode.

    Args:
        model: The model, not wrapped in DistributedDataParallel.
        windows: (num_windows, 9), as from the function `windows`.

    Raises:
        ValueError: There are no windows.
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
    """The cross-entropy of a model that knows only the character before: what an LSTM has to beat.

    Counts the pairs of characters in the training windows, adds one to each count, and scores the test windows, at the
    positions that `train` and `evaluate` count.

    Args:
        training_windows: (num_windows, 9), as from `windows`.
        test_windows: (num_windows, 9), as from `windows`.

    Returns:
        Mean cross-entropy in nats per character.

    Raises:
        ValueError: There are no training or no test windows.
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
    """Invent names. Leaves the model in evaluation mode.

    Args:
        model: A trained model.
        count: How many names to invent.
        exclude: Names that are not new, in any case.
        seed: The same seed gives the same names on the same kind of device.
        temperature: Below 1 the names are more usual, above 1 more daring.
        max_length: A name that has not ended after this many characters is dropped.

    Returns:
        Different names of two letters or more, in title case; fewer than `count`, with a warning in the log, if many
        draws did not give more.

    Raises:
        ValueError: `count` is negative, `temperature` not a finite number above 0, or `max_length` below 2.
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
        # Somewhat more than are missing if the share of new names stays: one more round takes longer, however small.
        share = len(found) / num_drawn if found else 1
        wanted = math.ceil(min(max(1.15 * (count - len(found)) / share, count / 4), 2 * count))
        drawn = _draw(model, wanted, generator, temperature, max_length)
        num_drawn += wanted
        found |= dict.fromkeys(name for name in drawn if _num_letters(name) >= 2 and name not in known)
    if len(found) < count:
        logger.warning(
            "sampled %d new names instead of %d in %d draws; train longer or raise the temperature (%g)",
            *(len(found), count, num_drawn, temperature),
        )
    return [name.title() for name in found][:count]


def _draw(model: CharLSTM, count: int, generator: torch.Generator, temperature: float, max_length: int) -> list[str]:
    """Draw names side by side, a character at a time; those that do not end in time are left out."""
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
    return [names[index] for index in sorted(names)]  # as they were drawn, or the short ones would come first


def _predict(model: nn.Module, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Score the next characters of each window.

    Args:
        model: Wrapped in DistributedDataParallel or not.
        windows: (batch, 9), uint8.

    Returns:
        The logits, (batch, 8, symbols); the right characters, (batch, 8), int64; and the cross-entropy in nats,
        (batch, 8), zero where the right character is padding.
    """
    windows = windows.long()
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=BLANK, reduction="none")
    return logits, targets, losses


def _tree_of(characters: Tensor) -> _Tree:
    """Find the distinct prefixes of some rows: indices into the alphabet, (batch, length), int64."""
    prefix = characters.new_zeros(len(characters))
    symbols, parents, prefixes, offset = [], [], [], 0
    for column in characters.unbind(1):
        distinct, prefix = (prefix * NUM_SYMBOLS + column).unique(return_inverse=True)
        symbols.append(distinct % NUM_SYMBOLS)
        parents.append(distinct // NUM_SYMBOLS)
        prefixes.append(prefix + offset)
        offset += len(distinct)
    return _Tree(symbols=symbols, parents=parents, prefixes=torch.stack(prefixes, dim=1))


def _is_target(windows: Tensor) -> Tensor:
    """Which of the eight next characters count: all but the padding. (num_windows, 8), bool."""
    return windows[:, 1:] != BLANK


def _count_pairs(windows: Tensor) -> Tensor:
    """How often a character follows another, (symbols, symbols), float64; pairs that end in padding are left out."""
    pairs = windows[:, :-1].long() * NUM_SYMBOLS + windows[:, 1:]
    counts = torch.bincount(pairs[_is_target(windows)], minlength=NUM_SYMBOLS**2)
    return counts.reshape(NUM_SYMBOLS, NUM_SYMBOLS).double()


def _num_letters(name: str) -> int:
    return sum(character.isalpha() for character in name)
