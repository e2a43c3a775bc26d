"""Handles SIGTERM and Ctrl-C, at once or after the current step.

A preempted machine sends SIGTERM and waits a little. A training loop uses that
time to finish its step and save its state. All other code stops on the spot, since
its files are either complete or ignored.
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
  "make_exception",
  "make_flags",
  "raising",
  "was_signalled",
]

EXIT_CODE = 143
"""The exit code of a process after SIGTERM: 128 + 15, as in shells."""


class Terminated(BaseException):  # noqa: N818
  """Raised by SIGTERM; not an Exception, so no handler takes it for a failure."""


_RAISES = {signal.SIGTERM: Terminated, signal.SIGINT: KeyboardInterrupt}
_signalled = threading.Event()
_RESEND_SECONDS = 0.05


@contextlib.contextmanager
def raising() -> Iterator[None]:
  """Makes SIGTERM raise `Terminated` at any point of the program, inside.

  Only the main thread handles signals: in another thread this does nothing.
  """

  def stop(number, frame):
    _signalled.set()
    raise Terminated

  with _install_handlers({signal.SIGTERM: stop}):
    yield


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], BaseException | None]]:
  """Defers the first SIGTERM or Ctrl-C until the caller asks for it, inside.

  Yields:
    A function that returns the exception to raise, or None. A second signal
    raises at once.
  """
  requests: list[BaseException] = []

  def note(number, frame):
    _signalled.set()
    if requests:
      raise _RAISES[number]
    requests.append(_RAISES[number]())

  with _install_handlers(dict.fromkeys(_RAISES, note)):
    yield lambda: requests[0] if requests else None


def make_flags(request: BaseException | None) -> tuple[bool, ...]:
  """Converts a deferred exception to flags that processes can vote on.

  >>> make_flags(Terminated()), make_flags(None)
  ((True, False), (False, False))
  """
  return tuple(isinstance(request, kind) for kind in _RAISES.values())


def was_signalled() -> bool:
  """Checks whether `raising` or `deferred` caught a signal in this process."""
  return _signalled.is_set()


def make_exception(flags: Sequence[bool]) -> BaseException | None:
  """Returns the exception to raise for flags of `make_flags`, or None."""
  raised = zip(flags, _RAISES.values(), strict=True)
  return next((kind() for flag, kind in raised if flag), None)


@contextlib.contextmanager
def _install_handlers(handlers) -> Iterator[None]:
  """Installs signal handlers, and restores the earlier ones afterwards.

  Python drops an exception that a handler raises inside a finalizer. Then the
  signal is sent again.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {
    number: signal.signal(number, handler)
    for number, handler in handlers.items()
  }
  hook = sys.unraisablehook
  sys.unraisablehook = functools.partial(_send_again, hook)
  try:
    yield
  finally:
    sys.unraisablehook = hook
    for number, handler in before.items():
      signal.signal(number, handler)


def _send_again(previous_hook, dropped) -> None:
  """Sends a dropped signal again; passes other exceptions to the earlier hook."""
  for number, kind in _RAISES.items():
    if issubclass(dropped.exc_type, kind):
      timer = threading.Timer(_RESEND_SECONDS, os.kill, (os.getpid(), number))
      timer.daemon = True
      timer.start()
      return
  previous_hook(dropped)
