"""Messages between the processes of a gang: driver, agents and ranks. Also the interfaces of hosts and observers.

Runs in all processes. May import `process`, `settings`, `context`, `records` and `errors`.

    agent  ──▶ driver         `messages.FromAgent`, with its ranks' output and exits           TCP, one connection each
    driver ──▶ agent          `messages.ToAgent`                                               the same
    rank   ──▶ driver         `messages.Report`: the function's progress and results           a pipe to its agent, then
                                                                                               unopened, in `Reported`
    driver ──▶ all ranks      `messages.OrderToAll`                                            in `Tell`, then the pipe
    agent  ──▶ its ranks      `RankOrder` first, then `Answer` and `Quit`                      the pipe
    rank   ◀─▶ driver         `Upload` or `Download`, and the bytes of a file, from elsewhere   TCP, a connection a file
    rank   ──▶ rank 0         its listening address, in torch's `TCPStore`                     TCP, one connection each

On the driver's machine, ranks write and read checkpoints in the driver's folder. Elsewhere checkpoints travel
(`rank.link`), and so do large calls to every node. Large return values come in pieces.

The driver listens and agents connect. Each end unpickles only after both have proved knowledge of the gang's token
(`framing`). No end waits for an answer: a missing one shows as a closed connection, or as an agent without heartbeats.
The user's objects are bytes to all processes but the ranks.

Each agent opens a port and names it in its `Hello`. Rank 0 opens torch's store on its agent's socket, a new store for
each attempt. Ranks that connect earlier wait in the socket's queue, and no other process can take the port.

    driver                                    agent, one per node                       rank
      │ ◀─────────── dials, handshake ───────────│ ─── forks the rank ──────────────────▶ │ waits
      │ ◀─────────── Hello(node, meets_at) ──────│                                        │
      │ all have come                            │                                        │
      │ ─── Start(job, code, places) ──────────▶ │ ─── RankOrder; rank 0's socket ──────▶ │ joins the process group
      │ ◀── Reported ─────────────────────────── │ ◀── Ready ──────────────────────────── │ runs the function
      │ ◀── Lines ────────────────────────────── │ ◀── output ─────────────────────────── │
      │ ◀── Reported ─────────────────────────── │ ◀── LogRecord, Noted, Piece ────────── │ log, submit
      │ ◀── a heartbeat: signs of life ───────── │ ◀── how many signs of life ─────────── │ log, steps and others
      │                                          │                                        │
      │ ◀══ from elsewhere: Upload(file), its bytes ═════════════════════════════════════ │ rank 0 has saved
      │ ◀── Reported ─────────────────────────── │ ◀── Written ────────────────────────── │
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── Written ────────────────────────── │ rank 0: shards in storage
      │ committed: ─────────────── Tell ───────▶ │ ─── Kept(checkpoints) ───────────────▶ │ checkpoint.list()
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── Failure ────────────────────────── │ on any node
      │ ─── Stop ──────────────────────────────▶ │ ─── Quit ────────────────────────────▶ │ ends, or is killed
      │ ◀── RankExit ─────────────────────────── │ ◀── its exit ───────────────────────── ╵
      │ all have ended, the file is lent         │
      │ ─── Start(job, from the file) ─────────▶ │ ─── RankOrder ───────────────────────▶ ╷ a new process
      │ ◀══ to elsewhere: Download(name); its bytes, once a node ═══════════════════════▶ │ load returns
      │ ◀── Reported ─────────────────────────── │ ◀── Ready ──────────────────────────── │
      │                                          │                                        │
      │ a worker leaves: ─── Tell(Ask(HOLD)) ──▶ │ ─── Ask ─────────────────────────────▶ │ next should_stop blocks
      │ ◀── Reported ─────────────────────────── │ ◀── Answer(number of calls) ────────── │
      │ ─── Tell(Release(last_call)) ──────────▶ │ ─── Release ─────────────────────────▶ │ all stop at the same call
      │ nothing moves: ─── Tell(Ask(STACKS)) ──▶ │ ─── Ask ─────────────────────────────▶ │
      │ ◀── Reported ─────────────────────────── │ ◀── Answer(stacks) ─────────────────── │
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── Returned(value) ────────────────── │ waits for the others
      │ all have returned: ─── Tell(Leave) ────▶ │ ─── Leave ───────────────────────────▶ │
      │ ◀── RankExit ─────────────────────────── │ ◀── its exit ───────────────────────── ╵
      │ ─── Close ─────────────────────────────▶ │ cleans up
      │ ◀── the connection's end ─────────────── ╵
"""
