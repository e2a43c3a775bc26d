import errno
import logging.handlers
import signal
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from synthq_jax.training import checkpoints


class State(NamedTuple):
  params: dict
  step: jax.Array


def make(value):
  return State(
    params={
      "a": jnp.full((2, 3), value, jnp.float32),
      "b": [jnp.asarray(value, jnp.bfloat16), jnp.ones((1,), bool)],
    },
    step=jnp.asarray(int(value), jnp.int32),
  )


def names(directory):
  return sorted(path.name for path in directory.iterdir())


def test_a_state_comes_back_bit_for_bit(tmp_path):
  state = make(1 / 3)
  state.params["a"] = jnp.array([np.nan, -0.0, np.inf, 1e-45], jnp.float32)
  checkpoints.save(tmp_path, 4, state)
  loaded = checkpoints.restore(tmp_path, 4, jax.tree.map(jnp.zeros_like, state))
  assert jax.tree.structure(loaded) == jax.tree.structure(state)
  for old, new in zip(
    jax.tree.leaves(state), jax.tree.leaves(loaded), strict=True
  ):
    assert (new.shape, new.dtype) == (old.shape, old.dtype)
    assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


def test_the_newest_state_alone_stays(tmp_path):
  for step in (1, 9, 10):
    checkpoints.save(tmp_path, step, make(step))
    assert checkpoints.latest_step(tmp_path) == step
    assert names(tmp_path) == [f"files_{step}.json", f"step_{step}"]
  loaded = checkpoints.restore(tmp_path, 10, make(0))
  assert loaded.params["a"].tolist() == make(10).params["a"].tolist()


def test_a_step_can_be_saved_again(tmp_path):
  checkpoints.save(tmp_path, 3, make(1))
  checkpoints.save(tmp_path, 3, make(2))
  assert names(tmp_path) == ["files_3.json", "step_3"]
  assert checkpoints.restore(tmp_path, 3, make(0)).step == 2


def test_partial_states_and_other_files_are_ignored(tmp_path):
  checkpoints.save(tmp_path, 3, make(3))
  for name in (
    "step_7.orbax-checkpoint-tmp",
    "step_8.orbax-checkpoint-tmp-1234",
    "old_step_9",
    "step_",
  ):
    (tmp_path / name).mkdir()
  (tmp_path / "step_10").write_text("a file")
  assert checkpoints.latest_step(tmp_path) == 3
  checkpoints.save(tmp_path, 4, make(4))
  assert checkpoints.latest_step(tmp_path) == 4
  assert not (tmp_path / "step_3").exists()
  assert checkpoints.restore(tmp_path, 4, make(0)).step == 4


def big(value):
  """A state that takes longer to write than to copy."""
  return {"w": jnp.full((8_000_000,), value, jnp.float32)}


def test_buffers_may_be_used_again_while_a_state_is_written(tmp_path):
  again = jax.jit(lambda state: {"w": state["w"] + 1}, donate_argnums=0)
  on_host = np.zeros(8_000_000, np.float32)
  state = big(1)
  with checkpoints.Writer(tmp_path) as writer:
    writer.save(1, {"device": state, "host": on_host})
    on_host[:] = 7
    for _ in range(3):
      state = again(state)
    jax.block_until_ready(state)
  like = {"device": big(0), "host": np.zeros_like(on_host)}
  loaded = checkpoints.restore(tmp_path, 1, like)
  assert np.unique(loaded["device"]["w"]).tolist() == [1]
  assert np.unique(loaded["host"]).tolist() == [0]
  assert np.unique(state["w"]).tolist() == [4]


def test_an_error_in_the_background_is_raised_and_the_old_state_stays(
  tmp_path,
):
  import resource

  checkpoints.save(tmp_path, 1, make(1))
  told, shown = [], logging.handlers.BufferingHandler(1000)
  logging.getLogger("absl").addHandler(shown)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  writer = checkpoints.Writer(tmp_path)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
  try:
    with pytest.raises(Exception, match="(?i)file too large|step_2"):
      writer.save(2, noise(), lambda: told.append(2))
      writer.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logging.getLogger("absl").removeHandler(shown)
  assert told == []
  assert not [one for one in shown.buffer if one.exc_info]  # it was raised
  assert checkpoints.latest_step(tmp_path) == 1
  assert checkpoints.restore(tmp_path, 1, make(0)).step == 1
  writer.save(3, make(3), lambda: told.append(3))  # the next one may work
  writer.wait()
  assert told == [3] and checkpoints.latest_step(tmp_path) == 3


def test_a_full_disk_shows_nothing_but_its_error(tmp_path):
  """Neither orbax's threads nor tensorstore print what is raised."""
  script = f"""
import resource, signal, sys
import jax
from synthq_jax.training import checkpoints
sys.dont_write_bytecode = True  # else half a module stays for other tests
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
keys = jax.random.split(jax.random.key(0), 40)
state = {{str(i): jax.random.normal(key, (50_000,)) for i, key in enumerate(keys)}}
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for step in range(3):
  try:
    checkpoints.save({str(tmp_path)!r}, step, state)
  except OSError as error:
    print(error.errno)
"""
  done = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, check=True, text=True
  )
  assert done.stdout.split() == [str(errno.EFBIG)] * 3
  assert "Traceback" not in done.stderr and "ERROR" not in done.stderr
  assert checkpoints.latest_step(tmp_path) is None


def noise():
  """A large state that does not shrink when it is compressed."""
  return {"w": jax.random.normal(jax.random.key(0), (2_000_000,))}


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_leaves_the_older_state(tmp_path):
  script = f"""
import os, signal, sys
import jax
from synthq_jax.training import checkpoints
state = {{"w": jax.random.normal(jax.random.key(1), (30_000_000,))}}
writer = checkpoints.Writer({str(tmp_path)!r})
writer.save(1, {{"w": state["w"][:3]}})
writer.wait()
writer.save(2, state)
while not any(n.startswith("step_2") for n in os.listdir({str(tmp_path)!r})):
  pass
os.kill(os.getpid(), signal.SIGKILL)
"""
  done = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, check=False, text=True
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  began = [name for name in names(tmp_path) if name.startswith("step_2.")]
  assert len(began) == 1  # the second one was on its way
  assert checkpoints.latest_step(tmp_path) == 1
  like = {"w": jnp.zeros(3)}
  assert checkpoints.restore(tmp_path, 1, like)["w"].shape == (3,)
  checkpoints.save(tmp_path, 2, {"w": jnp.ones(3)})
  assert checkpoints.latest_step(tmp_path) == 2


@pytest.mark.parametrize("on_host", [False, True])
def test_a_state_goes_where_the_one_it_replaces_is(tmp_path, on_host):
  """From one mesh to another, or to NumPy's arrays."""
  devices = np.array(jax.devices())
  wide = jax.sharding.Mesh(devices.reshape(2, 4), ("data", "model"))
  flat = jax.sharding.Mesh(devices[:4], ("data",))
  values = np.arange(64, dtype=np.float32).reshape(8, 8)

  def on(mesh, *axes):
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.device_put(values, jax.sharding.NamedSharding(mesh, spec))

  checkpoints.save(tmp_path, 1, {"w": on(wide, "data", "model")})
  like = np.zeros_like(values) if on_host else on(flat, None, "data")
  found = checkpoints.restore(tmp_path, 1, {"w": like})["w"]
  assert np.array_equal(found, values)
  if on_host:
    assert isinstance(found, np.ndarray)
  else:
    assert found.sharding == like.sharding


def test_the_old_state_stays_until_the_new_one_is_complete(
  tmp_path, monkeypatch
):
  checkpoints.save(tmp_path, 1, make(1))

  def killed(path, **options):
    raise KeyboardInterrupt(path.name)

  with monkeypatch.context() as patch:
    patch.setattr(checkpoints, "_remove", killed)
    with pytest.raises(KeyboardInterrupt, match="step_1"):
      checkpoints.save(tmp_path, 2, make(2))
  assert checkpoints.latest_step(tmp_path) == 2
  for step in (1, 2):
    assert checkpoints.restore(tmp_path, step, make(0)).step == step
  checkpoints.save(tmp_path, 3, make(3))
  assert names(tmp_path) == ["files_3.json", "step_3"]


def test_a_bit_that_changed_in_a_state_is_found(tmp_path):
  """Also where nothing else would know: in the numbers themselves."""
  checkpoints.save(tmp_path, 4, make(4))
  files = [p for p in (tmp_path / "step_4").rglob("*") if p.is_file()]
  path = max(files, key=lambda p: (p.stat().st_size, p.name))
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)
  with pytest.raises(ValueError, match=rf"{path.name}.*delete {tmp_path}"):
    checkpoints.restore(tmp_path, 4, make(0))


def test_a_state_of_another_model_is_refused(tmp_path):
  checkpoints.save(tmp_path, 4, make(4))
  with pytest.raises(ValueError, match="expected a saved training state"):
    checkpoints.restore(tmp_path, 4, {"other": jnp.zeros(3)})


def test_a_failure_of_the_file_system_is_no_damaged_state(
  tmp_path, monkeypatch
):
  """Nobody is told to delete a state that may be whole."""
  state = {"w": jnp.arange(3.0)}
  checkpoints.save(tmp_path, 4, state)

  def fail(*args, **kwargs):
    raise OSError(errno.ESTALE, "Stale file handle")

  with monkeypatch.context() as patch:
    patch.setattr(ocp.StandardCheckpointer, "restore", fail)
    with pytest.raises(OSError, match="Stale file handle"):
      checkpoints.restore(tmp_path, 4, state)
  assert checkpoints.restore(tmp_path, 4, state)["w"][2] == 2
