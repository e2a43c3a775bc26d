"""Coordinates several processes as one program: start, agreement and exit.

The devices of all processes work on one training. Process 0 decides everything
else, such as the newest state, and broadcasts its decision. In one process every
function here returns at once.

Messages go through the coordination service that `jax.distributed` starts, never
through the devices. So a process may wait for another one for hours and still
answers SIGTERM. JAX's `multihost_utils` and the service's own barrier wait outside
of Python. If another process comes 10 s late, they answer SIGTERM after 10 s, and
`barrier` here after 0.1 s.
"""

import contextlib
import contextvars
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from synthq_jax.training import cluster, stopping

__all__ = [
  "Left",
  "alone",
  "announce",
  "barrier",
  "check_same",
  "count",
  "decided",
  "devices",
  "finish",
  "index",
  "is_loss",
  "is_main",
  "main_first",
  "own_devices",
  "start",
]

_Value = TypeVar("_Value")

_LEFT = "synthq/left"
# Beginnings of XLA's error messages, some of which come as a plain ValueError.
_STATUS = re.compile(
  "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL"
  "|UNAVAILABLE|UNKNOWN): "
)
_POLL_MS = 500
# Timeouts, in seconds, after which a process is ended by force, by exit code:
# after SIGTERM it may be saving a state, after an error a step may never end.
_PATIENCE = {stopping.EXIT_CODE: 120.0, 130: 120.0}
_IMPATIENCE = 5.0
_SIGNALS = {stopping.EXIT_CODE: signal.SIGTERM, 130: signal.SIGINT}


class Left(BaseException):  # noqa: N818
  """Raised if another process has left the program; this one did not fail."""

  def __init__(self, code: int):
    super().__init__(f"another process left with exit code {code}")
    self.code = code


class _Session:
  """Connects this process to the others, and watches for their exits."""

  def __init__(self, client: Any, index: int, count: int):
    self.client = client
    self.index = index
    self.count = count
    self.left: int | None = None
    self.finished = threading.Event()
    self.is_leaving = False
    self._calls = 0
    self._watcher = threading.Thread(target=self._watch, daemon=True)
    self._watcher.start()

  def make_key(self, name: str) -> str:
    """Returns a new key for each call, the same in all processes."""
    self._calls += 1
    return f"synthq/{self._calls}/{name}"

  def send(self, key: str, value: str) -> None:
    self.client.key_value_set(key, value)

  def receive(self, key: str) -> str:
    """Waits for a value, however long it takes.

    It polls in short calls, because Python handles no signal during a call.
    """
    while True:
      if self.left is not None:
        raise Left(self.left)
      try:
        return self.client.blocking_key_value_get(key, _POLL_MS)
      except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
          raise

  def close(self) -> None:
    self.finished.set()
    self._watcher.join()

  def _watch(self) -> None:
    """Ends this process after another one has left."""
    while not self.finished.wait(_POLL_MS / 1e3):
      try:
        code, who = map(int, self.client.key_value_try_get(_LEFT).split())
      except RuntimeError as error:
        if "NOT_FOUND" in str(error):
          continue
        return  # the service is gone: JAX itself ends this process
      if who != self.index and not self.is_leaving:
        self._follow(code)
      return

  def _follow(self, code: int) -> None:
    self.left = code
    # Act as if this process got the signal, but once: a second signal would not
    # wait for a saved state.
    if code in _SIGNALS and not stopping.was_signalled():
      os.kill(os.getpid(), _SIGNALS[code])
    if self.finished.wait(_PATIENCE.get(code, _IMPATIENCE)):
      return
    _shut_down()
    sys.stdout.flush()
    os._exit(code)  # the main thread waits for a step that never ends


_session: _Session | None = None
_is_alone: contextvars.ContextVar[bool] = contextvars.ContextVar(
  "is_alone", default=False
)


def start(settings: cluster.Settings) -> None:
  """Joins the other processes; call it before JAX creates its devices.

  Args:
    settings: settings by which the processes find each other.

  Raises:
    ValueError: if the processes do not find each other, or the backend is not
      the one that the settings ask for.
    stopping.Terminated, KeyboardInterrupt: if this process was told to stop
      meanwhile.
  """
  if settings.cpu_devices is not None or settings.mode != "none":
    import jax
  if settings.cpu_devices is not None:
    jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
    # XLA makes one thread per device, or NPROC threads. A device that waits in two
    # gathers at once takes two threads, and another device may never get one.
    threads = max(4 * settings.cpu_devices, os.cpu_count() or 1)
    os.environ.setdefault("NPROC", str(threads))
  if settings.mode == "none":
    return
  # JAX would catch SIGTERM itself, and this process would not notice it.
  if hasattr(jax.config, "jax_enable_preemption_service"):
    jax.config.update("jax_enable_preemption_service", False)
  # The others would wait for a process that joined and left without notice.
  with stopping.deferred() as get_request:
    _join(settings)
  if request := get_request():
    raise request
  settings.check_backend(jax.default_backend())


def _join(settings: cluster.Settings) -> None:
  """Connects to the other processes, and keeps the signal handlers."""
  global _session
  import jax

  handlers = {number: signal.getsignal(number) for number in _SIGNALS.values()}
  try:
    jax.distributed.initialize(**settings.arguments())
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f"--distributed={settings.mode}: the processes did not find each other"
      f" ({' '.join(str(error).split())}): {settings.hint()}"
    ) from error
  if threading.current_thread() is threading.main_thread():
    for number, handler in handlers.items():
      signal.signal(number, handler)
  if jax.process_count() > 1:
    # The only way to the coordination service; orbax takes it, too.
    from jax._src import distributed as jax_distributed

    client = jax_distributed.global_state.client
    _session = _Session(client, jax.process_index(), jax.process_count())


def announce(code: int) -> bool:
  """Broadcasts that this process leaves, so that the others leave, too.

  Args:
    code: the exit code of this process, not 0.

  Returns:
    Whether this process is the first to leave, and so should report the reason.
  """
  if _session is None:
    return True
  _session.is_leaving = True
  try:
    _session.send(_LEFT, f"{code} {_session.index}")
  except RuntimeError as error:
    return "ALREADY_EXISTS" not in str(error)
  return True


def is_loss(error: BaseException) -> bool:
  """Checks whether an error is due to another process that left during a step.

  Such a step fails as soon as the connection breaks, before the exit of the other
  process is announced.

  Args:
    error: any exception.
  """
  return _session is not None and bool(_STATUS.match(str(error)))


def finish(code: int) -> None:
  """Disconnects from the other processes; call it last, also after an error.

  Args:
    code: the exit code of this process; unless it is 0, the others end, too.
  """
  global _session
  if _session is None:
    return
  if code:
    announce(code)
  session, _session = _session, None
  session.close()
  _shut_down()


def _shut_down() -> None:
  """Disconnects after all other live processes have called this, too."""
  import jax

  with contextlib.suppress(RuntimeError):
    jax.distributed.shutdown()


def count() -> int:
  """Returns the number of processes that work together; 1 inside `alone`."""
  return 1 if _session is None or _is_alone.get() else _session.count


def index() -> int:
  """Returns the number of this process, from 0; 0 inside `alone`."""
  return _session.index if _session is not None and count() > 1 else 0


def is_main() -> bool:
  """Checks whether this is process 0, which writes results and messages."""
  return _session is None or _session.index == 0


def devices() -> list[Any]:
  """Returns the devices of all processes that work together."""
  import jax

  return jax.devices() if count() > 1 else jax.local_devices()


def own_devices() -> list[Any] | None:
  """Returns the accelerators of this process, to divide its own rows among them.

  On CPUs it returns None, for JAX's default device: the virtual devices share the
  cores.
  """
  import jax

  return None if jax.default_backend() == "cpu" else jax.local_devices()


@contextlib.contextmanager
def alone() -> Iterator[None]:
  """Makes this process work without the others, on its own devices, inside."""
  token = _is_alone.set(True)
  try:
    yield
  finally:
    _is_alone.reset(token)


def barrier(name: str) -> None:
  """Waits until every process has called it.

  Args:
    name: the name of the barrier, part of its key.

  Raises:
    Left: if another process has left the program.
  """
  if count() == 1:
    return
  key = _session.make_key(name)
  if _session.index:
    _session.send(f"{key}/{_session.index}", "here")
    _session.receive(f"{key}/all")
    return
  for other in range(1, _session.count):
    _session.receive(f"{key}/{other}")
  _session.send(f"{key}/all", "here")


def decided(name: str, make: Callable[[], _Value]) -> _Value:
  """Broadcasts a value that process 0 computes to every process.

  File systems and clocks differ between machines, so process 0 decides on every
  branch that all processes must take together.

  Args:
    name: the name of the decision, part of its key.
    make: returns a JSON value; called in process 0 alone.

  Raises:
    Left: if another process has left the program.
  """
  if count() == 1:
    return make()
  key = _session.make_key(name)
  if _session.index:
    return json.loads(_session.receive(key))
  value = make()
  _session.send(key, json.dumps(value))
  return value


def check_same(name: str, value: Any, hint: str) -> None:
  """Raises ValueError unless all processes have the same value.

  Args:
    name: the name of the value, in words.
    value: a JSON value without secrets.
    hint: advice that ends the message.

  Raises:
    ValueError: in a process whose value is not that of process 0.
    Left: if another process has left the program.
  """
  expected = decided(name, lambda: value)
  if json.loads(json.dumps(value)) != expected:
    raise ValueError(
      f"expected the {name} of process 0, got another in process {index()}:"
      f" {hint}"
    )


def main_first(name: str, make: Callable[[], _Value]) -> _Value:
  """Calls a function in process 0, then in all other processes.

  Args:
    name: the name of the result, part of its key.
    make: makes a file if it is missing, or reads it.

  Raises:
    Left: if another process has left the program.
  """
  if count() == 1:
    return make()
  value = make() if is_main() else None
  barrier(name)
  return value if is_main() else make()
