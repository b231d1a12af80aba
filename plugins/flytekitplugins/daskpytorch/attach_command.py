"""Command that lists the ranks on this machine, and opens a rank's debugger: `daskpytorch attach 1`.

Runs in the user's terminal. The rank itself answers, at a socket that only its user can reach.
"""

import click

from flytekitplugins.daskpytorch.protocol.debugging import USER, find_ranks, has_terminal, talk


@click.command(short_help="Open the debugger of a rank on this machine, or list the ranks.")
@click.option("--gang", default="", metavar="ID", help="only gangs whose id begins so")
@click.argument("rank", type=int, required=False)
def attach(gang: str, rank: int | None) -> None:
    """Open the debugger of a rank on this machine in this terminal. Without RANK, list your ranks on this machine.

    A rank waits for a terminal at breakpoint(), and after an exception with --on-error hold. Exit code 1 if RANK does
    not wait, or there is no rank.
    """
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
        "Ctrl-] leaves it at its prompt.",
        flush=True,
    )
    try:
        has_left = talk(folder, rank, USER)
    except OSError as error:
        raise click.ClickException(f"rank {rank} has left its debugger: {error}") from error
    print("\ndetached" if has_left else "\nthe rank has ended or goes on, or another terminal was attached to it")
