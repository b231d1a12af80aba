"""An editor's side of the Debug Adapter Protocol, as far as a test needs it."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import until

Message = dict[str, Any]


class Editor:
    """Attached to a debugger at a port of this machine, once that listens."""

    def __init__(self, port: int) -> None:
        until(lambda: self._connects(port), f"a debugger at port {port}")
        self._file = self._socket.makefile("rb")
        self._num_asked = 0
        self.ask("initialize", adapterID="test", clientID="test", linesStartAt1=True, pathFormat="path")
        self._send("attach", justMyCode=True)
        self._wait_for("initialized")

    def _connects(self, port: int) -> bool:
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), timeout=200)
        except OSError:
            return False
        return True

    def break_at(self, file: Path, *lines: int) -> list[Message]:
        """Set these breakpoints in a file, and no others; what became of each."""
        asked = [{"line": line} for line in lines]
        found: list[Message] = self.ask("setBreakpoints", source={"path": str(file)}, breakpoints=asked)["breakpoints"]
        return found

    def begin(self) -> None:
        """Let the program run, now that the breakpoints are set."""
        self.ask("configurationDone")

    def stop(self) -> tuple[int, Message]:
        """Wait until the program stops: the thread, and its innermost frame."""
        thread = self._wait_for("stopped")["threadId"]
        return thread, self.ask("stackTrace", threadId=thread)["stackFrames"][0]

    def evaluate(self, frame: Message, expression: str) -> str:
        """What it is there."""
        return str(self.ask("evaluate", expression=expression, frameId=frame["id"])["result"])

    def close(self) -> None:
        """Detach."""
        self._socket.close()

    def ask(self, command: str, **arguments: Any) -> Message:
        """The answer to a request."""
        number = self._send(command, **arguments)
        answer = self._next(lambda message: message.get("request_seq") == number)
        assert answer["success"], answer
        return dict(answer.get("body") or {})

    def _wait_for(self, event: str) -> Message:
        return dict(self._next(lambda message: message.get("event") == event).get("body") or {})

    def _send(self, command: str, **arguments: Any) -> int:
        self._num_asked += 1
        request = {"seq": self._num_asked, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(request).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        return self._num_asked

    def _next(self, is_it: Callable[[Message], bool]) -> Message:
        while not is_it(message := self._read()):
            pass
        return message

    def _read(self) -> Message:
        length = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name == b"Content-Length" else length
        assert length, "the debugger has closed the connection"
        return dict(json.loads(self._file.read(length)))
