"""Measure a training whose checkpoints a second worker evaluates, beside one that evaluates them in its loop.

The model of `tasks.char_lstm` learns 1,000 windows by heart. Both ways must load the same best checkpoint at the end.
"""

from functools import partial

from figures import Figure, at_most, report
from running import SERVE, Cluster, Program, asked, nothing_left, take_turns

PROGRAM = f"""{SERVE}
import time, torch
from distributed import Client
from flytekitplugins.daskpytorch import Evaluate, Gang, Keep, current_rank, dispatch
from tasks.char_lstm import BLANK, CharLSTM, windows
from tasks.names import load_names

def loss_of(model, it):
    return torch.nn.functional.cross_entropy(model(it[:, :-1]).transpose(1, 2), it[:, 1:], ignore_index=BLANK)
def data():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    every = windows(load_names().names).long()
    return every[torch.randperm(len(every))].tensor_split([1000])
@torch.no_grad()
def evaluate(state=None):
    (model := CharLSTM()).load_state_dict(state or current_rank().checkpoint.load())
    return {{"loss": float(loss_of(model, data()[1]))}}
def train(is_beside):
    batches, checkpoint = data()[0].split(125), current_rank().checkpoint
    optimizer = torch.optim.Adam((model := CharLSTM()).parameters(), lr=0.005)
    for step in range(5):
        for batch in 6 * batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        checkpoint.save(model.state_dict(), step, {{}} if is_beside else evaluate(model.state_dict()))
    checkpoint.load(best=True)
    return checkpoint.loaded.step

def run(is_beside):
    began, beside = time.perf_counter(), Evaluate(evaluate) if is_beside else None
    gang = Gang(workers=2 if is_beside else 1, evaluate=beside, keep=Keep(best=1, metric="loss"))
    [best] = dispatch.run(client, train, is_beside, gang=gang).result()
    return [time.perf_counter() - began, best]

client = Client(scheduler_file=sys.argv[1])
serve(run)
"""

if __name__ == "__main__":
    options = asked(__doc__, rounds=(5, 1, "rounds that count"))
    with nothing_left("evaluation") as folder:
        program = Program.serving(PROGRAM, folder / "program", Cluster(folder / "cluster", 2).contact)
        found = take_turns({way: partial(program.call, way == "beside") for way in ("beside", "loop")}, options.rounds)
    here, theirs = ([seconds for seconds, _ in found[way]] for way in ("beside", "loop"))
    if len({best for way in found.values() for _, best in way}) > 1:
        raise SystemExit(f"the best checkpoints differ (seconds, step): {found}")
    what = "5 checkpoints evaluated beside the training, with the same best one"
    report([Figure.beside("in its loop", theirs, share=True, what=what, here=here, goals=at_most(1))], options.on)
