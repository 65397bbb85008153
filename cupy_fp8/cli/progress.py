"""Shows a long command's progress on stderr: one line that is rewritten on a terminal, else plain lines."""

from __future__ import annotations

import sys
import time

_SECONDS_BETWEEN = (0.1, 5.0)       # on a terminal, elsewhere


class Progress:
    """Knows what is on the screen, and since when. Call `clear` before anything else is printed."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown_at = float("-inf")
        self._on_screen = False

    def show(self, text: str) -> None:
        """Shows the text, unless another one was shown a moment ago."""
        now = time.monotonic()
        if now - self._shown_at < _SECONDS_BETWEEN[not self._terminal]:
            return
        self._shown_at = now
        before, after = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{before}{text}", end=after, file=sys.stderr, flush=True)
        self._on_screen = self._terminal

    def clear(self) -> None:
        if self._on_screen:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._on_screen = False
