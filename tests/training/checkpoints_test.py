from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    assert names(tmp_path) == [f"step_{step}"]
  loaded = checkpoints.restore(tmp_path, 10, make(0))
  assert loaded.params["a"].tolist() == make(10).params["a"].tolist()


def test_a_step_can_be_saved_again(tmp_path):
  checkpoints.save(tmp_path, 3, make(1))
  checkpoints.save(tmp_path, 3, make(2))
  assert names(tmp_path) == ["step_3"]
  assert checkpoints.restore(tmp_path, 3, make(0)).step == 2


def test_nothing_saved_has_no_step(tmp_path):
  assert checkpoints.latest_step(tmp_path) is None
  assert checkpoints.latest_step(tmp_path / "nowhere") is None


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


def test_the_old_state_stays_until_the_new_one_is_complete(
  tmp_path, monkeypatch
):
  checkpoints.save(tmp_path, 1, make(1))

  def killed(path):
    raise KeyboardInterrupt(path.name)

  with monkeypatch.context() as patch:
    patch.setattr(checkpoints, "_remove", killed)
    with pytest.raises(KeyboardInterrupt, match="step_1"):
      checkpoints.save(tmp_path, 2, make(2))
  assert checkpoints.latest_step(tmp_path) == 2
  for step in (1, 2):
    assert checkpoints.restore(tmp_path, step, make(0)).step == step
  checkpoints.save(tmp_path, 3, make(3))
  assert names(tmp_path) == ["step_3"]


def test_a_save_that_dies_leaves_the_old_state(tmp_path, monkeypatch):
  import orbax.checkpoint as ocp

  checkpoints.save(tmp_path, 1, make(1))
  seen = []

  def killed(self):
    del self
    seen.extend(names(tmp_path))
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(ocp.StandardCheckpointer, "wait_until_finished", killed)
    with pytest.raises(KeyboardInterrupt):
      checkpoints.save(tmp_path, 2, make(2))
  assert "step_1" in seen
  assert checkpoints.restore(tmp_path, 1, make(0)).step == 1


def test_a_removal_that_dies_takes_the_state_out_of_sight_first(
  tmp_path, monkeypatch
):
  import shutil

  checkpoints.save(tmp_path, 1, make(1))

  def killed(path):
    raise KeyboardInterrupt(path.name)

  with monkeypatch.context() as patch:
    patch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt, match="old_step_1"):
      checkpoints._remove(tmp_path / "step_1")
  assert checkpoints.latest_step(tmp_path) is None


@pytest.mark.parametrize("left", [0, 0.5])
def test_a_damaged_state_says_what_to_delete(tmp_path, left):
  checkpoints.save(tmp_path, 4, make(4))
  for path in (tmp_path / "step_4").rglob("*"):
    if path.is_file():
      path.write_bytes(path.read_bytes()[: int(path.stat().st_size * left)])
  with pytest.raises(ValueError, match=f"step_4.*delete {tmp_path}"):
    checkpoints.restore(tmp_path, 4, make(0))


def test_a_state_of_another_model_is_refused(tmp_path):
  checkpoints.save(tmp_path, 4, make(4))
  with pytest.raises(ValueError, match="expected a saved training state"):
    checkpoints.restore(tmp_path, 4, {"other": jnp.zeros(3)})
