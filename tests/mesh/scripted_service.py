"""A service that does what its arguments say, in order: a stand-in for the supervisor's tests.

note FILE TEXT   append a line to a file     read FIFO        wait until somebody writes to the FIFO
exit CODE        end                         ignore-term      SIGTERM does nothing from now on
stay             run until told to end       child FILE       start a child in a session of its own, note its pid
say TEXT         print a line
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def append(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(text + "\n")


def main(words: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    queue = list(words)
    while queue:
        match queue.pop(0):
            case "note":
                append(queue.pop(0), queue.pop(0))
            case "read":
                Path(queue.pop(0)).read_text()
            case "exit":
                sys.exit(int(queue.pop(0)))
            case "ignore-term":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "say":
                sys.stdout.write(queue.pop(0) + "\n")
                sys.stdout.flush()
            case "child":
                sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
                child = subprocess.Popen(sleeper, start_new_session=True)
                append(queue.pop(0), str(child.pid))
            case "stay":
                while True:
                    signal.pause()


main(sys.argv[1:])
