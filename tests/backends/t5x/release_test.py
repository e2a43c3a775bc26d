"""Name, secret and place of a training: no T5X is needed."""

import dataclasses
import json
import pathlib
import types

import jax
import numpy as np
import pytest
import random_t5

from synthq_jax.backends.t5x import release as release_lib
from synthq_jax.backends.t5x import settings
from synthq_jax.data import shipped
from synthq_jax.models import t5_checkpoints, token_ids
from synthq_jax.models.checkpoints import claim_copies
from synthq_jax.privacy import joint, ledger
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import model_files
from synthq_jax.storage import stores
from synthq_jax.tools import export

SETTINGS = settings.Settings(
  num_examples=40,
  expected_batch_size=8,
  max_batch_size=40,  # room for all: calibrated in a fifth of the time
  steps=5,
  epsilon=8.0,
  l2_clip_norm=0.1,
)
FACTS = {"learning_rates": ["0.001"], "parameters": "shapes"}
PUBLIC = "public/checkpoint_1000"


def opened(
  folder, name="model", secret="secret", initial_checkpoint=PUBLIC, **changes
):
  return release_lib.Release(
    dataclasses.replace(SETTINGS, **changes),
    model_dir=folder / name,
    secret_file=folder / secret,
    initial_checkpoint=initial_checkpoint,
  )


def randomness(release):
  keys = [release.noise_key(), release.dropout_key()]
  words = [np.asarray(jax.random.key_data(key)).tolist() for key in keys]
  return [*release.batch_seed(), *words[0], *words[1]]


def test_a_resumed_training_is_the_same_release_and_counts_once(tmp_path):
  before, after = opened(tmp_path), opened(tmp_path)
  assert before.begin(1000, FACTS) == 1000
  assert after.begin(1003, FACTS) == 1000
  assert randomness(before) == randomness(after)
  entries = ledger.read(tmp_path / "model" / "privacy" / "ledger.jsonl")
  assert list(entries) == [f"t5x/{before.identifier}"]
  assert entries[f"t5x/{before.identifier}"] == before.statement()
  assert 0 < before.statement().epsilon <= 8.0


@pytest.mark.parametrize("of_model", [True, False])
def test_an_export_carries_what_lies_beside_the_checkpoint(tmp_path, of_model):
  release = opened(tmp_path)
  release.begin(1000, FACTS)
  params = random_t5.params(random_t5.config())
  made = t5_checkpoints.save_t5x(tmp_path / "model", params, 1005)
  told = export.run(
    tmp_path / "model" if of_model else made, tmp_path / "to", format="t5x"
  )
  assert "nothing is known" not in told
  assert "epsilon = 7.99" in told and "for one example" in told
  # Its own step, where no other is asked for.
  words = (tmp_path / "to" / "checkpoint_1005" / export.CLAIM).read_text()
  assert words.strip() == statement_lib.in_words(release.statement())


@pytest.mark.parametrize("way", ["model", "step", "file", "link", "here"])
def test_a_private_checkpoint_of_t5x_is_no_public_start(
  tmp_path, way, monkeypatch
):
  params = random_t5.params(random_t5.config())
  made = t5_checkpoints.save_t5x(tmp_path / "model", params, 1005)
  (tmp_path / "link").symlink_to(made)
  monkeypatch.chdir(made)
  start = {
    "model": tmp_path / "model",
    "step": made,
    "file": made / "checkpoint",
    "link": tmp_path / "link",
    "here": pathlib.Path("."),
  }[way]
  documents = types.SimpleNamespace(
    vocab_size=40, token_ids=token_ids.TokenIds()
  )
  model_files.load_public(start, documents)
  opened(tmp_path, "begun").begin(1000, FACTS)
  (tmp_path / "begun/privacy").rename(tmp_path / "model/privacy")
  with pytest.raises(ValueError, match="trained on private queries"):
    model_files.load_public(start, documents)


def test_all_that_lies_in_a_model_dir_counts(tmp_path):
  """A training there may have gone on from any of its checkpoints."""
  params = random_t5.params(random_t5.config())
  releases = [opened(tmp_path), opened(tmp_path, "other")]
  for release in releases:
    release.begin(1000, FACTS)
  first = t5_checkpoints.save_t5x(tmp_path / "model", params, 0)
  t5_checkpoints.save_claim(first, releases[1].statement())
  t5_checkpoints.save_t5x(tmp_path / "model", params, 1005)
  made = t5_checkpoints.claim(tmp_path / "model")
  assert made == joint.claim([one.statement() for one in releases])
  assert made.epsilon > max(one.statement().epsilon for one in releases)


@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_start_from_a_private_checkpoint_counts(
  tmp_path, in_bucket, monkeypatch
):
  """Its release was not in the ledger of the second, whose claim was quoted alone."""
  params = random_t5.params(random_t5.config())
  first = opened(tmp_path)
  first.begin(1000, FACTS)
  start = t5_checkpoints.save_t5x(tmp_path / "model", params, 1005)
  if in_bucket:
    start = _in_bucket(start, monkeypatch)
  again = opened(tmp_path, "again", initial_checkpoint=start)
  for step in (1005, 1007):
    assert again.begin(step, FACTS) == 1005
  both = joint.claim([first.statement(), again.statement()])
  assert both.epsilon > 1.3 * again.statement().epsilon
  words = (tmp_path / "again/privacy/statement.txt").read_text()
  assert words.strip() == statement_lib.in_words(both)
  t5_checkpoints.save_t5x(tmp_path / "again", params, 1010)
  assert t5_checkpoints.claim(tmp_path / "again").epsilon == both.epsilon
  third = opened(tmp_path, "third", initial_checkpoint=tmp_path / "again")
  third.begin(1010, FACTS)
  entries = ledger.read(tmp_path / "third/privacy/ledger.jsonl")
  assert joint.claim([*entries.values()]).epsilon > 1.1 * both.epsilon


def _in_bucket(start, monkeypatch):
  """Returns a path that is read as one of a bucket."""
  monkeypatch.setattr(
    release_lib.epath,
    "Path",
    lambda path: pathlib.Path(str(path).removeprefix("file://")),
  )
  return f"file://{start}"


def test_an_export_in_a_bucket_counts_with_all_that_lies_there(
  tmp_path, monkeypatch
):
  """Its ledger alone was read there; of two units nothing, as if it were public."""
  params = random_t5.params(random_t5.config())
  first = opened(tmp_path)
  made = t5_checkpoints.save_t5x(tmp_path / "exported", params, 1005)
  t5_checkpoints.save_claim(made, first.statement())
  start = _in_bucket(made, monkeypatch)
  again = opened(tmp_path, "again", initial_checkpoint=start)
  again.begin(1005, FACTS)
  both = joint.claim([first.statement(), again.statement()])
  words = (tmp_path / "again/privacy/statement.txt").read_text()
  assert words.strip() == statement_lib.in_words(both)
  other = dataclasses.replace(first.statement(), unit=unit_lib.CLIENT)
  t5_checkpoints.save_claim(made.parent, other)
  third = opened(tmp_path, "third", initial_checkpoint=start)
  with pytest.raises(ValueError, match="expected trainings that one claim"):
    third.begin(1005, FACTS)


def test_a_start_from_a_checkpoint_without_noise_is_refused(tmp_path):
  quiet = {"epsilon": float("inf"), "initial_checkpoint": None}
  opened(tmp_path, **quiet).begin(0, FACTS)
  params = random_t5.params(random_t5.config())
  start = t5_checkpoints.save_t5x(tmp_path / "model", params, 5)
  release = opened(tmp_path, "again", initial_checkpoint=start)
  with pytest.raises(ValueError, match="expected a public initial checkpoint"):
    release.begin(5, FACTS)
  assert not (tmp_path / "again/privacy/statement.txt").exists()


def test_a_private_checkpoint_in_a_store_is_no_public_start(
  tmp_path, monkeypatch
):
  opened(tmp_path).begin(1000, FACTS)
  params = random_t5.params(random_t5.config())
  made = t5_checkpoints.save_t5x(tmp_path / "model", params, 1005)
  for url in (f"file://{made}", f"file://{made}/", f"file://{made.parent}"):
    found = shipped.checkpoint(url)
    with pytest.raises(ValueError, match="trained on private queries"):
      model_files.refuse_private(found)
  # Orbax's folder inside a step, and a step beside one with a statement of its own.
  inside = tmp_path / "model/checkpoint_1006/state/_METADATA"
  inside.parent.mkdir(parents=True)
  inside.write_text("{}")
  exported = t5_checkpoints.save_t5x(tmp_path / "exported", params, 5)
  t5_checkpoints.save_claim(exported, statement_lib.non_private("by hand"))
  other = t5_checkpoints.save_t5x(tmp_path / "exported", params, 9)
  listed, right = [], claim_copies._list_steps
  monkeypatch.setattr(
    claim_copies,
    "_list_steps",
    lambda url, names: listed.append(url) or right(url, names),
  )
  for place in (inside.parent, other):
    local = t5_checkpoints.claim(place)
    assert not local.is_public
    found = shipped.checkpoint(f"file://{place}")
    assert t5_checkpoints.claim(found) == local
    stores.local.cache_clear()  # as a second process, which downloads again
    stores.local(f"file://{place}")
    del listed[:]
    assert t5_checkpoints.claim(found) == local
    model = tmp_path / ("exported" if place == other else "model")
    assert listed == [f"file://{model}"], "a whole bucket may lie above it"
  told = export.run(
    export.local(f"file://{made}"), tmp_path / "to", format="huggingface"
  )
  assert "nothing is known" not in told and "epsilon = 7.99" in told


def test_an_export_without_noise_is_refused(tmp_path):
  quiet = {"epsilon": float("inf"), "initial_checkpoint": None}
  opened(tmp_path, **quiet).begin(0, FACTS)
  params = random_t5.params(random_t5.config())
  made = t5_checkpoints.save_t5x(tmp_path / "model", params, 5)
  with pytest.raises(ValueError, match="may be shared"):
    export.run(made, tmp_path / "to", format="huggingface")


def test_another_model_dir_draws_other_batches_and_other_noise(tmp_path):
  one, other = opened(tmp_path, "one"), opened(tmp_path, "other")
  assert one.identifier != other.identifier
  assert not set(randomness(one)) & set(randomness(other))


def test_batches_noise_and_dropout_have_keys_of_their_own(tmp_path):
  one = opened(tmp_path)
  noise, dropout = (
    set(np.asarray(jax.random.key_data(key)).tolist())
    for key in (one.noise_key(), one.dropout_key())
  )
  assert not noise & dropout
  assert not (noise | dropout) & set(one.batch_seed())


def test_steps_go_on_where_the_state_is_and_end_where_the_promise_does(
  tmp_path,
):
  one = opened(tmp_path)
  with pytest.raises(ValueError, match="DPTrainer"):
    one.next_step()
  one.begin(1000, FACTS)
  assert [one.next_step() for _ in range(5)] == [0, 1, 2, 3, 4]
  with pytest.raises(ValueError, match="TRAIN_STEPS_RELATIVE"):
    one.next_step()
  resumed = opened(tmp_path)
  resumed.begin(1003, FACTS)
  assert resumed.next_step() == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_that_a_cast_rounded_is_refused(dtype):
  """In bfloat16, step 1003 is 1004 and 1001 is 1000, whose noise was drawn."""
  step = jax.numpy.array(1001, dtype)
  with pytest.raises(ValueError, match=f"integer type, got {dtype}"):
    release_lib.read_step(step)
  assert release_lib.read_step(jax.numpy.array(1001, "int32")) == 1001


def test_a_step_of_no_checkpoint_is_refused(tmp_path):
  one = opened(tmp_path)
  one.begin(1000, FACTS)
  for step in (1001, 1003):
    (tmp_path / "model" / f"checkpoint_{step}").mkdir()
  with pytest.raises(ValueError, match="of steps 1001, 1003, got step 1002"):
    opened(tmp_path).begin(1002, FACTS)
  resumed = opened(tmp_path)
  resumed.begin(1003, FACTS)
  assert resumed.next_step() == 3


def test_the_secret_is_in_a_file_of_its_own_that_only_its_owner_reads(tmp_path):
  opened(tmp_path).begin(1000, FACTS)
  secret = (tmp_path / "secret").read_text().strip()
  assert len(secret) > 20
  assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
  for path in (tmp_path / "model").rglob("*.*"):
    assert secret not in path.read_text(), path


@pytest.mark.parametrize("place", ["model/secret", "model/privacy/secret"])
def test_a_secret_beside_the_checkpoints_is_refused(tmp_path, place):
  with pytest.raises(ValueError, match="outside of MODEL_DIR"):
    opened(tmp_path, secret=place)


def test_a_training_cannot_go_on_with_another_secret_or_none(tmp_path):
  opened(tmp_path)
  (tmp_path / "secret").rename(tmp_path / "old")
  with pytest.raises(ValueError, match="restore it"):
    opened(tmp_path)
  assert not (tmp_path / "secret").exists()
  (tmp_path / "secret").write_text(f"{'12ab' * 8}\n")
  with pytest.raises(ValueError, match="only its owner.*chmod 600"):
    opened(tmp_path)
  (tmp_path / "secret").chmod(0o600)
  with pytest.raises(ValueError, match="got another"):
    opened(tmp_path)
  for wrong in ("hello, hello, hello, hello", "7d2"):  # 7d2 can be tried
    (tmp_path / "secret").write_text(f"{wrong}\n")
    with pytest.raises(ValueError, match="24 digits or more"):
      opened(tmp_path)


def test_a_secret_in_a_bucket_must_be_allowed(tmp_path):
  with pytest.raises(ValueError, match="anyone who may read the bucket"):
    release_lib.Release(
      SETTINGS, model_dir=tmp_path / "model", secret_file="memory://b/secret"
    )
  assert not (tmp_path / "model").exists()


def test_a_training_cannot_go_on_with_other_records(tmp_path):
  one = opened(tmp_path)
  one.check_records("of all records")
  one.begin(1000, FACTS)
  written = (tmp_path / "model/privacy/release.json").read_text()
  assert "of all records" not in written
  again = opened(tmp_path)
  again.check_records("of all records")
  assert again.begin(1002, FACTS) == 1000
  other = opened(tmp_path)
  other.check_records("of some")
  with pytest.raises(ValueError, match="records .*, now "):
    other.begin(1002, FACTS)


def test_records_that_differ_between_machines_are_refused(
  tmp_path, monkeypatch
):
  one = opened(tmp_path)

  def gathered(mine):
    return np.stack([mine, mine ^ np.uint8(1)])

  monkeypatch.setattr(
    release_lib.multihost_utils, "process_allgather", gathered
  )
  with pytest.raises(ValueError, match="the same records .* on every machine"):
    one.check_records("of all records")


@pytest.mark.parametrize("process", [0, 1])
def test_a_refusal_is_one_on_every_machine(tmp_path, monkeypatch, process):
  opened(tmp_path).begin(1000, FACTS)
  sent = []

  def broadcast(message):
    sent.append(message)
    return sent[0]

  monkeypatch.setattr(
    release_lib.multihost_utils, "broadcast_one_to_all", broadcast
  )
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  for index in range(process + 1):
    monkeypatch.setattr(jax, "process_index", lambda index=index: index)
    with pytest.raises(ValueError, match="steps 5, now 6"):
      opened(tmp_path, steps=6)


def test_a_training_cannot_go_on_with_other_settings_or_facts(tmp_path):
  opened(tmp_path).begin(1000, FACTS)
  with pytest.raises(ValueError, match=r"steps 5, now 6"):
    opened(tmp_path, steps=6)
  with pytest.raises(ValueError, match="learning_rates"):
    opened(tmp_path).begin(1003, FACTS | {"learning_rates": ["0.1"]})
  with pytest.raises(ValueError, match="step 1000 or later"):
    opened(tmp_path).begin(999, FACTS)


def test_a_training_cannot_begin_again_with_other_parameters(tmp_path):
  opened(tmp_path).begin(1000, FACTS, start="norm 3")
  assert opened(tmp_path).begin(1000, FACTS, start="norm 3") == 1000
  assert opened(tmp_path).begin(1002, FACTS, start="norm 5") == 1000
  with pytest.raises(ValueError, match="start norm 3, now norm 4"):
    opened(tmp_path).begin(1000, FACTS, start="norm 4")


def test_a_training_that_another_one_replaced_does_not_begin(tmp_path):
  """Two jobs that start in one empty MODEL_DIR: one of them is not counted."""
  one = opened(tmp_path)
  record = tmp_path / "model" / "privacy" / "release.json"
  record.unlink()
  opened(tmp_path)
  with pytest.raises(ValueError, match="one job for each MODEL_DIR"):
    one.begin(1000, FACTS)
  record.unlink()
  with pytest.raises(ValueError, match="one job for each MODEL_DIR"):
    one.begin(1000, FACTS)


def test_checkpoints_of_an_unknown_training_are_no_start(tmp_path):
  """T5X prefers them to INITIAL_CHECKPOINT_PATH; the claim left their steps out."""
  one = opened(tmp_path)
  saved = tmp_path / "model" / "checkpoint_1003"
  saved.mkdir()
  for step in (1000, 1003):
    with pytest.raises(
      ValueError, match="got that of step 1003, .* restore its"
    ):
      one.begin(step, FACTS)
  assert not (tmp_path / "model/privacy/ledger.jsonl").exists()
  saved.rmdir()
  assert one.begin(1000, FACTS) == 1000
  saved.mkdir()
  assert opened(tmp_path).begin(1003, FACTS) == 1000


@pytest.mark.parametrize(
  ("initial", "step"),
  [(None, 1005), (PUBLIC, 1005), (f"{PUBLIC}/", 0), ("gs://b/checkpoint_7", 8)],
)
def test_a_start_that_gin_does_not_name_is_refused(tmp_path, initial, step):
  """RestoreCheckpointConfig.path by hand: its private training was not counted."""
  one = opened(tmp_path, initial_checkpoint=initial)
  with pytest.raises(
    ValueError, match=f"got step {step}: .* that its own claim"
  ):
    one.begin(step, FACTS)
  assert not (tmp_path / "model/privacy/ledger.jsonl").exists()
  other = opened(tmp_path, initial_checkpoint=tmp_path / "t5/model.ckpt-1000")
  assert other.begin(1000, FACTS) == 1000


@pytest.mark.parametrize(
  "restored", [f"/private{PUBLIC}", (PUBLIC, f"/private{PUBLIC}"), None]
)
def test_another_start_of_the_same_step_is_refused(tmp_path, restored):
  """Its private training was not counted: the step was the same."""

  def make_cfg(path):
    restore = types.SimpleNamespace(path=path)
    return types.SimpleNamespace(restore=restore)

  arguments = {
    "model_dir": tmp_path / "model",
    "secret_file": tmp_path / "secret",
    "initial_checkpoint": PUBLIC,
  }
  with pytest.raises(ValueError, match="that its own claim counts"):
    release_lib.Release(
      SETTINGS, checkpoint_cfg=make_cfg(restored), **arguments
    )
  assert not (tmp_path / "model").exists()
  for cfg in (make_cfg(f"{PUBLIC}/"), types.SimpleNamespace(restore=None)):
    release_lib.Release(SETTINGS, checkpoint_cfg=cfg, **arguments)


def test_a_training_killed_while_it_began_begins_again(tmp_path):
  one = opened(tmp_path)
  one.begin(1000, FACTS)
  path = tmp_path / "model" / "privacy" / "release.json"
  record = json.loads(path.read_text())
  del record["first_step"], record["facts"]
  path.write_text(json.dumps(record))
  again = opened(tmp_path)
  assert again.begin(1000, FACTS) == 1000
  assert again.identifier == one.identifier
  assert len(ledger.read(path.with_name("ledger.jsonl"))) == 1
