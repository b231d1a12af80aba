"""Command that lists the ranks of running gangs, shows a rank's stacks, and opens its debugger: `daskpytorch attach 1`.

Runs in the user's terminal. The driver of each gang answers, after both have proved that they know the gang's token.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import termios
import tty
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import click

from flytekitplugins.daskpytorch.command_line import call_on_each_host, scheduler_option
from flytekitplugins.daskpytorch.protocol.attaching import (
    Attach,
    DriverContact,
    Left,
    Listing,
    Look,
    RankPlace,
    Shown,
    Typed,
    find_contacts,
)
from flytekitplugins.daskpytorch.protocol.framing import Connection, introduce, watch_peer
from flytekitplugins.daskpytorch.protocol.messages import Close

CONNECT_TIMEOUT = 10.0
"""Timeout, in seconds, for each driver to answer."""
LEAVE, INTERRUPT = b"\x1d", b"\x03"
"""Bytes that a terminal in raw mode sends for Ctrl-] and Ctrl-C."""
READ_SIZE = 1 << 12


@dataclass
class Gang:
    """A running gang, as its driver has described it."""

    contact: DriverContact
    listing: Listing

    def place_of(self, rank: int) -> RankPlace | None:
        """Return a rank's place in the list. None: the gang has no such rank now."""
        return next((place for place in self.listing.ranks if place.rank == rank), None)

    @property
    def title(self) -> str:
        """Name, id and size of the gang."""
        return f"{self.listing.gang} ({self.listing.id}), {len(self.listing.ranks)} ranks"


@click.command(short_help="List the ranks of running gangs, or open a rank's debugger.")
@scheduler_option("gangs on the workers of this Dask scheduler (default: gangs on this machine)")
@click.option("--gang", "name", metavar="NAME", help="only the gang of this function, or with this id")
@click.argument("rank", type=int, required=False)
def attach(scheduler: str | None, name: str | None, rank: int | None) -> None:
    """List the ranks of running gangs: host, step, and the line of the user's code.

    With RANK, open the rank's debugger in this terminal if the rank waits at breakpoint(), else print its stacks. Exit
    code 1 if there is no such gang or rank.
    """
    contacts = set().union(*call_on_each_host(scheduler, find_contacts)) if scheduler else find_contacts()
    gangs = [gang for gang in _gangs(contacts, Look(rank)) if name is None or _is_named(gang, name)]
    if not gangs:
        named = f" named {name!r}" if name else ""
        where = f"on the workers of {scheduler}" if scheduler else "of this user on this machine"
        raise click.ClickException(
            f"no gang{named} runs {where}. Start the command while the gang runs, as the same user; for gangs on a "
            "Dask cluster, on the machine of a worker, or with --scheduler ADDRESS"
        )
    if rank is None:
        click.echo("\n\n".join(_table(gang) for gang in gangs))
    else:
        _attach(gangs, rank)


def _attach(gangs: Sequence[Gang], rank: int) -> None:
    """Open the rank's debugger in this terminal if it waits for one, else print the rank's stacks."""
    having = [(gang, place) for gang in gangs if (place := gang.place_of(rank)) is not None]
    chosen = [found for found in having if found[1].awaits] or having
    if len(chosen) != 1:
        told = (
            f"{len(chosen)} gangs have a rank {rank}: choose one by --gang" if chosen else f"no gang has a rank {rank}"
        )
        raise click.ClickException(told + "".join(f"\n  {gang.title}" for gang in gangs))
    [(gang, place)] = chosen
    print(f"rank {rank} of {gang.listing.gang} ({place.host}) {place.state}")
    if not place.awaits:
        print(place.stack or "(no stacks: the rank did not answer)")
        return
    if not (os.isatty(0) and os.isatty(1)):
        raise click.ClickException("the rank's debugger needs a terminal as standard input and output")
    print("Ctrl-] leaves the rank at its prompt. `continue` lets the rank go on.", flush=True)
    with _raw_mode():
        farewell = _talk(gang.contact, rank)
    print(f"\n{farewell}")


def _talk(contact: DriverContact, rank: int) -> str:
    """Pass keys to the rank's debugger, and show its output, until the user leaves. Return a text about the end."""
    try:
        with contextlib.closing(_connect(contact)) as connection:
            return _relay(connection, rank)
    except (EOFError, OSError):
        return "the gang's driver has ended"


def _relay(connection: Connection, rank: int) -> str:
    is_at_prompt, size = True, None
    while True:
        if (now := shutil.get_terminal_size()) != size:
            size = now
            connection.send(Attach(rank, (size.lines, size.columns)))
        ready, _, _ = select.select([0, connection.fileno()], [], [])
        if connection.fileno() in ready:
            match connection.recv():
                case Shown(data):
                    is_at_prompt = True
                    _write(data)
                case Left():
                    is_at_prompt = False
                    _write(
                        b"\r\n(the rank has left the debugger. Its next prompt comes here; Ctrl-] or Ctrl-C leaves)\r\n"
                    )
                case Close():
                    return "the gang has ended"
        if 0 in ready:
            keys = os.read(0, READ_SIZE)
            if not keys or LEAVE in keys or (INTERRUPT in keys and not is_at_prompt):
                return "detached; the rank waits on for a terminal" if is_at_prompt else "detached"
            connection.send(Typed(rank, keys))


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Switch the terminal to raw mode in the block: the rank's pseudo-terminal does echo and line editing."""
    settings = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, settings)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


# ---- finding gangs


def _connect(contact: DriverContact) -> Connection:
    sock = socket.create_connection(contact.address, timeout=CONNECT_TIMEOUT)
    watch_peer(sock)
    return introduce(sock, contact.token)


def _gangs(contacts: Iterable[DriverContact], look: Look) -> Iterator[Gang]:
    """Yield the gangs whose drivers answer."""
    for contact in sorted(contacts, key=lambda contact: contact.address):
        try:
            with contextlib.closing(_connect(contact)) as connection:
                connection.limit_sends(CONNECT_TIMEOUT)
                connection.send(look)
                listing = connection.recv()
        except (OSError, EOFError) as error:
            click.echo(
                f"the driver at {':'.join(map(str, contact.address))} does not answer: {error}. If its gang runs, "
                "start the command where workers run, as by kubectl exec -it POD -- daskpytorch attach",
                err=True,
            )
            continue
        if isinstance(listing, Listing):  # else the gang is ending
            yield Gang(contact, listing)


def _is_named(gang: Gang, name: str) -> bool:
    return gang.listing.gang.split(".")[-1] == name or name in (gang.listing.gang, gang.listing.id)


def _table(gang: Gang) -> str:
    """Return a gang's ranks as lines of text."""
    rows = [("rank", "host", "step", "state", "line")]
    rows += [
        (str(place.rank), place.host, "-" if place.step is None else str(place.step), place.state, place.line)
        for place in gang.listing.ranks
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([gang.title, *(lines if gang.listing.ranks else ["the gang waits for its workers"])])
