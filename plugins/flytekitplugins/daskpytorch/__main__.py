"""The command `daskpytorch`, also as `python -m flytekitplugins.daskpytorch`: a group of commands."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # `python -m` puts the working folder there, whose `distributed.py` is not Dask's

import contextlib
from collections.abc import Sequence
from importlib import import_module

import click

from flytekitplugins.daskpytorch.process.ending import EXIT_CODE

COMMANDS = {"run": "run_command", "show": "display.journal_file", "doctor": "doctor"}
"""Module of each command that is not here. The command's name is also its function's."""


class Commands(click.Group):
    """Imports a command's module at its use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(f"flytekitplugins.daskpytorch.{COMMANDS[cmd_name]}"), cmd_name)
        return command


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def daskpytorch(ctx: click.Context) -> None:
    """Train with PyTorch on this node or a Dask cluster. `daskpytorch COMMAND --help` lists a command's options."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@daskpytorch.command(short_help="Open the debugger of a rank on this machine, or list the ranks.")
@click.option("--gang", default="", metavar="ID", help="only gangs whose id begins so")
@click.argument("rank", type=int, required=False)
def attach(gang: str, rank: int | None) -> None:
    """Open the debugger of a rank on this machine in this terminal. Without RANK, list your ranks on this machine.

    A rank waits for a terminal at breakpoint(), and after an exception with --on-error hold. Exit code 1 if RANK does
    not wait, or there is no rank.
    """
    from flytekitplugins.daskpytorch.protocol.debugging import find_ranks, has_terminal, talk

    found = [(folder, file) for folder, file in find_ranks() if file.gang.startswith(gang)]
    chosen = [(folder, file) for folder, file in found if rank in (None, file.rank)]
    if not chosen:
        raise click.ClickException(
            f"no rank{'' if rank is None else f' {rank}'} of this user runs on this machine. Start the command on the "
            "rank's machine while the gang runs, as by kubectl exec -it POD -- daskpytorch attach"
        )
    lines = [
        f"rank {file.rank} of {file.gang} (pid {file.pid}) {f'waits: it {file.prompt}' if file.prompt else 'runs'}"
        for _, file in chosen
    ]
    if rank is None:
        click.echo("\n".join(lines))
        return
    waiting = [(folder, file) for folder, file in chosen if file.prompt]
    if len(waiting) > 1:
        raise click.ClickException("\n  ".join(["several gangs have that rank: choose one by --gang", *lines]))
    if not waiting:
        pid = chosen[0][1].pid
        raise click.ClickException(
            f"{', '.join(lines)}, and is in no debugger that this command opens. Its stacks: py-spy dump --pid {pid}"
        )
    if not has_terminal():
        raise click.ClickException("the rank's debugger needs a terminal as standard input")
    [(folder, file)] = waiting
    print(
        f"rank {rank} of {file.gang} {file.prompt}. `continue` lets it go on, and its next prompt comes here. "
        "Ctrl-] leaves it at its prompt. A terminal that is attached already keeps it until then.",
        flush=True,
    )
    has_left = False
    with contextlib.suppress(OSError):
        while not has_left:
            has_left = talk(folder, rank)
    print("\ndetached" if has_left else "\nthe rank has ended")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, or print help without one, and return the exit code. 2: a word cannot be used. 130: Ctrl-C."""
    try:
        return int(daskpytorch.main(arguments, prog_name="daskpytorch", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
