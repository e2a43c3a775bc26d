"""Private training draws and noises what its statement says it does.

And no noise twice: what is made again is another release, what goes on is the
same one, and no two releases of a run share batches, dropout or noise.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import made_up
import numpy as np
import optax
import pytest
import random_t5
import scipy.stats
import small_data

from synthq_jax import optim
from synthq_jax.data import sources
from synthq_jax.privacy import accounting, ledger, sampling
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import fingerprints, private_training, workspace
from synthq_jax.runtime import release as release_lib
from synthq_jax.stages import (
  direct_dp,
  finetune_dp,
  learn_to_rank,
  plan,
  prepare_data,
  train_retriever,
)
from synthq_jax.storage import artifacts
from synthq_jax.training import checkpoints, distributed, dp_step, loop
from synthq_jax.training import pairs as training_pairs

NUM, MEAN, STEPS = 30, 6, 400
CLIP, RATE = 0.5, 0.1
SIZE = 20_000


class Seen:
  """A clipped gradient that is `value` everywhere, and notes who is drawn."""

  l2_clip_norm = CLIP

  def __init__(self, value=0.0):
    self.value = value
    self.steps = []

  def sensitivity(self, relation):
    del relation
    return CLIP

  def __call__(self, params, batch, *, is_padding_example):
    def note(records, is_padding):
      self.steps.append(np.asarray(records)[~np.asarray(is_padding)])

    jax.debug.callback(note, batch["record"], is_padding_example, ordered=True)
    zeros = jnp.zeros(is_padding_example.shape)
    aux = types.SimpleNamespace(losses=zeros, norms=zeros)
    return jax.tree.map(lambda x: jnp.full_like(x, self.value), params), aux


class Untrained(Seen):
  """Of a training that is asked for its secrets alone."""


def settings_of(steps, computed=None, **changes):
  names = {f.name for f in dataclasses.fields(finetune_dp.Config)}
  of_config = {
    "batch_size": MEAN,
    "steps": steps,
    "optimizer": "dp_adam",
    "learning_rate": RATE,
    **{name: changes.pop(name) for name in names & changes.keys()},
    **(computed or {}),
  }
  config = finetune_dp.Config(**of_config)
  settings = {"config": config, "epsilon": 8.0, "mechanism": "nothing"}
  return private_training.Settings(**(settings | changes))


def test_a_relation_that_the_noise_is_not_for_is_refused():
  with pytest.raises(ValueError, match="got REPLACE_ONE"):
    settings_of(3, relation="REPLACE_ONE")
  assert settings_of(3, relation="REPLACE_SPECIAL").relation


def trained(
  root,
  seen,
  *,
  steps=1,
  size=1,
  secret=None,
  stage="stage/name",
  digest="digest",
  save_seconds=60.0,
  computed=None,
  **changes,
):
  """Returns parameters and statement."""
  reporting = loop.Settings(log_every=steps, save_seconds=save_seconds)
  settings = settings_of(steps, computed, settings=reporting, **changes)
  params, fields = private_training.train(
    made_up.task(
      workspace.Workspace(root, secret_seed=secret),
      settings.config,
      result_path=stage,
      digest=digest,
    ),
    settings,
    dp_step.Training(
      grad_fn=seen,
      params={"w": np.zeros(size, np.float32)},
      records={"record": np.arange(NUM, dtype=np.int32)},
    ),
  )
  return params, fields["statement"]


@pytest.mark.parametrize("kind", sources.KINDS)
def test_the_promise_says_where_documents_come_from_the_queries(kind, tmp_path):
  """NewsQA's were forgotten when a run could read them."""
  one = made_up.prepared(source=f"{kind}:place")
  space = workspace.Workspace(tmp_path, secret_seed=1)
  said = private_training._terms(settings_of(1), space, one).not_protected
  assert ("from_pairs" in said) == (
    kind in ("environment_docs", "jsonl", "newsqa", "seqio_pairs")
  )


@pytest.mark.parametrize("secret", [7, None])
def test_a_promise_under_a_fixed_secret_says_that_it_protects_nobody(
  secret, tmp_path
):
  """Anybody can compute that noise: of private data, a false claim."""
  space = workspace.Workspace(tmp_path, secret_seed=secret)
  of_query, of_user = (
    private_training._terms(settings_of(1), space, made_up.prepared(unit=unit))
    for unit in (unit_lib.QUERY, unit_lib.user(4))
  )
  for found in (of_query, of_user):
    assert found.secret_is_fixed == (secret is not None)


def train(root, *, steps, size=1):
  """Returns the trained parameters, the one release, and who was drawn."""
  seen = Seen()
  params, statement = trained(root, seen, steps=steps, size=size, secret=7)
  jax.effects_barrier()
  (release,) = statement.ledger
  assert release.steps == steps and statement.epsilon <= 8.0
  found = np.zeros((steps, NUM), bool)
  for step, records in enumerate(seen.steps):
    found[step, records] = True
  return params, release, found


def z_of_rate(found, probability):
  scale = np.sqrt(found.size * probability * (1 - probability))
  return (found.sum() - found.size * probability) / scale


def deviations(release, found):
  """How far draws are from independent coins, in standard deviations."""
  assert release.sampling == "poisson"
  sampler = release.sampler()
  assert (sampler.num_examples, len(found)) == (NUM, release.steps)
  q = sampler.probability
  spread = NUM * q * (1 - q)
  sizes = np.sum((found.sum(1) - NUM * q) ** 2) / spread
  counts = np.sum((found.sum(0) - STEPS * q) ** 2) / (STEPS * q * (1 - q))
  return {
    "the rate": z_of_rate(found, q),
    "batch sizes": (sizes - STEPS) / np.sqrt(2 * STEPS),
    "each record's count": (counts - NUM) / np.sqrt(2 * NUM),
    "repeats in the next step": z_of_rate(found[1:] & found[:-1], q * q),
  }


def test_batches_are_the_poisson_samples_of_the_statement(tmp_path):
  _, release, found = train(tmp_path, steps=STEPS)
  assert all(abs(z) < 4.5 for z in deviations(release, found).values())


class Shuffled(sampling.FixedOrder):
  """Batches of one size, each drawn from all records."""

  def batch(self, seed, step):
    return super().batch(seed, step * self.steps_per_epoch)


@pytest.mark.parametrize(
  ("kind", "seen_in"),
  [
    (sampling.FixedOrder, {"batch sizes", "repeats in the next step"}),
    (Shuffled, {"batch sizes"}),
  ],
)
def test_batches_of_one_size_are_caught(tmp_path, monkeypatch, kind, seen_in):
  right = dp_step.train

  def wrong(training, mechanism, *others):
    fixed = kind(num_examples=NUM, batch_size=MEAN)
    mechanism = dataclasses.replace(mechanism, sampler=fixed)
    return right(training, mechanism, *others)

  monkeypatch.setattr(dp_step, "train", wrong)
  _, release, found = train(tmp_path, steps=STEPS)
  far = deviations(release, found)
  assert seen_in <= {name for name, z in far.items() if abs(z) > 10}


@pytest.fixture(name="plain_sgd")
def fixture_plain_sgd(monkeypatch):
  """In Adam's place: one step from zero is -rate (sum + noise) / divisor."""

  def dp_sgd(learning_rate, **arguments):
    return optax.chain(optim.privatize(**arguments), optax.sgd(learning_rate))

  monkeypatch.setattr(optim, "dp_adam", dp_sgd)


@pytest.mark.usefixtures("plain_sgd")
def test_the_noise_is_that_of_the_statement(tmp_path):
  params, release, _ = train(tmp_path, steps=1, size=SIZE)
  assert release.l2_sensitivity == release.l2_clip_norm == CLIP

  def accepted(std):
    statistic = np.sum((params["w"].astype(float) / std) ** 2)
    low, high = scipy.stats.chi2.interval(1 - 1e-6, SIZE)
    return low <= statistic <= high

  right = RATE * release.noise_multiplier * CLIP / release.expected_batch_size
  assert accepted(right)
  assert not accepted(1.1 * right) and not accepted(right / 1.1)


# What is made again, and what goes on.


def entries(root):
  return list(ledger.read(root / "private/ledger.jsonl"))


def test_no_gradient_is_asked_for_before_the_ledger_has_its_line(tmp_path):
  known = []

  class Looking(Seen):
    def __call__(self, *args, **kwargs):
      known.append(len(entries(tmp_path)))
      return super().__call__(*args, **kwargs)

  trained(tmp_path, Looking())
  assert known and set(known) == {1}


def record_of(root, digest="digest"):
  path = root / f"private/stage/name/state_{digest}" / release_lib.RECORD
  return json.loads(path.read_text()) if path.exists() else None


def make_again(root, secret=None):
  """As who deletes a result: its states went when it was saved."""
  space = workspace.Workspace(root, secret_seed=secret)
  state = private_training.state_directory(space, "stage/name", "digest")
  release_lib.remove(state)


@pytest.mark.usefixtures("plain_sgd")
def test_a_training_made_again_hides_the_gradient_in_noise_of_its_own(tmp_path):
  """Another strategy sums a little differently: that must not stand alone."""
  off = 0.3 * CLIP / np.sqrt(SIZE)
  first, one = trained(tmp_path, Seen(), size=SIZE)
  make_again(tmp_path)
  second, other = trained(tmp_path, Seen(off), size=SIZE)
  scale = one.ledger[0].expected_batch_size / (RATE * CLIP)
  noise = np.linalg.norm(first["w"]) * scale  # in units of the clip norm
  left = np.linalg.norm(first["w"] - second["w"]) * scale
  assert noise > 35
  # Two independent noises; 0.3 stands alone if they are one.
  assert left == pytest.approx(np.sqrt(2) * noise, rel=0.03)
  names = [said.ledger[0].identifier for said in (one, other)]
  assert entries(tmp_path) == names and len(set(names)) == 2
  both = ledger.describe(tmp_path / "private/ledger.jsonl")
  assert "together (2)" in both
  together = both.split("together (2): epsilon ")[1].split(",")[0]
  assert float(together) > 1.2 * one.epsilon


def test_a_fixed_secret_makes_the_same_training_again(tmp_path):
  made = []
  for folder, value in (("a", {}), ("a", {"strategy": "ghost"}), ("b", {})):
    params, said = trained(
      tmp_path / folder, Seen(), size=9, secret=7, computed=value
    )
    make_again(tmp_path / folder, secret=7)
    made.append((params["w"].tobytes(), said.ledger[0].identifier))
  assert len(set(made)) == 1
  assert made[0][1] == "stage/name/digest"
  assert entries(tmp_path / "a") == ["stage/name/digest"]
  assert not list(tmp_path.rglob(release_lib.RECORD))


def test_a_fixed_secret_draws_what_it_always_drew(tmp_path):
  """Tables that were made with one stay as they are."""
  space = workspace.Workspace(tmp_path, secret_seed=7)
  one = release_lib.start(
    space, "a/b", "0f", directory=tmp_path / "state", program="any"
  )
  assert one.batch_seed == space.seed("a/b batches 0f")
  assert one.batch_seed == [1320881324, 2148727242, 1629969797, 3295117265]
  for name in ("noise", "dropout"):
    key = getattr(one, f"{name}_key")
    assert jnp.array_equal(
      jax.random.key_data(key), jax.random.key_data(space.key(f"a/b {name} 0f"))
    )


class Killed(BaseException):
  """The process ends here."""


@pytest.fixture(name="kill")
def fixture_kill(monkeypatch):
  """Ends the process at one of its atomic writes, before or after it."""
  writes = {"left": -1, "after": False, "seen": []}

  def replace(source, target):
    writes["seen"].append(os.path.basename(target))
    writes["left"] -= 1
    if not writes["left"] and not writes["after"]:
      raise Killed
    os.replace(source, target)
    if not writes["left"]:
      raise Killed

  shim = types.SimpleNamespace(**vars(os))
  shim.replace = replace
  monkeypatch.setattr(artifacts, "os", shim)
  return writes


@pytest.mark.slow
def test_a_training_killed_at_any_write_ends_as_one_that_was_not(
  tmp_path, kill
):
  """Record, ledger and states lie on disk in an order that forgets nothing."""
  options = {"steps": 2, "size": 5, "save_seconds": 0.0}
  begun = tmp_path / "begun"
  workspace.Workspace(begun)
  kill.update(left=2, seen=[])
  with pytest.raises(Killed):
    trained(begun, Seen(), **options)
  copy = ledger.copy_of("ledger.jsonl").name  # to the ledger it is appended
  assert kill["seen"] == [release_lib.RECORD, copy]
  assert len(entries(begun)) == 1 and not (begun / "private" / copy).exists()
  whole = tmp_path / "whole"
  shutil.copytree(begun, whole)
  kill.update(left=-1, seen=[])
  want, said = trained(whole, Seen(), **options)
  writes = list(kill["seen"])
  assert len(writes) > 3
  for at, after in itertools.product(range(1, len(writes) + 1), (False, True)):
    cut = tmp_path / f"cut_{at}_{after}"
    shutil.copytree(begun, cut)
    kill.update(left=at, after=after)
    with pytest.raises(Killed):
      trained(cut, Seen(), **options)
    kill["left"] = -1
    found, again = trained(cut, Seen(), **options)
    assert np.array_equal(found["w"], want["w"]), (at, after, writes[at - 1])
    assert again == said
    assert entries(cut) == [said.ledger[0].identifier]


def interrupted(
  root, monkeypatch, *, at, computed=None, after_save=True, secret=None
):
  """Trains four steps and is killed while it makes batch `at`."""
  right = dp_step.draw

  def killed(*arguments):
    if arguments[3] == at:
      raise Killed
    return right(*arguments)

  with monkeypatch.context() as patch:
    patch.setattr(dp_step, "draw", killed)
    with pytest.raises(Killed):
      trained(
        root,
        Seen(),
        steps=4,
        size=5,
        computed=computed,
        secret=secret,
        save_seconds=0.0 if after_save else 60.0,
      )


@pytest.fixture(name="keys")
def fixture_keys(monkeypatch):
  """What each training is given: seed of batches, keys of dropout and noise."""
  given = []
  right = dp_step.train

  def noted(training, mechanism, *others):
    given.append(drawn_by(mechanism))
    if isinstance(training.grad_fn, Untrained):
      return training.params
    return right(training, mechanism, *others)

  monkeypatch.setattr(dp_step, "train", noted)
  return given


def drawn_by(mechanism):
  """The bits of all that is secret, from what `dp_step.train` is given."""
  bits = [
    None if key is None else tuple(jax.random.key_data(key).tolist())
    for key in (mechanism.dropout_key, mechanism.noise_key)
  ]
  return tuple(mechanism.batch_seed), *bits


def test_the_same_program_goes_on_with_the_same_noise(
  tmp_path, monkeypatch, keys
):
  for at, after_save in ((0, False), (2, False), (2, True), (3, True)):
    root = tmp_path / f"{at}_{after_save}"
    interrupted(root, monkeypatch, at=at, after_save=after_save)
    before = record_of(root)
    trained(root, Seen(), steps=4, size=5)
    assert record_of(root) == before
    assert keys[-1] == keys[-2]
    assert len(entries(root)) == 1


def test_another_program_goes_on_with_other_noise_and_counts_again(
  tmp_path, monkeypatch, keys
):
  """Of a saved state: its steps stay, and so does who is in a batch."""
  ghost = {"strategy": "ghost"}
  scanned = ghost | {"scan_layers": True}
  interrupted(tmp_path, monkeypatch, at=2)
  interrupted(tmp_path, monkeypatch, at=3, computed=ghost)
  interrupted(tmp_path, monkeypatch, at=3)  # back to the first one
  _, said = trained(tmp_path, Seen(), steps=4, size=5, computed=scanned)
  batches, _, noise = zip(*keys, strict=True)
  assert len(set(batches)) == 1 and len(set(noise)) == 4
  assert len(set(entries(tmp_path))) == 4
  assert entries(tmp_path)[-1] == said.ledger[0].identifier
  assert (
    checkpoints.latest_step(tmp_path / "private/stage/name/state_digest") == 4
  )  # none of them began anew


def test_another_program_without_a_saved_state_begins_anew(
  tmp_path, monkeypatch, keys
):
  interrupted(tmp_path, monkeypatch, at=2, after_save=False)
  trained(tmp_path, Seen(), steps=4, size=5, computed={"strategy": "ghost"})
  one, other = keys
  assert not set(one[0]) & set(other[0]) and one[2] != other[2]
  assert len(set(entries(tmp_path))) == 2


@pytest.mark.parametrize("secret", [None, 7])
def test_a_training_whose_noise_is_calibrated_anew_begins_anew(
  secret, tmp_path, monkeypatch, keys
):
  """Its first steps had other noise than the statement would say of all."""
  right = accounting.noise_multiplier
  with monkeypatch.context() as patch:  # of another version
    patch.setattr(accounting, "noise_multiplier", lambda **x: 0.7 * right(**x))
    interrupted(tmp_path, patch, at=3, secret=secret)
  state = tmp_path / "private/stage/name/state_digest"
  assert checkpoints.latest_step(state) == 3
  if secret is None:
    interrupted(tmp_path, monkeypatch, at=0)
    assert keys[0][0] != keys[1][0] and keys[0][2] != keys[1][2]
    assert len(entries(tmp_path)) == 2
  else:  # which gives the second training the first one's name
    with pytest.raises(ValueError, match="another one for .*another working"):
      trained(tmp_path, Seen(), steps=4, size=5, secret=secret)
    assert len(entries(tmp_path)) == 1
  assert checkpoints.latest_step(state) is None


def test_states_without_their_record_are_not_gone_on_with(
  tmp_path, monkeypatch, keys
):
  interrupted(tmp_path, monkeypatch, at=3)
  state = tmp_path / "private/stage/name/state_digest"
  assert checkpoints.latest_step(state) == 3
  (state / release_lib.RECORD).unlink()
  interrupted(tmp_path, monkeypatch, at=0)
  assert checkpoints.latest_step(state) is None
  assert keys[0][2] != keys[1][2] and len(entries(tmp_path)) == 2


def test_only_the_owner_may_read_what_was_drawn_and_no_name_tells_it(tmp_path):
  before = os.umask(0)
  try:
    _, said = trained(tmp_path, Seen())
  finally:
    os.umask(before)
  path = tmp_path / "private/stage/name/state_digest" / release_lib.RECORD
  assert path.stat().st_mode & 0o077 == 0
  record = record_of(tmp_path)
  assert len(record["noise"]) == 32
  identifier = said.ledger[0].identifier
  assert identifier.startswith("stage/name/digest-")
  for drawn in (record["noise"], record["batches"]):
    assert drawn not in identifier and identifier[-16:] not in drawn


def test_a_process_that_follows_takes_what_process_0_has_drawn(
  tmp_path, monkeypatch
):
  space = workspace.Workspace(tmp_path)

  def start(directory):
    made = release_lib.start(
      space, "a", "0", directory=tmp_path / directory, program="any"
    )
    keys = (made.dropout_key, made.noise_key)
    bits = [jax.random.key_data(key).tolist() for key in keys]
    return made.identifier, made.batch_seed, bits

  told = []

  def decided(name, make):
    told.append((name, json.loads(json.dumps(make()))))
    return told[-1][1]

  monkeypatch.setattr(distributed, "decided", decided)
  first = start("its own")
  monkeypatch.setattr(
    distributed, "decided", lambda name, make: dict(told)[name]
  )
  assert start("none") == first
  assert not (tmp_path / "none").exists()


SPEED = [
  ("strategy", "ghost"),
  ("remat", True),
  ("scan_layers", True),
  ("mesh", finetune_dp.mesh_lib.Shape(data=2)),
]


def test_whatever_changes_the_speed_is_another_program():
  config = finetune_dp.Config()
  programs = [fingerprints.program(config, None)]
  for name, value in SPEED:
    other = dataclasses.replace(config, **{name: value})
    assert artifacts.fingerprint(other) == artifacts.fingerprint(config)
    programs.append(fingerprints.program(other, None))
  mesh = finetune_dp.mesh_lib.make(finetune_dp.mesh_lib.Shape(data=2))
  programs.append(fingerprints.program(config, mesh))
  assert len(set(programs)) == len(programs)
  known = {name for name, _ in SPEED} | {"settings"}
  assert known == {
    field.name
    for field in dataclasses.fields(config)
    if field.metadata.get("speed_only")
  }
  saving = dataclasses.replace(config, settings=loop.Settings(log_every=7))
  assert fingerprints.program(saving, None) == programs[0]


def test_other_code_is_another_program(monkeypatch):
  before = fingerprints.program({}, None), fingerprints.machine(None)
  assert (fingerprints.program({}, None), fingerprints.machine(None)) == before
  monkeypatch.setattr(fingerprints, "_code", lambda: "another")
  assert fingerprints.program({}, None) != before[0]
  assert fingerprints.machine(None) != before[1]  # all that T5X's steps ask for


_MODULE = '''"""Adds."""

import math  # for pi

AREA = 2 * math.pi
"""Of a circle."""


def add(x, y=1):
  """Returns the sum."""
  # The first argument comes first.
  return x + y
'''


@pytest.mark.parametrize(
  ("before", "after", "is_other"),
  [
    ("# The first argument comes first.", "# Nothing.", False),
    ('"""Of a circle."""', '"""Twice pi."""', False),
    ('"""Adds."""\n', "", False),
    ("add(x, y=1)", "add(\n  x,\n  y=1,\n)", False),
    ("x + y", "x - y", True),
    ("import math", "import numpy as math", True),
  ],
)
def test_a_comment_or_docstring_is_no_other_code(
  tmp_path, before, after, is_other
):
  """It entered another release into the ledger of a training that was killed."""
  digests = []
  for text in (_MODULE, _MODULE.replace(before, after)):
    (tmp_path / "sums.py").write_text(text)
    digests.append(fingerprints._digest_code(tmp_path))
  assert _MODULE.count(before) == 1
  assert (digests[0] != digests[1]) == is_other


def test_the_code_is_that_of_this_package(monkeypatch):
  seen = []
  monkeypatch.setattr(fingerprints, "_digest_code", seen.append)
  fingerprints._code.__wrapped__()
  assert seen == [pathlib.Path(fingerprints.__file__).parents[1]]


def test_what_finds_candidates_is_another_program_in_another_version(
  monkeypatch,
):
  """A query's features come from it: the same noise, added to others, tells."""
  names = {line.split()[0] for line in fingerprints._libraries()}
  assert {"bm25s", "faiss-cpu", "optax"} <= names
  before = fingerprints.program({}, None)
  newer = [f"{name} 99" for name in sorted(names)]
  monkeypatch.setattr(fingerprints, "_libraries", lambda: newer)
  assert fingerprints.program({}, None) != before


def test_other_contents_of_what_is_read_are_another_program(tmp_path):
  """A retriever that is made again, on another machine, is another retriever."""
  config = learn_to_rank.Config()

  def program(folder, content):
    made = made_up.checkpoint(directory=f"train_retriever/{folder}")
    place = tmp_path / made.directory
    place.mkdir(parents=True, exist_ok=True)
    (place / "params.safetensors").write_bytes(content)
    artifacts.save(place, made, "digest", folders=[place])
    task = types.SimpleNamespace(
      inputs=types.SimpleNamespace(retriever=made, share=0.5),
      folders=types.SimpleNamespace(root=tmp_path),
    )
    read = private_training._read(task)
    return fingerprints.program(config, None, read)

  first = program("one", b"first")
  assert first == program("moved", b"first")
  assert first != program("one", b"other")


def test_a_choice_by_memory_is_another_program_with_other_memory(monkeypatch):
  def programs(gib):
    monkeypatch.setattr(os, "sysconf", {  # in pages of a byte
      "SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": int(gib * 2**30)
    }.get)  # fmt: skip
    return [
      fingerprints.program(finetune_dp.Config(strategy=name), None)
      for name in ("auto", "bookkeeping")
    ] + [fingerprints.program(learn_to_rank.Config(), None)]  # "auto", always

  small, same, large = programs(4.2), programs(4.9), programs(16)
  assert small == same
  assert small[0] != large[0]
  assert small[1] == large[1]
  assert small[2] != large[2]


# No two releases of a run share anything secret.

STAGES = [
  f"{stage}_eps{epsilon}_seed{seed}"
  for stage in (
    "finetune_dp/",
    "train_retriever/direct_dp_logit",
    "learn_to_rank/a",
  )
  for epsilon in (1, 8)
  for seed in (0, 1)
]
KINDS = ("batches", "dropout", "noise")


def given_to(keys, root, secret):
  """Returns what the releases of a run with three settings are given."""
  keys.clear()
  for stage, digest in itertools.product(STAGES, ("0a", "0b", "0c")):
    trained(
      root,
      Untrained(),
      stage=stage,
      digest=digest,
      secret=secret,
      has_dropout=True,
    )
  return dict(zip(KINDS, zip(*keys, strict=True), strict=True))


@pytest.mark.parametrize("secret", [7, None])
def test_no_two_releases_share_batches_dropout_or_noise(tmp_path, keys, secret):
  run = given_to(keys, tmp_path / "run", secret)
  again = given_to(keys, tmp_path / "run", secret)
  assert run == again  # nothing was finished: all go on
  for kind, values in run.items():
    assert len(values) == len(STAGES) * 3
    assert len(set(values)) == len(values), f"two releases share {kind}"
  # Nor does one kind's stand in for another's.
  words = [v[:2] for values in run.values() for v in values]
  assert len(set(words)) == len(words)


@pytest.mark.parametrize("secrets", [(7, 8), (None, None)])
def test_everything_a_release_draws_depends_on_the_secret(
  tmp_path, keys, secrets
):
  """Equal settings and equal records: nothing but the secret differs."""
  runs = []
  for folder, secret in zip("ab", secrets, strict=True):
    root = tmp_path / folder
    if folder == "b" and secret is None:
      shutil.copytree(tmp_path / "a", root)
      (root / "private/secret_seed").write_text("12ab\n")
    runs.append(given_to(keys, root, secret))
  for kind in KINDS:
    one, other = (set(run[kind]) for run in runs)
    assert not one & other, f"{kind} do not depend on the secret"


@pytest.fixture(name="source", scope="module")
def fixture_source(tmp_path_factory):
  path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
  return small_data.write_pairs(path, 60)


def run_of(source, secret, **changes):
  """Two epsilons and none, a generator and two direct methods."""
  folder = pathlib.Path(source.removeprefix("jsonl:")).parent
  return plan.RunConfig(
    checkpoint=random_t5.save(folder / "t5"),
    prepare_data=prepare_data.Config(source=source, public_test_documents=10),
    finetune_dp=finetune_dp.Config(
      steps=2, batch_size=8, dropout_rate=0.1, **changes
    ),
    direct_dp_methods=tuple(
      direct_dp.Config(
        steps=2, batch_size=8, label=m, method=m, temperature=1.0, **changes
      )
      for m in ("batch", "logit")
    ),
    train_retriever=train_retriever.Config(batch_size=8, warmup_steps=0),
    rows=plan.Rows(
      synthetic=(1.0, 8.0, math.inf),
      public_only=False,
      original=False,
      untrained=False,
      direct_dp=(1.0, 8.0),
    ),
    secret_seed=secret,
    public_data=True,
  )


def as_it_was(training, *others):
  """In the place of `dp_step.train`: nothing is trained."""
  return {name: np.asarray(x) for name, x in training.params.items()}


@pytest.mark.parametrize("secret", [None])
def test_no_two_releases_of_a_run_share_batches_dropout_or_noise(
  tmp_path, monkeypatch, source, secret
):
  """Through the stages, which name their trainings; nothing is trained."""
  given = []

  def noted(training, mechanism, *others):
    given.append(drawn_by(mechanism))
    return as_it_was(training)

  monkeypatch.setattr(dp_step, "train", noted)
  for changes in ({}, {"learning_rate": 0.5}):
    config = run_of(source, secret, **changes)
    direct = dataclasses.replace(config.rows, synthetic=())
    for stage, rows in (
      ("finetune_dp", config.rows),
      ("direct_dp", direct),
    ):
      plan.run(dataclasses.replace(config, rows=rows), tmp_path, stages=[stage])
  releases = 2 * (3 + 2 * 2)
  batches, dropout, noise = zip(*given, strict=True)
  assert len(set(batches)) == len(batches) == releases
  assert len(set(noise)) == len(noise) == releases
  own = [key for key in dropout if key is not None]
  assert len(set(own)) == len(own) == 2 * 3
  assert len(entries(tmp_path)) == releases


def test_what_was_trained_without_privacy_lies_below_private(
  tmp_path, monkeypatch, source
):
  """Nothing is trained; where a result goes follows from what it read."""

  monkeypatch.setattr(dp_step, "train", as_it_was)
  monkeypatch.setattr(
    training_pairs, "train", lambda config, params, *rest, **named: params
  )
  config = run_of(source, 7)
  for stage, rows in (
    ("finetune_dp", {"synthetic": (8.0, math.inf)}),
    ("train_retriever", {"synthetic": (), "direct_dp": (), "original": True}),
  ):
    plan.run(
      dataclasses.replace(
        config, rows=dataclasses.replace(config.rows, **rows)
      ),
      tmp_path,
      stages=[stage],
    )
  found = {
    path.parent.relative_to(tmp_path).as_posix()
    for stage in ("finetune_dp", "train_retriever")
    for path in tmp_path.glob(f"**/{stage}/*/{artifacts.RESULT_NAME}")
  }
  assert found == {
    "finetune_dp/eps8",
    "private/finetune_dp/inf",
    "private/train_retriever/original",
  }
