"""SIGTERM and Ctrl-C: now, or when the step is done."""

import os
import signal
import sys
import threading
import time

import pytest

from synthq_jax.training import stopping


def test_sigterm_raises_where_the_program_stands():
  before = signal.getsignal(signal.SIGTERM)
  with pytest.raises(stopping.Terminated):
    with stopping.raising():
      os.kill(os.getpid(), signal.SIGTERM)
      raise AssertionError("went on")
  assert signal.getsignal(signal.SIGTERM) is before


class Last:
  """Gets the signal in its finalizer, whose exceptions Python drops."""

  def __del__(self):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)


def test_a_signal_in_a_finalizer_is_not_lost():
  hook = sys.unraisablehook
  with pytest.raises(stopping.Terminated):
    with stopping.raising():
      Last()
      time.sleep(30)
      raise AssertionError("went on")
  assert sys.unraisablehook is hook


@pytest.mark.parametrize(
  ("number", "kind"),
  [
    (signal.SIGTERM, stopping.Terminated),
    (signal.SIGINT, KeyboardInterrupt),
  ],
)
def test_a_deferred_signal_waits_and_a_second_one_does_not(number, kind):
  done = []
  with pytest.raises(kind):
    with stopping.deferred() as asked:
      assert asked() is None
      os.kill(os.getpid(), number)
      done.append("the step")
      assert isinstance(asked(), kind)
      os.kill(os.getpid(), number)
      raise AssertionError("went on")
  assert done == ["the step"]


def test_other_threads_are_left_alone():
  found = []

  def work():
    with stopping.raising(), stopping.deferred() as asked:
      found.append(asked())

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert found == [None]
