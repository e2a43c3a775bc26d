"""Being told to stop: SIGTERM and Ctrl-C, at once or after the current step.

A machine that is taken away sends SIGTERM and waits a little. A training loop
uses that time to finish its step and save its state; everything else stops on
the spot, since whatever it wrote is either complete or ignored.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

__all__ = [
  "EXIT_CODE",
  "Terminated",
  "deferred",
  "flags",
  "raising",
  "wanted",
  "was_told",
]

EXIT_CODE = 143
"""What a process exits with after SIGTERM: 128 + 15, as shells say it."""


class Terminated(BaseException):  # noqa: N818
  """SIGTERM came; no Exception, so that nothing mistakes it for a failure."""


_RAISES = {signal.SIGTERM: Terminated, signal.SIGINT: KeyboardInterrupt}
_told = threading.Event()
_SOON = 0.05  # seconds


@contextlib.contextmanager
def raising() -> Iterator[None]:
  """Inside, SIGTERM raises `Terminated` wherever the program stands.

  Signals belong to the main thread: in another one this does nothing.
  """

  def stop(number, frame):
    _told.set()
    raise Terminated

  with _handlers({signal.SIGTERM: stop}):
    yield


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], BaseException | None]]:
  """Inside, the first SIGTERM or Ctrl-C waits for a good moment.

  Yields:
    A function to call at good moments: it returns what is to be raised, or
    None. A second signal raises at once.
  """
  asked: list[BaseException] = []

  def note(number, frame):
    _told.set()
    if asked:
      raise _RAISES[number]
    asked.append(_RAISES[number]())

  with _handlers(dict.fromkeys(_RAISES, note)):
    yield lambda: asked[0] if asked else None


def flags(asked: BaseException | None) -> tuple[bool, ...]:
  """Returns what `deferred` found as flags that processes can vote on.

  >>> flags(Terminated()), flags(None)
  ((True, False), (False, False))
  """
  return tuple(isinstance(asked, kind) for kind in _RAISES.values())


def was_told() -> bool:
  """Says whether a signal has come to this process inside one of the two."""
  return _told.is_set()


def wanted(flags: Sequence[bool]) -> BaseException | None:
  """Returns what is to be raised for such flags, or None."""
  raised = zip(flags, _RAISES.values(), strict=True)
  return next((kind() for flag, kind in raised if flag), None)


@contextlib.contextmanager
def _handlers(wanted) -> Iterator[None]:
  """Installs signal handlers, and brings the earlier ones back.

  What a handler raises inside of a finalizer Python drops: its signal comes again.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {number: signal.signal(number, wanted[number]) for number in wanted}
  hook = sys.unraisablehook
  sys.unraisablehook = functools.partial(_send_again, hook)
  try:
    yield
  finally:
    sys.unraisablehook = hook
    for number, handler in before.items():
      signal.signal(number, handler)


def _send_again(otherwise, dropped) -> None:
  """Sends the signal whose exception was dropped; what else was goes on."""
  for number, kind in _RAISES.items():
    if issubclass(dropped.exc_type, kind):
      again = threading.Timer(_SOON, os.kill, (os.getpid(), number))
      again.daemon = True
      again.start()
      return
  otherwise(dropped)
