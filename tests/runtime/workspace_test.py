import contextlib
import os
import re
import stat

import jax
import made_up
import pytest

from synthq_jax.privacy import ledger
from synthq_jax.runtime import workspace
from synthq_jax.stages import plan
from synthq_jax.storage import artifacts

PURPOSES = ("batches", "noise", "noise 1", "generate", "")


def test_the_secret_is_drawn_once_and_used_again(tmp_path):
  first = workspace.Workspace(tmp_path / "run")
  path = tmp_path / "run" / "private" / "secret_seed"
  text = path.read_text()
  assert re.fullmatch("[0-9a-f]{32} [0-9a-f]{8}\n", text)
  again = workspace.Workspace(tmp_path / "run")
  assert path.read_text() == text
  assert again.seed("noise") == first.seed("noise")


def test_only_the_owner_may_read_the_secret(tmp_path):
  before = os.umask(0)  # the most careless of users
  try:
    with contextlib.suppress(
      ValueError
    ):  # one that others read is refused, too
      workspace.Workspace(tmp_path)
  finally:
    os.umask(before)
  path = tmp_path / "private" / "secret_seed"
  assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_private_is_hidden_also_where_it_was_there_before(tmp_path):
  private = tmp_path / "private"
  private.mkdir(mode=0o755)  # by hand, or out of a backup
  workspace.Workspace(tmp_path)
  assert stat.S_IMODE(private.stat().st_mode) == 0o700
  private.chmod(0o755)
  workspace.Workspace(tmp_path)
  assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_the_secret_and_its_folders_are_on_disk_once_it_is_drawn(
  tmp_path, monkeypatch
):
  synced, fsync = [], os.fsync

  def noted(descriptor):
    synced.append(os.fstat(descriptor).st_ino)
    fsync(descriptor)

  monkeypatch.setattr(os, "fsync", noted)
  path = workspace.Workspace(tmp_path / "run").private("secret_seed")
  assert synced[0] == path.stat().st_ino
  made = (path.parent, tmp_path / "run", tmp_path)
  assert {folder.stat().st_ino for folder in made} <= set(synced[1:])


def test_every_working_directory_has_its_own_secret(tmp_path):
  seeds = [
    workspace.Workspace(tmp_path / str(run)).seed("noise") for run in range(5)
  ]
  assert len({tuple(seed) for seed in seeds}) == 5


def test_the_secret_has_128_bits(tmp_path):
  paths = [
    workspace.Workspace(tmp_path / str(run)).private("secret_seed")
    for run in range(20)
  ]
  secrets = [path.read_text().split()[0] for path in paths]
  # Of twenty numbers of 120 bits none would reach 2**120; here all but one in
  # 256 do.
  assert sum(int(secret, 16) >= 2**120 for secret in secrets) > 10
  assert max(int(secret, 16) for secret in secrets) < 2**128


def test_keys_of_different_purposes_differ_and_are_repeatable(tmp_path):
  space = workspace.Workspace(tmp_path, secret_seed=3)
  again = workspace.Workspace(tmp_path / "other", secret_seed=3)
  draws = {jax.random.bits(space.key(p)).item() for p in PURPOSES}
  assert draws == {jax.random.bits(again.key(p)).item() for p in PURPOSES}
  assert len(draws) == len(PURPOSES)
  assert jax.random.key_impl(space.key("noise")) == "threefry2x32"


def test_a_given_secret_is_used_and_written_nowhere(tmp_path):
  space = workspace.Workspace(tmp_path, secret_seed=7)
  same = workspace.Workspace(tmp_path / "other", secret_seed=7)
  other = workspace.Workspace(tmp_path, secret_seed=8)
  assert space.seed("noise") == same.seed("noise") != other.seed("noise")
  assert list(tmp_path.rglob("*")) == []
  assert space.is_fixed and not workspace.Workspace(tmp_path).is_fixed


def test_a_second_run_is_kept_out_and_the_place_is_free_again(tmp_path):
  with workspace.locked(tmp_path / "run"):
    # Another open file is as good as another process for this kind of lock.
    words = f"{tmp_path}/run: .* process {os.getpid()} uses.*another --workdir"
    with pytest.raises(ValueError, match=words):
      with workspace.locked(tmp_path / "run"):
        raise AssertionError("two runs in one working directory")
  with workspace.locked(tmp_path / "run"):
    pass


def test_a_secret_that_was_cut_off_while_written_is_not_used(tmp_path):
  private = tmp_path / "private"
  private.mkdir()
  (private / ".secret_seed.partial").write_text("1")
  workspace.Workspace(tmp_path)
  assert len((private / "secret_seed").read_text()) > 20


def test_a_process_that_follows_another_draws_no_secret(tmp_path):
  with pytest.raises(ValueError, match="secret_seed: .* one --workdir"):
    workspace.Workspace(tmp_path, may_draw=False)
  assert not (tmp_path / "private").exists()
  drawn = workspace.Workspace(tmp_path)
  follows = workspace.Workspace(tmp_path, may_draw=False)
  assert follows.seed("x") == drawn.seed("x")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_secret_that_others_may_read_is_refused(tmp_path, mode):
  path = workspace.Workspace(tmp_path).private("secret_seed")
  path.chmod(mode)
  with pytest.raises(ValueError, match=rf"secret_seed: .*mode {mode:o}: chmod"):
    workspace.Workspace(tmp_path)
  path.chmod(0o600)
  workspace.Workspace(tmp_path)


def test_a_damaged_secret_is_named_and_not_told(tmp_path):
  path = workspace.Workspace(tmp_path).private("secret_seed")
  whole = path.read_bytes()
  other = b"1" if whole[:1] == b"0" else b"0"
  for content in (
    other + whole[1:],
    whole[5:],
    b"\xff" * 9,
    *(whole[:kept] for kept in range(len(whole))),
  ):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="got a damaged file") as error:
      workspace.Workspace(tmp_path)
    assert whole[8:16].decode() not in str(error.value)
  path.write_bytes(whole.split()[0] + b"\n")  # as older versions wrote it
  old = workspace.Workspace(tmp_path)
  path.write_bytes(whole)
  assert workspace.Workspace(tmp_path).seed("x") == old.seed("x")


def test_a_lost_secret_is_not_drawn_again_where_trainings_were_begun(tmp_path):
  path = workspace.Workspace(tmp_path).private("secret_seed")
  secret = path.read_bytes()
  made = made_up.claim("finetune_dp/eps8")
  ledger.enter(tmp_path / "private" / ledger.NAME, "finetune_dp/eps8", made)
  path.unlink()
  with pytest.raises(ValueError, match="secret_seed: .*restore private/"):
    workspace.Workspace(tmp_path)
  assert not path.exists()
  path.write_bytes(secret)


@pytest.mark.parametrize("name", ["finetune_dp/eps8", "release_scores"])
def test_a_copy_without_private_begins_no_second_training(tmp_path, name):
  """A run there drew a secret, trained again, and its page knew one of both."""
  folder = tmp_path / name
  claim = made_up.claim("finetune_dp/eps8")
  folder.mkdir(parents=True)
  artifacts.save(folder, made_up.checkpoint(statement=claim), "0" * 16)
  config = plan.RunConfig()
  for start in (
    lambda: workspace.Workspace(tmp_path),
    lambda: plan.outlook(config, tmp_path, ["generate"]),
  ):
    with pytest.raises(ValueError, match=f"{name}, .*restore private/"):
      start()
  assert not (tmp_path / "private").exists()
  workspace.Workspace(tmp_path, secret_seed=0)  # of public data


def test_seeds_of_different_purposes_differ(tmp_path):
  space = workspace.Workspace(tmp_path, secret_seed=0)
  seeds = [space.seed(purpose) for purpose in PURPOSES]
  assert len({tuple(seed) for seed in seeds}) == len(PURPOSES)
  for seed in seeds:
    assert len(seed) == 4 and all(0 <= word < 2**32 for word in seed)
