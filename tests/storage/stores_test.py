"""Mirrors of stores that are no file systems."""

import errno
import json
import os
import pathlib
import stat
import subprocess
import sys
import threading
import time

import loop_store
import made_up
import numpy as np
import pytest

from synthq_jax.cli import main
from synthq_jax.privacy import ledger
from synthq_jax.retrieval import vector_files
from synthq_jax.runtime import workspace
from synthq_jax.storage import artifacts, object_store, stores
from synthq_jax.training import checkpoints, loop

LEASE = 0.3


@pytest.fixture(name="server")
def _server(tmp_path, monkeypatch):
  monkeypatch.setenv("SYNTHQ_LEASE_SECONDS", str(LEASE))
  stores.keep_in(tmp_path / "mirror")
  stores.local.cache_clear()
  with loop_store.serving() as server:
    yield server
  stores.keep_in(None)


@pytest.fixture(name="url")
def _url(server):
  return f"{server.url}/b/run"


def changes(server):
  """What was put and deleted, in order, but for locks."""
  log = [line.replace("/b/run/", "") for line in server.log]
  return [line for line in log if ".lock" not in line]


def hold(url):
  """Has another process hold a store; returns it, and its lease is short."""
  code = (
    "import loop_store, sys, time\n"
    "from synthq_jax.storage import stores\n"
    "loop_store.register()\n"
    "with stores.mirrored(sys.argv[1]):\n"
    "  print('held', flush=True)\n"
    "  time.sleep(60)\n"
  )
  path = os.pathsep.join(
    map(
      str,
      (
        pathlib.Path(__file__).parents[1],
        pathlib.Path(loop_store.__file__).parent,
      ),
    )
  )
  process = subprocess.Popen(
    [sys.executable, "-c", code, url],
    env=os.environ | {"PYTHONPATH": path},
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "held\n"
  return process


# Files and objects.


def test_a_file_is_in_the_store_before_the_call_returns(server, url):
  with stores.mirrored(url) as root:
    artifacts.write_atomically(root / "a/x.txt", "one")
    assert server.objects["/b/run/a/x.txt"] == b"one"
    artifacts.write_atomically(root / "a/x.txt", "two")
    assert server.objects["/b/run/a/x.txt"] == b"two"
  artifacts.write_atomically(root / "a/x.txt", "three")  # it is closed
  assert server.objects["/b/run/a/x.txt"] == b"two"


def test_a_result_is_put_last_and_after_all_its_files(server, url):
  with stores.mirrored(url) as root:
    folder = root / "stage"
    folder.mkdir()
    for name in ("b.bin", "a.bin"):  # by a library that knows no stores
      (folder / name).write_bytes(b"content")
    artifacts.save(folder, {}, "digest", folders=[folder])
  first, second, *others = changes(server)
  assert {first, second} == {"PUT stage/a.bin", "PUT stage/b.bin"}
  assert others == [
    "PUT stage/files.json",
    "PUT stage/result.json",
  ]


def test_hidden_files_and_folders_stay_here(server, url):
  with stores.mirrored(url) as root:
    with artifacts.new_folder(root / "a/cache", "cache") as folder:
      artifacts.write_atomically(folder / "b/x", "x")
    artifacts.write_atomically(root / "a/.x", "x")
    assert not changes(server)
    artifacts.save(root / "a", {}, "digest", folders=[root / "a"])
  assert "PUT a/cache/b/x" in changes(server)
  assert not [name for name in server.names("/b/run/a/") if "/." in f"/{name}"]


def test_an_object_that_would_lie_outside_of_the_mirror_is_refused(server, url):
  server.objects["/b/run/../../../x"] = b"x"
  with pytest.raises(ValueError, match="the name of a file"):
    with stores.mirrored(url):
      pass


def test_what_is_removed_is_gone_from_the_store(server, url):
  with stores.mirrored(url) as root:
    for name in ("a/x", "a/y/z", "ab/x"):
      artifacts.write_atomically(root / name, name)
    artifacts.remove(root / "a")
    artifacts.remove(root / "none")
    assert not (root / "a").exists() and (root / "ab/x").exists()
  assert server.names("/b/run/")[1:] == ["ab/x"]


def test_another_machine_finds_what_was_put_and_nothing_else(
  server, url, tmp_path
):
  with stores.mirrored(url) as root:
    artifacts.write_atomically(root / "private/a b#[1].txt", "ä")
    artifacts.write_atomically(root / "empty", b"")
    (root / "half").write_text("of a run that is killed now")
  for place in (tmp_path / "other", tmp_path / "mirror"):
    stores.keep_in(place)
    with stores.mirrored(url) as again:
      found = {p.relative_to(again).as_posix() for p in again.rglob("*.*")}
      assert found == {"private/a b#[1].txt"}
      assert (again / "private/a b#[1].txt").read_text() == "ä"
      assert (again / "empty").read_bytes() == b""
      assert not (again / "half").exists()


def test_a_file_that_the_store_has_otherwise_is_downloaded_anew(server, url):
  with stores.mirrored(url) as root:
    artifacts.write_atomically(root / "same", "same")
    artifacts.write_atomically(root / "other", "one")
  (root / "other").write_text("two")
  before = (root / "same").stat().st_ino
  with stores.mirrored(url) as root:
    assert (root / "other").read_text() == "one"
    assert (root / "same").stat().st_ino == before


def test_nobody_else_may_read_a_mirror(server, url):
  before = os.umask(0)
  try:
    with stores.mirrored(url, private_in_bucket=True) as root:
      workspace.Workspace(root)
      artifacts.write_atomically(root / "a", "a")
    (root / "a").unlink()
    (root / "private/secret_seed").unlink()
    with stores.mirrored(url, private_in_bucket=True) as root:
      modes = [root / "a", root / "private/secret_seed"]
      assert {stat.S_IMODE(p.stat().st_mode) for p in modes} == {0o600}
      workspace.Workspace(root, may_draw=False)
    assert stat.S_IMODE(root.parents[1].stat().st_mode) == 0o700
  finally:
    os.umask(before)


def test_a_store_that_cannot_be_reached_stops_the_run_for_a_while(server, url):
  with stores.mirrored(url) as root:
    server.is_down = True
    with pytest.raises(OSError, match="503") as caught:
      artifacts.write_atomically(root / "a", "a")
    server.is_down = False
  assert caught.value.errno == errno.EIO  # launchers start it again


# One run at a time.


def test_two_processes_never_share_a_mirror(server, url, monkeypatch):
  monkeypatch.setattr(object_store.Lease, "_wait_for", lambda self, n: None)
  with stores.mirrored(url) as root:
    (root / "half").write_text("not put yet")
    for opened in (
      lambda: stores.mirrored(url).__enter__(),
      lambda: stores.local(url),
    ):
      with pytest.raises(ValueError, match="give another --mirror"):
        opened()
    assert (root / "half").exists()


def test_a_second_run_is_refused_while_the_first_renews(server, url, tmp_path):
  with stores.mirrored(url):
    stores.keep_in(tmp_path / "other")
    began = time.monotonic()
    with pytest.raises(ValueError, match="one that process .* uses"):
      with stores.mirrored(url):
        pass
    assert time.monotonic() - began < 2 * LEASE
  with stores.mirrored(url):  # free at once
    pass
  assert server.names("/b/run/.lock/") == ["000001", "000002"]


def test_a_killed_run_is_followed_once_its_lease_ran_out(server, url, capfd):
  process = hold(url)
  with pytest.raises(ValueError, match=f"process {process.pid} on .* uses"):
    with stores.mirrored(url):
      pass
  process.kill()
  process.wait()
  began = time.monotonic()
  with stores.mirrored(url) as root:
    assert time.monotonic() - began > 2 * LEASE
    artifacts.write_atomically(root / "a", "a")
  assert f"last held by process {process.pid}" in capfd.readouterr().err
  assert server.names("/b/run/.lock/") == ["000001", "000002"]


def test_of_many_that_take_over_one_does(server, url):
  process = hold(url)
  process.kill()
  process.wait()
  ends, done = [], threading.Event()

  def follow():
    try:
      lease = object_store.Lease(object_store.Store(url), LEASE)
      ends.append("held")
      done.wait()
      lease.release()
    except ValueError:
      ends.append("refused")

  threads = [threading.Thread(target=follow) for _ in range(6)]
  for thread in threads:
    thread.start()
  while len(ends) < 6:
    time.sleep(0.01)
  done.set()
  for thread in threads:
    thread.join()
  assert sorted(ends) == ["held"] + ["refused"] * 5


def test_a_run_that_lost_its_lease_puts_and_deletes_nothing(server, url):
  with stores.mirrored(url) as root:
    artifacts.write_atomically(root / "a", "first")
    # As if this process had stood still while another one took over.
    taken = json.dumps({"owner": "another", "lease": LEASE, "free": False})
    server.objects["/b/run/.lock/000002"] = taken.encode()
    time.sleep(2 * LEASE)
    before = changes(server)
    for act in (
      lambda: artifacts.write_atomically(root / "a", "second"),
      lambda: artifacts.remove(root / "a"),
      lambda: stores.add(root / "ledger.jsonl", b"line\n"),
    ):
      with pytest.raises(OSError, match="another run has taken over") as caught:
        act()
      assert caught.value.errno == errno.ESTALE
    assert changes(server) == before
  assert server.objects["/b/run/.lock/000002"] == taken.encode()


def test_a_renewal_that_comes_late_counts_if_nobody_took_over(server, url):
  with stores.mirrored(url) as root:
    server.is_down = True
    time.sleep(2 * LEASE)
    server.is_down = False
    artifacts.write_atomically(root / "a", "a")
  assert server.objects["/b/run/a"] == b"a"


def test_a_file_system_that_writes_over_objects_is_refused(
  server, url, monkeypatch
):
  def pipe_file(self, path, value, mode="overwrite", **kwargs):
    self._ask("PUT", path, value)

  monkeypatch.setattr(loop_store.LoopFileSystem, "pipe_file", pipe_file)
  with pytest.raises(ValueError, match="only if there is none"):
    with stores.mirrored(url):
      pass


# Secrets and the ledger.


def test_a_secret_in_a_store_needs_the_word_of_the_user(server, url):
  with stores.mirrored(url) as root:
    with pytest.raises(ValueError, match="agree with --private_in_bucket"):
      workspace.Workspace(root)
    workspace.Workspace(root, secret_seed=3)  # the settings', of public data
  assert not [n for n in server.objects if "secret" in n]
  with stores.mirrored(url, private_in_bucket=True) as root:
    first = workspace.Workspace(root).seed("noise")
  with stores.mirrored(url) as root:  # also to read it
    with pytest.raises(ValueError, match="agree with --private_in_bucket"):
      workspace.Workspace(root)
  with stores.mirrored(url, private_in_bucket=True) as root:
    assert workspace.Workspace(root).seed("noise") == first


def test_a_secret_is_never_put_over_another(server, url):
  with stores.mirrored(url, private_in_bucket=True) as root:
    server.objects["/b/run/private/secret_seed"] = b"another"
    with pytest.raises(OSError, match="another run has written this"):
      workspace.Workspace(root)
    assert not (root / "private/secret_seed").exists()
  assert server.objects["/b/run/private/secret_seed"] == b"another"


def enter(root, name):
  statement = made_up.claim(name)
  ledger.enter(root / "private" / ledger.NAME, name, statement)


def test_a_ledger_is_one_object_for_each_training(server, url):
  for name in ("one", "two", "two", "three"):
    with stores.mirrored(url) as root:
      enter(root, name)
  lines = "private/ledger.jsonl.lines/"
  names = server.names(f"/b/run/{lines}")
  assert names == ["000001", "000002", "000003"]
  with stores.mirrored(url) as root:
    path = root / "private" / ledger.NAME
    assert list(ledger.read(path)) == ["one", "two", "three"]
    assert path.read_bytes() == ledger.copy_of(path).read_bytes()
  text = ledger.describe(stores.local(f"{url}/private/ledger.jsonl"))
  assert "together (3)" in text


def test_a_holder_that_lost_the_store_cannot_write_over_a_training(
  server, url, monkeypatch
):
  # Both believe that they hold it: what nobody can rule out, see `Lease`.
  monkeypatch.setattr(object_store.Lease, "check", lambda self: None)
  monkeypatch.setattr(
    object_store.Lease, "_wait_for", lambda self, number: None
  )
  with stores.mirrored(url) as late:
    stores.keep_in(late.parents[3] / "other")
    with stores.mirrored(url) as root:
      enter(root, "one")
      before = dict(server.objects)
      with pytest.raises(OSError, match="another run has written this"):
        enter(late, "late")
    assert {k: v for k, v in server.objects.items() if "ledger" in k} == {
      k: v for k, v in before.items() if "ledger" in k
    }


def test_a_training_that_the_store_lost_is_missed(server, url):
  with stores.mirrored(url) as root:
    for name in ("one", "two"):
      enter(root, name)
  last = server.objects.pop("/b/run/private/ledger.jsonl.lines/000002")
  with stores.mirrored(url) as root:
    with pytest.raises(ValueError, match="expected the 2 trainings"):
      ledger.read(root / "private" / ledger.NAME)
  server.objects["/b/run/private/ledger.jsonl.lines/000002"] = last
  del server.objects["/b/run/private/ledger.jsonl.lines/000001"]
  with pytest.raises(ValueError, match="lines/000001: expected the addition"):
    with stores.mirrored(url):
      pass


def test_blocks_that_are_linked_or_no_longer_needed_are_so_in_the_store(
  server, url
):
  """A kill lost the linked ones, and another machine got the others again."""
  with stores.mirrored(url) as root:
    old = vector_files.files(root / "vectors_a")
    for number in range(3):
      old.write(number, np.ones((2, 2)), made_of="encoder tokens")
    vector_files.link_blocks(old.directory, root / "vectors_b", 4, block_rows=2)
    linked = ["block_00000.npy", "block_00000.sha256", "block_00001.npy",
              "block_00001.sha256"]  # fmt: skip
    assert sorted(server.names("/b/run/vectors_b/")) == linked
    vector_files.shorten(old.directory, 2, block_rows=2)
    assert sorted(server.names("/b/run/vectors_a/")) == linked[:2]


# States of trainings.


def test_a_state_counts_once_its_listing_is_there(server, url):
  state = {"w": np.arange(3.0)}
  with stores.mirrored(url) as root:
    for step in (1, 2):
      checkpoints.save(root / "state", step, state)
  names = server.names("/b/run/state/")
  assert "files_2.json" in names and not [
    n for n in names if "1" in n.split("/")[0]
  ]
  puts = [line for line in changes(server) if line.startswith("PUT")]
  assert puts[-1] == "PUT state/files_2.json"
  with stores.mirrored(url) as root:
    assert checkpoints.latest_step(root / "state") == 2
    found = checkpoints.restore(root / "state", 2, state)
    np.testing.assert_array_equal(found["w"], state["w"])
  del server.objects["/b/run/state/files_2.json"]  # killed before it was put
  with stores.mirrored(url) as root:
    assert checkpoints.latest_step(root / "state") is None


def test_lines_of_metrics_are_in_the_store_before_a_state_names_them(
  server, url
):
  with stores.mirrored(url) as root:
    log = loop.Log(root / "metrics.jsonl", 0)
    log.write(1, {"loss": 2.0})
    log.sync()
    assert json.loads(server.objects["/b/run/metrics.jsonl"])["loss"] == 2.0


# The command line.


def test_inputs_under_a_url_are_downloaded_once(server, tmp_path):
  server.objects["/in/cqadupstack/android/corpus.jsonl"] = b"{}"
  server.objects["/in/log.csv"] = b"query,document\n"
  folder = pathlib.Path(stores.local(f"{server.url}/in/cqadupstack/android/"))
  assert folder.parts[-2:] == ("cqadupstack", "android")
  assert [p.name for p in folder.iterdir()] == ["corpus.jsonl"]
  path = pathlib.Path(stores.local(f"{server.url}/in/log.csv"))
  assert path.name == "log.csv" and path.read_bytes() == b"query,document\n"
  server.is_down = True
  assert stores.local(f"{server.url}/in/log.csv") == str(path)
  server.is_down = False
  with pytest.raises(FileNotFoundError, match="nothing lies there"):
    stores.local(f"{server.url}/in/none")


def test_what_a_run_would_make_is_said_before_the_bucket_has_anything(
  server, url, capsys
):
  argv = ["run", "--gin_file=demo_tiny.gin", f"--workdir={url}", "--dry_run"]
  assert main.main(argv) == 0
  assert "prepare_data" in capsys.readouterr().out
  assert not server.objects


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (["run", "--gin_file=demo_tiny.gin"], "agree with --private_in_bucket"),
    (["study", "--gin_file=images.gin"], "study works in a folder"),
  ],
)
def test_a_wrong_use_of_a_url_ends_in_one_line(url, capsys, argv, words):
  flag = "--gin.SECRET_SEED=None"
  flags = [flag] if argv[0] == "run" else []
  assert main.main([*argv, f"--workdir={url}", *flags]) == 2
  assert words in capsys.readouterr().err
