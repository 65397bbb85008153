"""Shows a long command's progress on stderr: with rich on a terminal, else as a plain line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

from . import terminal

_SECONDS_BETWEEN = 5.0              # between plain lines


class Progress:
    """What a command is doing. Call `clear` before anything else is printed; `printed` also delays the next
    plain line."""

    def __init__(self) -> None:
        self._console = terminal.rich_console(sys.stderr)
        self._status: Any = None
        self._shown_at = float("-inf")

    def show(self, text: str) -> None:
        """Show the text, with a spinner; as a plain line only after some seconds without output."""
        if self._console is not None:
            from rich.text import Text

            if self._status is None:
                self._status = self._console.status(Text(text))
                self._status.start()
            self._status.update(Text(text, overflow="ellipsis", no_wrap=True))
        elif time.monotonic() - self._shown_at >= _SECONDS_BETWEEN:
            self._shown_at = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def printed(self) -> None:
        self.clear()
        self._shown_at = time.monotonic()
