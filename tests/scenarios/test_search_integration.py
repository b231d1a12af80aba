"""A `Search` on a real cluster suggests experiments late, prunes models, and resumes."""

import time
from pathlib import Path

import optuna
import pytest
from distributed import Client
from optuna.trial import TrialState

from flytekitplugins.daskpytorch import Gang, Search, StoppedEarlyError, current_rank, dispatch
from processes import until

PRUNER = optuna.pruners.ThresholdPruner(upper=5.0)


def follow(experiment: dict[str, float | str]) -> int:
    """Two epochs, the second after there is a file; with a bad loss it waits until it is stopped."""
    rank, number = current_rank(), int(experiment["number"])
    first = (rank.checkpoint.load() or 0) + 1
    for epoch in range(first, 3):
        with Path(str(experiment["folder"]), f"{number}").open("a") as file:
            file.write(f"{epoch}\n")
        rank.checkpoint.save(epoch, epoch)
        rank.checkpoint.flush()
        rank.log({"epoch": epoch, "loss": experiment["x"]}, step=epoch)
        is_bad, go = float(experiment["x"]) > 5, Path(str(experiment["folder"]), "go")
        while epoch == 1 and (is_bad or not go.exists()):
            time.sleep(0.01)
    if Path(str(experiment["folder"]), f"fail-{number}").exists():
        raise LookupError("no good")
    return number


def search_of(study: optuna.Study, folder: Path, num_models: int, bad: int = -1) -> Search:
    """Number the models as they are asked for; one of them has a bad loss."""

    def suggest(trial: optuna.Trial) -> dict[str, float | str]:
        number = int(trial.user_attrs["model"])
        seen.append(sum(other.state.is_finished() for other in study.trials))
        low, high = (6.0, 7.0) if number == bad else (0.0, 1.0)
        return {"x": trial.suggest_float("x", low, high), "number": float(number), "folder": str(folder)}

    seen: list[int] = []
    search = Search(study=study, suggest=suggest, num_models=num_models, metric="loss")
    vars(suggest)["seen"] = seen
    return search


def test_experiments_are_asked_for_when_workers_are_free_for_them(client: Client, tmp_path: Path) -> None:
    study = optuna.create_study(pruner=PRUNER)
    search = search_of(study, tmp_path, 6, bad=3)
    models = dispatch.map(client, follow, search)
    until(lambda: sum(model.status == "training" for model in models) == 2, "two models to be trained")
    assert len(models) == 6
    assert [model.experiment for model in models[2:]] == [None] * 4
    assert len(study.trials) == 2
    (tmp_path / "go").touch()
    assert models.result() == [0, 1, 2, None, 4, 5]
    assert isinstance(models[3].exception(), StoppedEarlyError)
    assert [model.experiment["number"] for model in models] == list(range(6))
    seen = vars(search.suggest)["seen"]
    assert all(num_ended >= number - 1 for number, num_ended in enumerate(seen)), seen  # one other at most is trained
    assert [trial.state for trial in study.trials].count(TrialState.PRUNED) == 1
    assert study.best_params["x"] == models.best("loss").experiment["x"]
    assert models.to_frame().loc[3, "status"] == "stopped early"


def test_a_search_goes_on_where_it_was(client: Client, tmp_path: Path) -> None:
    kept, once = str(tmp_path / "kept"), Gang(max_restarts=0)
    (tmp_path / "go").touch()
    (tmp_path / "fail-1").touch()
    first = search_of(optuna.create_study(), tmp_path, 3)
    models = dispatch.map(client, follow, first, storage=kept, gang=once)
    assert [type(error).__name__ for error in models.result(return_exceptions=True)] == ["int", "LookupError", "int"]
    experiments = [model.experiment for model in models]

    (tmp_path / "fail-1").unlink()
    study = optuna.create_study()  # which knows nothing
    models = dispatch.map(client, follow, search_of(study, tmp_path, 5), storage=kept, gang=once)
    assert models.result() == list(range(5))
    assert [model.experiment for model in models[:3]] == experiments
    assert [(tmp_path / f"{number}").read_text().split() for number in range(5)] == [["1", "2"]] * 5
    assert sorted(trial.user_attrs["model"] for trial in study.trials) == list(range(5))
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    with pytest.raises(ValueError, match=r"experiment 0: .*x was .*, and is not there"):
        dispatch.map(client, follow, [{"number": 0.0, "folder": str(tmp_path)}], storage=kept)


def test_an_error_of_the_users_suggestions_ends_the_search(client: Client, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    study = optuna.create_study()

    def suggest(trial: optuna.Trial) -> dict[str, float | str]:
        if trial.user_attrs["model"] == 1:
            raise LookupError("nothing to suggest")
        return {"x": 0.5, "number": 0.0, "folder": str(tmp_path)}

    models = dispatch.map(client, follow, Search(study=study, suggest=suggest, num_models=3, metric="loss"))
    found = models.result(return_exceptions=True)
    assert found[0] == 0
    assert [str(error) for error in found[1:]] == ["nothing to suggest"] * 2
    assert sorted(trial.state.name for trial in study.trials) == ["COMPLETE", "FAIL"]


def test_models_that_were_not_asked_for_can_be_cancelled(client: Client, tmp_path: Path) -> None:
    study = optuna.create_study()
    models = dispatch.map(client, follow, search_of(study, tmp_path, 4))
    until(lambda: all((tmp_path / f"{number}").exists() for number in range(2)), "two models to be trained")
    assert models.cancel()
    until(models.done, "their end")
    assert [model.status for model in models] == ["cancelled"] * 4
    assert [trial.state.name for trial in study.trials] == ["FAIL"] * 2
