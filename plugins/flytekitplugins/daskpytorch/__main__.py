"""The command `daskpytorch`, also as `python -m flytekitplugins.daskpytorch`: a group of commands."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # `python -m` puts the working folder there, whose `distributed.py` is not Dask's

from collections.abc import Sequence
from importlib import import_module

import click

from flytekitplugins.daskpytorch.process.signals import EXIT_CODE

COMMANDS = {"run": "run_command", "attach": "attach_command", "show": "display.journal_file", "doctor": "doctor"}
"""Module of each command, by the name of the command, which is also the name of its function."""


class Commands(click.Group):
    """Group of commands whose modules are imported at their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"flytekitplugins.daskpytorch.{COMMANDS[cmd_name]}"), cmd_name)
        return command


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def daskpytorch(ctx: click.Context) -> None:
    """Train with PyTorch on this node or a Dask cluster. `daskpytorch COMMAND --help` lists a command's options."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, or print help without a word. Return the exit code.

    Exit code 2: a word of the command line cannot be used. 130: Ctrl-C.
    """
    try:
        return int(daskpytorch.main(arguments, prog_name="daskpytorch", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as abort:
        if isinstance(abort.__cause__, EOFError):  # click takes each EOFError of a command for a Ctrl-D at its prompt
            raise abort.__cause__ from None
        return EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
