"""What crosses the border of a process: who says what to whom, and when; and the interfaces of hosts and observers.

Runs in all processes. May import `process`, `settings`, `context` and `errors`.

    agent  ──▶ driver         `messages.FromAgent`; of its ranks their output and exits        TCP, one connection each
    driver ──▶ agent          `messages.ToAgent`                                               the same
    rank   ──▶ driver         `reports.Report`: how the function fares, and its results        a pipe to its agent, then
                                                                                               unopened, in `Reported`
    driver ──▶ all ranks      `orders.OrderToAll`                                              in `Tell`, then the pipe
    agent  ──▶ its ranks      `RankOrder`, before all else; `Arrived`, `Quit`                  the pipe
    agent  ◀─▶ driver         `Upload` or `Download`, and the bytes of a checkpoint            TCP, a connection a file
    rank   ──▶ rank 0         where each of them listens, in torch's `TCPStore`                TCP, one connection each

Where an agent reaches the driver's own folder, those bytes stay where they are: the file has a second name there
(`checkpoint_file`); and what is large in a return value is a file that the rank makes there (`segments`).

Everything is a frozen dataclass, pickled, and whoever receives it matches all there are; but for signs of life, which
need no pickle: an agent gathers those of its ranks, and says them in its `heartbeat`. On TCP it goes in frames
(`framing`), and nothing is unpickled before both ends have proved that they know the gang's token (`handshake`). A
driver listens, agents dial. On every way things arrive in the order in which they were sent. Nobody waits for an
answer: one that does not come is the end of a connection, or the silence of an agent that no longer beats.

The user's objects are bytes (`pickling`) to all but the ranks. `Start` brings each agent the project's sources
(`code`), in place of which it uses the driver's own files where these are; and of the driver's program what ranks are
to have of it (`program`).

Each agent opens a port, and says so in its `Hello`. The driver tells all ranks that of rank 0's agent, which hands the
socket on to rank 0: torch's store is there, a new one with each attempt. Who calls before it is open waits in the
socket's queue. So the driver needs neither torch nor a connection to each rank, and nobody can take the port meanwhile.

    driver                                    agent, one per node                       rank
      │ ◀─────────── dials, handshake ───────────│ ─── has it forked ───────────────────▶ │ waits
      │ ◀─────────── Hello(node, meets_at) ──────│                                        │
      │ all have come                            │                                        │
      │ ─── Start(job, code, places) ──────────▶ │ ─── RankOrder; rank 0's socket ──────▶ │ joins the process group
      │ ◀── Reported ─────────────────────────── │ ◀── Ready ──────────────────────────── │ runs the function
      │ ◀── Lines ────────────────────────────── │ ◀── output ─────────────────────────── │
      │ ◀── Reported ─────────────────────────── │ ◀── LogRecord, Hint, Piece ─────────── │ log, submit
      │ ◀── a heartbeat: signs of life ───────── │ ◀── how many signs of life ─────────── │ log, steps, and the like
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── Saved(file) ────────────────────── │ rank 0 has written it
      │ ─── Fetch(file) ───────────────────────▶ │                                        │
      │ ◀══ Upload(file), its bytes ════════════ │                                        │
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── ShardsWritten ──────────────────── │ each, its part: to storage
      │ all have, it is whole: ─── Tell ───────▶ │ ─── Settled(number) ─────────────────▶ │ writes what waits
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── Failure ────────────────────────── │ here or on another node
      │ ─── Stop ──────────────────────────────▶ │ ─── Quit ────────────────────────────▶ │ ends, or is killed
      │ ◀── Exited ───────────────────────────── │ ◀── its exit ───────────────────────── ╵
      │ all have ended, the file is here         │
      │ ─── Start(job, from the file) ─────────▶ │ ─── RankOrder ───────────────────────▶ ╷ another process
      │ ◀══ Download(file); its bytes ═════════▶ │ ─── Arrived ─────────────────────────▶ │ load returns
      │ ◀── Reported ─────────────────────────── │ ◀── Ready ──────────────────────────── │
      │                                          │                                        │
      │ a worker leaves: ─── Tell(Hold) ───────▶ │ ─── Hold ────────────────────────────▶ │ its next should_stop waits
      │ ◀── Reported ─────────────────────────── │ ◀── Held(num_calls) ────────────────── │
      │ ─── Tell(Release(last_call)) ──────────▶ │ ─── Release ─────────────────────────▶ │ all stop at the same call
      │ nothing moves: ─── Tell(Locate) ───────▶ │ ─── Locate ──────────────────────────▶ │
      │ ◀── Reported ─────────────────────────── │ ◀── Located(stacks) ────────────────── │
      │ ◀── Reported ─────────────────────────── │ ◀── Remembered(collectives) ────────── │ or, if it does not answer:
      │ ─── Dump(ranks) ───────────────────────▶ │ ─── signal ──────────────────────────▶ │ writes stacks to a file
      │ ◀── Stacks ───────────────────────────── │                                        │
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── Returned(value) ────────────────── │ waits for the others
      │ all have returned: ─── Tell(Leave) ────▶ │ ─── Leave ───────────────────────────▶ │
      │ ◀── Exited ───────────────────────────── │ ◀── its exit ───────────────────────── ╵
      │ ─── Close ─────────────────────────────▶ │ cleans up
      │ ◀── the connection's end ─────────────── ╵
"""
