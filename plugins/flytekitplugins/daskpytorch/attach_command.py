"""Command that lists the ranks of running gangs, shows a rank's stacks, and opens its debugger: `daskpytorch attach 1`.

Runs in the user's terminal. The driver of each gang answers, after both have proved that they know the gang's token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import select
import shutil
import socket
import sys
import termios
import tty
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE

CONNECT_TIMEOUT = 10.0
"""Timeout, in seconds, for the Dask scheduler and for each driver to answer."""
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
    def id(self) -> str:
        """Id that tells the gang from others of the same function."""
        return hashlib.sha256(self.contact.token).hexdigest()[:16]

    @property
    def title(self) -> str:
        """Name, id and size of the gang."""
        return f"{self.listing.gang} ({self.id[:8]}), {len(self.listing.ranks)} ranks"


def main(words: Sequence[str]) -> int:
    """List ranks, or attach to the rank that the words of the command line name. Return exit code 1 without one."""
    options = _parser().parse_args(words)
    where = f"on the workers of {options.scheduler}" if options.scheduler else "of this user on this machine"
    try:
        contacts = _contacts_of(options.scheduler) if options.scheduler else find_contacts()
    except OSError as error:
        return _refuse(
            f"the scheduler at {options.scheduler} does not answer: {error}. Check the address, and the scheduler's log"
        )
    found = _gangs(contacts, Look(options.rank))
    gangs = [gang for gang in found if options.gang is None or _is_named(gang, options.gang)]
    if not gangs:
        named = f" named {options.gang!r}" if options.gang else ""
        return _refuse(
            f"no gang{named} runs {where}. Start the command while the gang runs, as the same user; for gangs on a "
            "Dask cluster, on the machine of a worker, or with --scheduler ADDRESS"
        )
    if options.rank is None:
        print("\n\n".join(_table(gang) for gang in gangs))
        return 0
    return _attach(gangs, options.rank)


def _attach(gangs: Sequence[Gang], rank: int) -> int:
    """Open the rank's debugger in this terminal if it waits for one, else print the rank's stacks."""
    having = [(gang, place) for gang in gangs if (place := gang.place_of(rank)) is not None]
    chosen = [found for found in having if found[1].awaits] or having
    if len(chosen) != 1:
        told = (
            f"{len(chosen)} gangs have a rank {rank}: choose one by --gang" if chosen else f"no gang has a rank {rank}"
        )
        return _refuse(told + "".join(f"\n  {gang.title}" for gang in gangs))
    [(gang, place)] = chosen
    print(f"rank {rank} of {gang.listing.gang} ({place.host}) {place.state}")
    if not place.awaits:
        print(place.stack or "(no stacks: the rank did not answer)")
        return 0
    if not (os.isatty(0) and os.isatty(1)):
        return _refuse("the rank's debugger needs a terminal as standard input and output")
    print("Ctrl-] leaves the rank at its prompt. `continue` lets the rank go on.", flush=True)
    with _raw_mode():
        farewell = _talk(gang.contact, rank)
    print(f"\n{farewell}")
    return 0


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


def _contacts_of(scheduler: str) -> set[DriverContact]:
    """Return the drivers of all gangs on the workers of a Dask cluster."""
    from distributed import Client

    from flytekitplugins.daskpytorch.dask.cluster import identity

    with Client(scheduler, timeout=CONNECT_TIMEOUT) as client:
        workers = identity(client, CONNECT_TIMEOUT)["workers"]
        one_of_each_host = {worker["host"]: address for address, worker in workers.items()}
        found: dict[str, set[DriverContact]] = client.run(_find_on_worker, workers=list(one_of_each_host.values()))
        return set().union(*found.values())


async def _find_on_worker() -> set[DriverContact]:
    """In a Dask worker: find contacts in a thread, so that the worker's event loop stays free."""
    return await asyncio.to_thread(find_contacts)


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
            print(
                f"the driver at {':'.join(map(str, contact.address))} does not answer: {error}. If its gang runs, "
                "start the command where workers run, as by kubectl exec -it POD -- daskpytorch attach",
                file=sys.stderr,
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


def _refuse(text: str) -> int:
    print(f"daskpytorch attach: {text}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="daskpytorch attach",
        description="Lists the ranks of running gangs: host, step, and the line of the user's code. With RANK, opens "
        "the rank's debugger in this terminal if the rank waits at breakpoint(), else prints its stacks. Exit code 1 "
        "if there is no such gang or rank.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        default=os.environ.get(SCHEDULER_VARIABLE) or None,
        help=f"gangs on the workers of this Dask scheduler (default: ${SCHEDULER_VARIABLE}, else on this machine)",
    )
    parser.add_argument("--gang", metavar="NAME", help="only the gang of this function, or with this id")
    parser.add_argument("rank", metavar="RANK", type=int, nargs="?", help="rank to attach to (default: list all ranks)")
    return parser
