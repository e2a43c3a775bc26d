"""Working directories that share prepared data: one of them prepares it."""

import dataclasses
import stat

import numpy as np
import pytest
import small_data
import tiny_runs

from synthq_jax.runtime import results
from synthq_jax.stages import _prepared, plan, prepare_data
from synthq_jax.storage import artifacts


@pytest.fixture(name="prepared")
def _counted(monkeypatch):
  """The places that data was really prepared in."""
  places, prepare = [], prepare_data._prepare

  def counted(task):
    places.append(task.folders.root.name)
    return prepare(task)

  monkeypatch.setattr(prepare_data, "_prepare", counted)
  return places


def run(folder, name, **changes):
  """Prepares data in a working directory with a secret of its own."""
  log = folder / "log.jsonl"
  if not log.exists():
    small_data.write_pairs(log, 40)
  config = tiny_runs.config(f"jsonl:{log}", secret_seed=None)
  shared = str(folder / "private/prepared")
  settings = dataclasses.replace(
    config.prepare_data, shared_in=shared, **changes
  )
  config = dataclasses.replace(
    config, prepare_data=settings, public_data=False, secret_seed=None
  )
  plan.run(config, folder / name, stages=["prepare_data"])
  place = folder / name / results.PRIVATE / "prepare_data"
  artifacts.check(place)
  return artifacts.load(place, results.PreparedData)


def files(folder):
  return {
    path.relative_to(folder): path.read_bytes()
    for path in folder.rglob("*")
    if path.is_file() and "secret" not in path.name and ".lock" != path.name
  }


def test_runs_share_what_the_first_one_prepares(tmp_path, prepared):
  one = run(tmp_path, "one")
  two = run(tmp_path, "two")
  assert prepared == ["one"]
  assert dataclasses.replace(two, seconds=one.seconds) == one
  parts = ("prepare_data", "private/prepare_data")
  for part in parts:
    found, expected = (files(tmp_path / name / part) for name in ("two", "one"))
    assert found.keys() == expected.keys()
    for name in found:
      if name.name not in (artifacts.RESULT_NAME, artifacts.FILES_NAME):
        assert found[name] == expected[name], name
  secrets = [
    (tmp_path / name / "private/secret_seed").read_text()
    for name in ("one", "two")
  ]
  assert secrets[0] != secrets[1]


def test_other_settings_are_prepared_anew(tmp_path, prepared):
  run(tmp_path, "one")
  other = run(tmp_path, "two", document_length=12)
  again = run(tmp_path, "three", document_length=12)
  assert prepared == ["one", "two"]
  assert again.digest == other.digest
  assert again.document_length == 12


def test_what_is_shared_is_for_its_user_alone(tmp_path, prepared):
  run(tmp_path, "one")
  shared = tmp_path / "private/prepared"
  (copy,) = shared.iterdir()
  assert [stat.S_IMODE(p.stat().st_mode) for p in (shared, copy)] == [0o700] * 2


def test_a_copy_that_was_changed_is_refused(tmp_path, prepared):
  run(tmp_path, "one")
  (path,) = (tmp_path / "private/prepared").rglob("train.npz")
  with np.load(path) as held:
    arrays = dict(held)
  np.savez(path, **{name: values[::-1] for name, values in arrays.items()})
  with pytest.raises(ValueError, match=r"train\.npz"):
    run(tmp_path, "two")
  assert prepared == ["one"]


def test_a_copy_that_was_not_finished_is_not_taken(
  tmp_path, prepared, monkeypatch
):
  def killed(*args, **kwargs):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(_prepared.artifacts, "save", killed)
    with pytest.raises(KeyboardInterrupt):
      run(tmp_path, "one")
  run(tmp_path, "two")
  assert prepared == ["one", "two"]
