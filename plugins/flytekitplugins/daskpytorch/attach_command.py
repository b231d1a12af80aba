"""Command that lists the ranks of running gangs, shows a rank's stacks, and opens its debugger: `daskpytorch attach 1`.

Runs in the user's terminal. The driver of each gang answers, after both have proved that they know the gang's token.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import click

from flytekitplugins.daskpytorch.command_line import call_on_each_host, scheduler_option
from flytekitplugins.daskpytorch.driver.own_terminal import CONNECT_TIMEOUT, LEAVE, connect, raw_mode, relay, write
from flytekitplugins.daskpytorch.protocol.attaching import (
    DriverContact,
    Left,
    Listing,
    Look,
    RankPlace,
    Shown,
    find_contacts,
)
from flytekitplugins.daskpytorch.protocol.messages import Close

INTERRUPT = b"\x03"
"""Byte that a terminal in raw mode sends for Ctrl-C."""


@dataclass
class Gang:
    """A running gang, as its driver has described it."""

    contact: DriverContact
    listing: Listing

    def place_of(self, rank: int) -> RankPlace | None:
        """Return a rank's place in the list. None: the gang has no such rank now."""
        return next((place for place in self.listing.ranks if place.rank == rank), None)

    @property
    def id(self) -> str:
        """Id that tells the gang from others of the same function."""
        return hashlib.sha256(self.contact.token).hexdigest()[:16]

    @property
    def title(self) -> str:
        """Name, id and size of the gang."""
        return f"{self.listing.gang} ({self.id[:8]}), {len(self.listing.ranks)} ranks"


@click.command()
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
    with raw_mode(0):
        farewell = _talk(gang.contact, rank)
    print(f"\n{farewell}")


def _talk(contact: DriverContact, rank: int) -> str:
    """Pass keys to the rank's debugger, and show its output, until the user leaves. Return a text about the end."""
    is_at_prompt = True
    with contextlib.suppress(EOFError, OSError), contextlib.closing(connect(contact)) as connection:
        for said in relay(0, 1, connection, rank):
            match said:
                case Shown():
                    is_at_prompt = True
                case Left(steps=False):
                    is_at_prompt = False
                    write(
                        1,
                        b"\n(the rank has left the debugger. Its next prompt comes here; Ctrl-] or Ctrl-C leaves)\n",
                    )
                case Close():
                    return "the gang has ended"
                case bytes() if not said or LEAVE in said or (INTERRUPT in said and not is_at_prompt):
                    return "detached; the rank waits on for a terminal" if is_at_prompt else "detached"
    return "the gang's driver has ended"


# ---- finding gangs


def _gangs(contacts: Iterable[DriverContact], look: Look) -> Iterator[Gang]:
    """Yield the gangs whose drivers answer."""
    for contact in sorted(contacts, key=lambda contact: contact.address):
        try:
            with contextlib.closing(connect(contact)) as connection:
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
    return gang.listing.gang.split(".")[-1] == name or gang.listing.gang == name or gang.id.startswith(name)


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
