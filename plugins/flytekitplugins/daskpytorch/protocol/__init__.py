"""Messages between the processes of a gang: driver, agents and ranks. Also the interfaces of hosts and observers.

Runs in all processes. May import `process`, `settings`, `context`, `records` and `errors`.

    agent  ──▶ driver         `messages.FromAgent`, with its ranks' output and exits           TCP, one connection each
    driver ──▶ agent          `messages.ToAgent`                                               the same
    rank   ──▶ driver         `messages.Report`: the function's progress and results           a pipe to its agent, then
                                                                                               unopened, in `Reported`
    driver ──▶ all ranks      `messages.OrderToAll`                                            in `Tell`, then the pipe
    agent  ──▶ its ranks      `RankOrder` first, then `Answer` and `Quit`                      the pipe
    agent  ◀─▶ driver         `Upload` or `Download`, and the bytes of a checkpoint            TCP, a connection a file
    rank   ──▶ rank 0         its listening address, in torch's `TCPStore`                     TCP, one connection each

If an agent can reach the driver's own folder, checkpoints do not travel. The file gets a hard link there
(`checkpoints`). A large return value is a file that the rank writes to that folder (`payload`).

Messages are frozen dataclasses, pickled, and the receiver matches on all their types. Signs of life are the exception:
an agent gathers its ranks' signs of life and sends them unpickled in its heartbeat. Over TCP, messages travel in
frames (`framing`). Each end unpickles messages only after both have proved knowledge of the gang's token.
The driver listens and agents connect. Each connection keeps the order of its messages. No end waits for an answer. A
missing answer shows as a closed connection, or as an agent without heartbeats.

The user's objects are bytes (`pickling`) to all processes but the ranks, also the call (`function`). `Start` brings
each agent the project's sources and the state of the driver's program (`code`). The agent uses the driver's
own source files if it can reach them.

Each agent opens a port and names the port in its `Hello`. The driver tells all ranks the port of rank 0's agent, which
passes the socket on to rank 0. Rank 0 opens torch's store on the socket, a new store for each attempt. Ranks that
connect earlier wait in the socket's queue. So the driver needs no torch and no connections to ranks, and no other
process can take the port.

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
      │ ◀── Reported ─────────────────────────── │ ◀── CheckpointFile ─────────────────── │ rank 0 has saved
      │ ─── Fetch(file) ───────────────────────▶ │                                        │
      │ ◀══ Upload(file), its bytes; or Sent ═══ │                                        │
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── WrittenShards ──────────────────── │ rank 0: shards in storage
      │ committed: ─────────────── Tell ───────▶ │ ─── Kept(checkpoints) ───────────────▶ │ checkpoint.list()
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── Failure ────────────────────────── │ on any node
      │ ─── Stop ──────────────────────────────▶ │ ─── Quit ────────────────────────────▶ │ ends, or is killed
      │ ◀── Exited ───────────────────────────── │ ◀── its exit ───────────────────────── ╵
      │ all have ended, file received            │
      │ ─── Start(job, from the file) ─────────▶ │ ─── RankOrder ───────────────────────▶ ╷ a new process
      │ ◀══ Download(file); its bytes ═════════▶ │ ─── Answer ──────────────────────────▶ │ load returns
      │ ◀── Reported ─────────────────────────── │ ◀── Ready ──────────────────────────── │
      │                                          │                                        │
      │ a worker leaves: ─── Tell(Ask(HOLD)) ──▶ │ ─── Ask ─────────────────────────────▶ │ next should_stop blocks
      │ ◀── Reported ─────────────────────────── │ ◀── Answer(number of calls) ────────── │
      │ ─── Tell(Release(last_call)) ──────────▶ │ ─── Release ─────────────────────────▶ │ all stop at the same call
      │ nothing moves: ─── Tell(Ask(STACKS)) ──▶ │ ─── Ask ─────────────────────────────▶ │
      │ ◀── Reported ─────────────────────────── │ ◀── Answer(stacks) ─────────────────── │ or, without an answer:
      │ ─── Dump(ranks) ───────────────────────▶ │ ─── signal ──────────────────────────▶ │ writes stacks to a file
      │ ◀── Stacks ───────────────────────────── │                                        │
      │                                          │                                        │
      │ ◀── Reported ─────────────────────────── │ ◀── Returned(value) ────────────────── │ waits for the others
      │ all have returned: ─── Tell(Leave) ────▶ │ ─── Leave ───────────────────────────▶ │
      │ ◀── Exited ───────────────────────────── │ ◀── its exit ───────────────────────── ╵
      │ ─── Close ─────────────────────────────▶ │ cleans up
      │ ◀── the connection's end ─────────────── ╵
"""
