"""Several processes as one program: started, in agreement, ended together.

Devices of all processes work on one training; everything else (which result is
there, which state is the newest, when to stop) process 0 decides and the others
are told. In one process every function here returns at once.

What is said goes through the coordination service that `jax.distributed`
starts, never through the devices: a process that waits for another one may wait
for hours, and still answers SIGTERM. JAX's `multihost_utils` and the
service's own barrier wait outside of Python: where another process came 10 s
late, they answered SIGTERM after 10 s, and `barrier` here after 0.1 s.
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
# How the errors of XLA begin, some of which come as a plain ValueError.
_STATUS = re.compile(
  "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL"
  "|UNAVAILABLE|UNKNOWN): "
)
_POLL_MS = 500
# Seconds until a process that does not end by itself is ended: after SIGTERM it
# may be saving a state, after an error it may be stuck in a step for ever.
_PATIENCE = {stopping.EXIT_CODE: 120.0, 130: 120.0}
_IMPATIENCE = 5.0
_SIGNALS = {stopping.EXIT_CODE: signal.SIGTERM, 130: signal.SIGINT}


class Left(BaseException):  # noqa: N818
  """Another process has left the program; no failure of this one."""

  def __init__(self, code: int):
    super().__init__(f"another process left with exit code {code}")
    self.code = code


class _Session:
  """What this process knows of the others."""

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

  def key(self, name: str) -> str:
    """Returns a key of its own for each call, the same in all processes."""
    self._calls += 1
    return f"synthq/{self._calls}/{name}"

  def tell(self, key: str, value: str) -> None:
    self.client.key_value_set(key, value)

  def ask(self, key: str) -> str:
    """Waits for a value, however long it takes.

    In short calls: while one lasts, Python handles no signal.
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
    """Ends this process when another one has left."""
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
    # As if it had been told, too; a second signal would not wait for a state.
    if code in _SIGNALS and not stopping.was_told():
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
  """Joins the other processes; to be called before JAX has made its devices.

  Args:
    settings: how they find each other.

  Raises:
    ValueError: if they cannot, or the devices are not those asked for.
    stopping.Terminated, KeyboardInterrupt: if this process was told to stop
      meanwhile.
  """
  if settings.cpu_devices is not None or settings.mode != "none":
    import jax
  if settings.cpu_devices is not None:
    jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
    # XLA makes as many threads as devices, or as NPROC says. A device that waits in
    # two gathers at once takes two of them, and another then never gets its own.
    threads = max(4 * settings.cpu_devices, os.cpu_count() or 1)
    os.environ.setdefault("NPROC", str(threads))
  if settings.mode == "none":
    return
  # JAX would take SIGTERM for itself, and this process would not hear of it.
  if hasattr(jax.config, "jax_enable_preemption_service"):
    jax.config.update("jax_enable_preemption_service", False)
  # One that has joined and leaves without a word would be waited for.
  with stopping.deferred() as asked:
    _join(settings)
  if told := asked():
    raise told
  settings.check_backend(jax.default_backend())


def _join(settings: cluster.Settings) -> None:
  """Connects to the other processes, and keeps what signals do here."""
  global _session
  import jax

  handlers = {one: signal.getsignal(one) for one in _SIGNALS.values()}
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
  """Tells the others that this process leaves, so that they do.

  Args:
    code: what it exits with, not 0.

  Returns:
    Whether this one is the first, and so the one that says why.
  """
  if _session is None:
    return True
  _session.is_leaving = True
  try:
    _session.tell(_LEFT, f"{code} {_session.index}")
  except RuntimeError as error:
    return "ALREADY_EXISTS" not in str(error)
  return True


def is_loss(error: BaseException) -> bool:
  """Says whether an error is that of a step which another process deserted.

  Such a step fails as soon as the connection breaks, before anybody has said
  that the other one is gone.

  Args:
    error: of any kind.
  """
  return _session is not None and bool(_STATUS.match(str(error)))


def finish(code: int) -> None:
  """Leaves the others: to be called last, whatever happened.

  Args:
    code: what this process exits with; unless it is 0 the others end, too.
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
  """Waits for the others and parts from them; one that died is not waited for."""
  import jax

  with contextlib.suppress(RuntimeError):
    jax.distributed.shutdown()


def count() -> int:
  """Returns how many processes work together here."""
  return 1 if _session is None or _is_alone.get() else _session.count


def index() -> int:
  """Returns the number of this process among them, from 0."""
  return _session.index if _session is not None and count() > 1 else 0


def is_main() -> bool:
  """Says whether this process writes results and talks to the user."""
  return _session is None or _session.index == 0


def devices() -> list[Any]:
  """Returns the devices of all processes that work together here."""
  import jax

  return jax.devices() if count() > 1 else jax.local_devices()


def own_devices() -> list[Any] | None:
  """Returns the accelerators of this process for rows of its own.

  None, for JAX's default device, on a CPU: its virtual devices share the cores.
  """
  import jax

  return None if jax.default_backend() == "cpu" else jax.local_devices()


@contextlib.contextmanager
def alone() -> Iterator[None]:
  """Inside, this process works without the others: on its own devices."""
  token = _is_alone.set(True)
  try:
    yield
  finally:
    _is_alone.reset(token)


def barrier(name: str) -> None:
  """Waits until every process is here.

  Args:
    name: of the place, for people who look at the keys.

  Raises:
    Left: if another process has left the program.
  """
  if count() == 1:
    return
  key = _session.key(name)
  if _session.index:
    _session.tell(f"{key}/{_session.index}", "here")
    _session.ask(f"{key}/all")
    return
  for other in range(1, _session.count):
    _session.ask(f"{key}/{other}")
  _session.tell(f"{key}/all", "here")


def decided(name: str, make: Callable[[], _Value]) -> _Value:
  """Returns what process 0 makes of it, in every process.

  File systems and clocks differ between machines, so a branch that all have to
  take together is decided once.

  Args:
    name: of the question.
    make: returns a JSON value; called in process 0 alone.

  Raises:
    Left: if another process has left the program.
  """
  if count() == 1:
    return make()
  key = _session.key(name)
  if _session.index:
    return json.loads(_session.ask(key))
  value = make()
  _session.tell(key, json.dumps(value))
  return value


def check_same(what: str, value: Any, hint: str) -> None:
  """Refuses to go on where processes differ in what has to be the same.

  Args:
    what: in words.
    value: a JSON value that tells nothing secret.
    hint: what to do.

  Raises:
    ValueError: in a process whose value is not that of process 0.
    Left: if another process has left the program.
  """
  expected = decided(what, lambda: value)
  if json.loads(json.dumps(value)) != expected:
    raise ValueError(
      f"expected the {what} of process 0, got another in process {index()}:"
      f" {hint}"
    )


def main_first(name: str, make: Callable[[], _Value]) -> _Value:
  """Calls in every process what process 0 has called before the others.

  Args:
    name: of what is made.
    make: makes a file where it is missing, or reads it.

  Raises:
    Left: if another process has left the program.
  """
  if count() == 1:
    return make()
  value = make() if is_main() else None
  barrier(name)
  return value if is_main() else make()
