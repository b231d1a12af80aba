"""Fine-tune a causal language model by LoRA in a gang, with TRL's `SFTTrainer`, as a Flyte workflow.

Steps: check -> train (with DDP on a Dask cluster, evaluations beside it) -> compare (base and adapter, held out)

Run the workflow on this machine, with a tiny model and embedded texts, without a download (half a minute on two cores):

    pip install '.[workflows]'
    pyflyte run workflows/finetune.py finetune

Fine-tune a model from the Hugging Face Hub, or from a folder, on JSON lines with `prompt` and `completion`:

    pyflyte run workflows/finetune.py finetune --model Qwen/Qwen3-0.6B --data 'data/*.jsonl' \
        --hp '{"steps": 500, "learning_rate": 0.0002, "max_length": 1024, "checkpoint_interval": 100}'

`FINETUNE_WORKERS` sets the number of Dask workers that train, 2 by default. One more worker evaluates.
`DASKPYTORCH_PROFILE=gpu` gives each worker a GPU. On a Flyte backend, each worker loads the model itself, so `--model`
is a name at the Hub or a folder in the image, and `--data` a URL such as s3://bucket/texts/*.jsonl.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flytekit import current_context, task, workflow
from flytekit.types.directory import FlyteDirectory

from flytekitplugins.daskpytorch import DaskDDP, Evaluate, Gang, Keep, Wandb
from flytekitplugins.daskpytorch.transformers import GangCallback
from tasks import finetuning, stream_trainer
from tasks.finetuning import Hyperparameters
from workflows import resources

NUM_WORKERS = resources.number("FINETUNE_WORKERS", 2)
SETTINGS = resources.SETTINGS | {"FINETUNE_WORKERS": str(NUM_WORKERS), "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables of the tasks' pods, which import this file again."""
METRIC = "held_out_loss"


class Finetuned(NamedTuple):
    """The outputs of the workflow."""

    adapter: FlyteDirectory
    """The adapter in PEFT's format: `adapter_model.safetensors`, its configuration, and the tokenizer."""
    base_loss: float
    """Cross-entropy of the model without the adapter on held-out completions, in nats per token."""
    loss: float
    """The same with the adapter."""
    completion: str
    """Completion of a held-out prompt by the model with the adapter."""


class Comparison(NamedTuple):
    """Outputs of the comparison."""

    base_loss: float
    loss: float
    completion: str


def evaluate(model: str, data: str, hp: Hyperparameters) -> dict[str, float]:
    """Evaluate a checkpoint, beside the training."""
    gang = GangCallback()  # holds the checkpoint's files
    assert gang.resume_from_checkpoint is not None  # noqa: S101 - an evaluation always has a checkpoint
    tuned, tokenizer = finetuning.with_adapter(model, hp, gang.resume_from_checkpoint)
    return {METRIC: finetuning.held_out_loss(tuned, tokenizer, data, hp)}


@task(requests=resources.SMALL, environment=SETTINGS)
def check(model: str, data: str, hp: Hyperparameters) -> str:
    """Open the data and the model's configuration. Wrong inputs fail here, before any cluster starts."""
    finetuning.check_model(model)
    parts = finetuning.split(finetuning.open_stream(data), hp.held_out)
    for name, part in zip(("to train on", "held out"), parts, strict=True):
        if next(iter(part), None) is None:
            raise ValueError(f"data={data!r} with hp.held_out={hp.held_out} has no example {name}; give more examples")
    return data


@task(
    task_config=DaskDDP(
        scheduler=resources.SCHEDULER,
        workers=resources.workers(NUM_WORKERS + 1),
        gang=Gang(evaluate=Evaluate(evaluate), keep=Keep(last=1, best=1, metric=METRIC)),
        wandb=Wandb(project="finetune"),
    ),
    requests=resources.SMALL,
    environment=SETTINGS,
    retries=2,
    enable_deck=True,
)
def train(model: str, data: str, hp: Hyperparameters) -> FlyteDirectory:
    """Train in all ranks. The task returns rank 0's adapter."""
    adapter = stream_trainer.train(model, data, hp, Path(current_context().working_directory))
    return FlyteDirectory(str(adapter))


@task(requests=resources.GATHERING, environment=SETTINGS)
def compare(model: str, data: str, hp: Hyperparameters, adapter: FlyteDirectory) -> Comparison:
    """Evaluate the model with the received adapter, and without it."""
    tuned, tokenizer = finetuning.with_adapter(model, hp, adapter.download())
    loss = finetuning.held_out_loss(tuned, tokenizer, data, hp)
    with tuned.disable_adapter():
        base_loss = finetuning.held_out_loss(tuned, tokenizer, data, hp)
    prompt = next(iter(finetuning.split(finetuning.open_stream(data), hp.held_out)[1]))["prompt"]
    completion = finetuning.complete(tuned, tokenizer, prompt)
    print(f"held-out loss {loss:.3f} nats per token, {base_loss:.3f} without the adapter; {prompt!r} -> {completion!r}")
    return Comparison(base_loss=base_loss, loss=loss, completion=completion)


@workflow
def finetune(model: str = "", data: str = "", hp: Hyperparameters = Hyperparameters()) -> Finetuned:
    """Fine-tune a causal language model by LoRA.

    Args:
        model: A name at the Hugging Face Hub, or a folder that all workers have. Empty: a tiny model with random
            weights.
        data: JSON lines with `prompt` and `completion`: a path, a pattern, https:// or s3://. Empty: an embedded
            exercise.
        hp: Hyper-parameters, as a JSON object of the fields of `Hyperparameters`.
    """
    checked = check(model=model, data=data, hp=hp)
    adapter = train(model=model, data=checked, hp=hp)
    comparison = compare(model=model, data=checked, hp=hp, adapter=adapter)
    return Finetuned(
        adapter=adapter,
        base_loss=comparison.base_loss,
        loss=comparison.loss,
        completion=comparison.completion,
    )
