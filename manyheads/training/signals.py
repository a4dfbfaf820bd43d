"""Signals that stop a run: the first ends it after the current piece of work, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# exit status by the reason for which a run ended, a field of [train] or a signal; 75 is EX_TEMPFAIL, "run it again"
EXIT_STATUS = {"steps": 0, "stop_at": 0, "patience": 0, "interrupted": 130, "terminated": 75}


class StopSignal:
    """Records SIGINT, SIGTERM and SIGHUP; calling it returns "interrupted", "terminated" or None.

    A second SIGINT or SIGTERM stops at once. A SIGHUP never is that second signal, because a terminal that is closed,
    its shell and the system's logout each send one. Before the first call there is nothing to save, so the first signal
    stops at once, with the exit status of its reason.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.was_polled = self.stop_requested = False

    def __call__(self) -> str | None:
        self.was_polled = True
        return self.reason

    def handle(self, number: int, _: Any) -> None:
        reason = "interrupted" if number == signal.SIGINT else "terminated"
        if self.was_polled and (number == signal.SIGHUP or not self.stop_requested):
            self.reason = self.reason or reason
            self.stop_requested = number != signal.SIGHUP or self.stop_requested
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            raise SystemExit(128 + number if self.was_polled else EXIT_STATUS[reason])


@contextmanager
def handle_signals() -> Iterator[StopSignal]:
    """Catches the signals inside the block, and restores the handlers at its end.

    A signal that is already ignored stays ignored, as under `nohup` and for `command &` in a script. Only the
    main thread of a program can catch signals.
    """
    should_stop = StopSignal()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    in_main = threading.current_thread() is threading.main_thread()
    old_handlers = {
        number: handler for number, handler in handlers.items() if in_main and handler is not signal.SIG_IGN
    }
    for number in old_handlers:
        signal.signal(number, should_stop.handle)
    try:
        yield should_stop
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
