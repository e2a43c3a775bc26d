"""One process needs nobody's consent; hosts_test.py has several."""

import pathlib

import hosts
import jax
import pytest

from synthq_jax.cli import main
from synthq_jax.training import cluster, distributed


class Session:
  """Stands for a program of two processes, of which this one is the second."""

  index, count, is_leaving = 1, 2, False

  def __init__(self):
    self.told = []

  def send(self, key, value):
    self.told.append((key, value))

  def close(self):
    self.told.append("closed")


@pytest.fixture(name="session")
def _session(monkeypatch):
  session = Session()
  monkeypatch.setattr(distributed, "_session", session)
  monkeypatch.setattr(distributed, "_shut_down", lambda: None)
  return session


def test_one_process_decides_alone_and_waits_for_nobody():
  distributed.start(cluster.Settings())
  assert (distributed.count(), distributed.index()) == (1, 0)
  assert distributed.is_main() and distributed.announce(2)
  assert distributed.decided("a", lambda: {"any": object}) == {"any": object}
  assert distributed.main_first("b", lambda: 3) == 3
  distributed.barrier("c")
  distributed.finish(2)
  assert distributed.devices() == jax.devices()


_DEVICES = """
import pathlib
import jax
from synthq_jax.training import cluster, distributed
distributed.start(cluster.Settings(cpu_devices=8))
assert jax.device_count() == 8
names = [x.read_text().strip() for x in pathlib.Path("/proc/self/task").glob("*/comm")]
print(names.count("tf_XLAEigen"))
"""


@pytest.mark.skipif(
  not pathlib.Path("/proc/self/task").is_dir(), reason="needs Linux's /proc"
)
def test_devices_of_one_cpu_do_not_starve_each_other_of_threads():
  threads = int(hosts.ended(hosts.start("-c", _DEVICES)).split()[-1])
  assert threads >= 32  # 8 without: two gathers of one took another's


def test_a_process_that_works_alone_has_its_own_devices(session):
  assert (distributed.count(), distributed.index()) == (2, 1)
  assert not distributed.is_main()
  with distributed.alone():
    assert (distributed.count(), distributed.index()) == (1, 0)
    assert distributed.decided("a", lambda: 1) == 1
    assert distributed.devices() == jax.local_devices()
    assert not distributed.is_main()  # it does not become another one
  assert distributed.count() == 2 and session.told == []


def test_a_step_that_another_process_deserted_is_no_mistake_of_the_user(
  session, monkeypatch
):
  lost = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed")
  assert distributed.is_loss(lost)
  assert not distributed.is_loss(
    ValueError("expected --gin_file=FILE, got none")
  )

  def desert(argv):
    raise lost

  monkeypatch.setattr(main, "_dispatch", desert)
  with pytest.raises(ValueError, match="Gloo"):  # 1 and not 2: start it again
    main.main([])
  assert session.told == [("synthq/left", "1 1"), "closed"]
  monkeypatch.setattr(distributed, "_session", None)
  with pytest.raises(ValueError, match="Gloo"):  # a library's own error
    main.main([])
  assert session.told == [("synthq/left", "1 1"), "closed"]  # nobody to tell
