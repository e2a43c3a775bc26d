"""People as the unit: what is prepared of them, what a training draws of them."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import made_up
import numpy as np
import pytest
import random_t5
import small_data
import tiny_runs

from synthq_jax.models import t5_checkpoints
from synthq_jax.optim import users
from synthq_jax.privacy import joint, ledger, wording
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import (
  noisy_results,
  private_training,
  results,
  rows,
  system_results,
  workspace,
)
from synthq_jax.stages import (
  direct_dp,
  finetune_dp,
  learn_adapter,
  learn_to_rank,
  plan,
  prepare_data,
  release_scores,
  static_encoder,
)
from synthq_jax.storage import artifacts
from synthq_jax.training import dp_step

COUNT, DOCUMENTS = 40, 64
HEAVY = "heavy-user"
WHO = [f"person-{i}" for i in range(COUNT)]
KINDS = ("log", "jsonl", "beir")


def lines(*, without=None, extra=()):
  """Who asked what about which document: user i has 1 + i % 4 queries."""
  found = [
    (who, f"ask {number} of {who}", (7 * place + number) % DOCUMENTS)
    for place, who in enumerate(WHO)
    for number in range(1 + place % 4)
  ]
  found += [(HEAVY, f"ask {i} always", i % DOCUMENTS) for i in range(60)]
  return [*extra, *(line for line in found if line[0] != without)]


def write(place, kind, asked):
  """Writes a log; BEIR's declares two splits, which users are in both of."""
  texts = [small_data.document(i) for i in range(DOCUMENTS)]
  if kind == "beir":
    judged = {"train": [], "test": []}
    for number, (_, text, d) in enumerate(asked):
      split = ("train", "test")[len(text) * number % 2]
      judged[split].append((text.replace(" ", "_"), f"d{d}", 1))
    small_data.write_beir(
      place, {f"d{i}": text for i, text in enumerate(texts)}, {}, judged
    )
    rows = [
      {
        "_id": text.replace(" ", "_"), "text": text,
        "metadata": {"user_id": who},
      }
      for who, text, _ in asked
    ]  # fmt: skip
    small_data.write_lines(place / "queries.jsonl", map(json.dumps, rows))
    return f"beir:{place}"
  if kind == "log":
    return small_data.write_user_log(place, asked, DOCUMENTS)
  rows = [
    {"query": text, "user": who, "document": texts[d]} for who, text, d in asked
  ]
  small_data.write_lines(place / "log.jsonl", map(json.dumps, rows))
  return f"jsonl:{place / 'log.jsonl'}"


def prepared(root, kind, asked, *, most=3, secret=7, **changes):
  config = prepare_data.Config(
    source=write(root / "data", kind, asked),
    unit="user",
    queries_per_user=most,
    vocabulary="train",
    vocab_size=60,
    document_length=16,
    query_length=24,
    public_test_documents=20,
    **changes,
  )
  space = workspace.Workspace(root / "run", secret_seed=secret)
  return tiny_runs.make(prepare_data.STAGE, config, space), space


def owners(space):
  """Returns user -> (sides, queries) of what was prepared."""
  folder = space.private("prepare_data")
  read = map(json.loads, (folder / "queries.jsonl").open())
  user_of = {line["_id"]: line["client"] for line in read}
  found = {}
  for split in ("train", "dev", "test"):
    with np.load(folder / f"{split}.npz") as stored:
      ids, numbers = stored["ids"].tolist(), stored["users"].tolist()
    assert len(set(zip(numbers, map(user_of.get, ids), strict=True))) == len(
      set(numbers)
    )
    for query in ids:
      sides, queries = found.setdefault(user_of[query], (set(), set()))
      sides.add(split)
      queries.add(query)
  return found


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory):
  """Returns what is prepared of everybody's log of a kind: where, and what."""

  @functools.cache
  def made(kind):
    root = tmp_path_factory.mktemp(kind)
    return root, *prepared(root, kind, lines())

  return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_is_on_one_side_with_as_many_queries_as_are_kept(whole, kind):
  _, made, space = whole(kind)
  found = owners(space)
  assert found.keys() == {*WHO, HEAVY}
  assert len(found[HEAVY][1]) == 3
  for place, who in enumerate(WHO):
    sides, queries = found[who]
    assert (len(sides), len(queries)) == (1, min(1 + place % 4, 3))
  assert str(made.unit) == "user with up to 3 queries"
  assert made.queries_per_user == 3
  for split, number in made.num_users.items():
    own = [queries for sides, queries in found.values() if split in sides]
    assert (len(own), sum(map(len, own))) == (number, made.num_queries[split])
  assert made.part("train").startswith("users, key ")


def shareable(root):
  folder = root / "run"
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in sorted(folder.rglob("*"))
    if path.is_file()
    and not results.is_private_path(str(path.relative_to(folder)))
  }


@pytest.mark.parametrize("kind", ["log", "beir"])
def test_one_user_less_changes_no_shareable_byte_and_no_other_record(
  whole, tmp_path, kind
):
  """The heavy one, whose queries share words and documents with all."""
  root, _, everybody = whole(kind)
  _, fewer = prepared(tmp_path, kind, lines(without=HEAVY))
  ours, theirs = shareable(root), shareable(tmp_path)
  assert {"prepare_data/corpus.jsonl", "prepare_data/vocabulary.model"} <= set(
    ours
  )
  assert not [name for name in ours if ours[name] != theirs.get(name)]
  assert not any(b"person-" in x or HEAVY.encode() in x for x in ours.values())
  left = owners(everybody)
  del left[HEAVY]
  assert left == owners(fewer)


def test_words_of_another_user_take_no_query_out(tmp_path):
  """Readers of logs leave words of an earlier side out: not of other people."""
  same = [(f"twin-{i}", "the very same words", i) for i in range(30)]
  _, space = prepared(tmp_path, "log", lines(extra=same))
  assert sum(name.startswith("twin") for name in owners(space)) == 30


def test_missing_user_ids_are_refused_in_a_line(tmp_path):
  nobody = [("", "ask what nobody asked", 1)]
  with pytest.raises(ValueError, match="user id with every query") as error:
    prepared(tmp_path, "log", lines(extra=nobody))
  assert "\n" not in str(error.value) and "nobody asked" not in str(error.value)


@pytest.mark.parametrize("source", ["environment_docs", "msmarco:folder"])
def test_sources_without_users_are_refused(tmp_path, source):
  config = prepare_data.Config(source=source, unit="user", vocabulary="train")
  space = workspace.Workspace(tmp_path, secret_seed=1)
  with pytest.raises(ValueError, match="of UNIT='user' must be beir:DIR"):
    tiny_runs.make(prepare_data.STAGE, config, space)


@pytest.mark.parametrize("kind", KINDS)
def test_users_are_those_of_the_field_that_the_statement_names(tmp_path, kind):
  source = write(tmp_path / "data", kind, lines())
  space = workspace.Workspace(tmp_path / "run", secret_seed=1)
  said = (
    "expected jsonl or log with"
    if kind == "beir"
    else 'user of each query under "account"'
  )
  with pytest.raises(ValueError, match=said) as error:
    config = prepare_data.Config(
      source=source, unit="user", user_field="account", vocabulary="train"
    )
    tiny_runs.make(prepare_data.STAGE, config, space)
  assert "\n" not in str(error.value)


# Whole runs.


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory):
  """Returns settings of a run on a log of users, and where it is finished."""
  place = tmp_path_factory.mktemp("users")
  base = tiny_runs.config(write(place / "data", "log", lines()))
  config = dataclasses.replace(
    base,
    checkpoint=random_t5.save(place / "t5"),
    prepare_data=dataclasses.replace(
      base.prepare_data, unit="user", queries_per_user=3
    ),
    finetune_dp=dataclasses.replace(base.finetune_dp, batch_size=8),
    release_scores=release_scores.Config(enabled=True, widest=10.0),
    static_encoder=static_encoder.Config(
      dim=4, steps=2, warmup_steps=1, batch_size=8
    ),
    learn_to_rank=learn_to_rank.Config(steps=2),
    learn_adapter=learn_adapter.Config(steps=2, pool=4, candidates=8),
    rows=plan.Rows(
      ltr=("untrained",), adapted=(8.0,), original=False, public_only=False
    ),
  )
  plan.run(config, place / "run")
  return config, place / "run"


@pytest.mark.slow
def test_a_run_protects_users_from_log_to_page(run):
  """Generator, direct DP and released scores have one claim, for one user."""
  _, root = run
  folder = root / "private/prepare_data"
  data = artifacts.load(folder, results.PreparedData)
  unit, train = unit_lib.user(3), data.num_users["train"]
  assert data.unit == unit and data.num_queries["train"] > train
  generator = artifacts.load(root / "finetune_dp/eps8", results.Checkpoint)
  direct = artifacts.load(
    root / "train_retriever/direct_dp_eps8", results.Checkpoint
  )
  noisy = artifacts.load(root / "release_scores", results.ReleasedScores)
  kind = system_results.Ranking
  weights = artifacts.load(root / "learn_to_rank/untrained", kind)
  adapter = artifacts.load(
    root / "learn_adapter/adapter_eps8", system_results.Adapter
  )
  for drawn in (
    *weights.statement.ledger,
    *adapter.statement.ledger,
  ):  # every query in every step, noise for three
    queries = (data.num_queries["train"], 3)
    assert (drawn.num_examples, drawn.group_size) == queries
    assert drawn.expected_batch_size == drawn.num_examples
  assert weights.statement.unit == adapter.statement.unit == unit
  assert {"drawn_queries", "judged"} <= {*weights.statement.assumptions}
  assert "kept" not in weights.statement.assumptions
  promises = [one.statement for one in (generator, direct, noisy)]
  [drawn], [pairs], [scored] = (one.ledger for one in promises)
  for one in promises:
    assert (one.unit, one.relation) == (unit, "ADD_OR_REMOVE_ONE")
    assert one.epsilon <= 8.0 and one.delta == 1 / (2 * train)
  assert (drawn.num_examples, drawn.group_size) == (train, 1)
  queries = (data.num_queries["train"], 3)
  assert (pairs.num_examples, pairs.group_size) == queries
  assert scored.num_examples == data.num_users["test"]
  number = len(noisy.rows)
  assert scored.l2_sensitivity == pytest.approx(3 * number**0.5 / 2)
  parts = [data.part("train"), data.part("train"), data.part("test")]
  assert [x.part for x in (drawn, pairs, scored)] == parts and all(parts)
  # Another user pays for the test scores: the larger epsilon, not the sum.
  both = joint.claim([generator.statement, noisy.statement])
  assert both.unit == unit
  assert both.epsilon == pytest.approx(generator.statement.epsilon, abs=1e-9)
  page = (root / "report/report.md").read_text()
  assert "One user with up to 3 queries: when one user" in page
  assert "one query:" not in page.lower()
  names = [
    path.relative_to(root)
    for path in root.rglob("*")
    if path.is_file()
    and not results.is_private_path(str(path.relative_to(root)))
    and (b"person-" in (told := path.read_bytes()) or HEAVY.encode() in told)
  ]
  assert not names


# What trainings draw.

NUM, USERS, MOST = 90, 30, 4


def of_users(most=MOST, **changes):
  number = {"train": USERS if most > 1 else NUM, "test": 25}
  return made_up.prepared(
    unit=unit_lib.user(most),
    num_users=number,
    num_queries={"train": NUM, "test": 60},
    **changes,
  )


def promised(root, data, records, *, epsilon=8.0, **changes):
  """Returns the statement of a training that takes no step."""
  config = private_training.Config(batch_size=6, steps=20)
  settings = private_training.Settings(
    config=config, epsilon=epsilon, mechanism="nothing", **changes
  )
  clipped = types.SimpleNamespace(
    l2_clip_norm=0.1, sensitivity=lambda relation: 0.1
  )
  space = workspace.Workspace(root, secret_seed=5)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(dp_step, "train", lambda training, *others: training.params)
    _, fields = private_training.train(
      made_up.task(space, config, data=data),
      settings,
      dp_step.Training(grad_fn=clipped, params={}, records=records),
    )
  statement = fields["statement"]
  assert ledger.read(space.private(ledger.NAME)) == {
    "stage/name/digest": statement
  }
  return statement


def test_users_that_are_drawn_are_the_records_of_the_claim(tmp_path):
  data = of_users()
  records = {"x": np.zeros((USERS, MOST, 5))}
  one = promised(tmp_path, data, records)
  (release,) = one.ledger
  assert str(one.unit) == "user with up to 4 queries"
  assert (release.num_examples, release.group_size) == (USERS, 1)
  assert one.delta == 1 / (2 * USERS)
  assert "drawn_users" in one.assumptions


def test_queries_that_are_drawn_are_accounted_for_as_groups(tmp_path):
  records = {"x": np.zeros((NUM, 5))}
  one = promised(tmp_path, of_users(), records, epsilon=1.0, num_users=USERS)
  (release,) = one.ledger
  assert (release.num_examples, release.group_size) == (NUM, MOST)
  assert release.num_units == USERS
  assert one.delta == 1 / (2 * USERS)
  assert one.epsilon <= 1.0
  assert "drawn_queries" in one.assumptions
  alone = promised(tmp_path / "alone", made_up.prepared(), records, epsilon=1.0)
  assert release.noise_multiplier > 2 * alone.ledger[0].noise_multiplier


@pytest.mark.parametrize("num_users", [None, NUM])
def test_one_query_of_each_user_costs_what_one_query_does(tmp_path, num_users):
  records = {"x": np.zeros((NUM, 5))}
  plain = promised(tmp_path / "plain", made_up.prepared(), records)
  made = promised(tmp_path / "users", of_users(1), records, num_users=num_users)
  assert dataclasses.replace(made.ledger[0]) == plain.ledger[0]
  assert (made.epsilon, made.delta) == (plain.epsilon, plain.delta)


CONFIG = random_t5.config(vocab_size=23)


@functools.cache
def t5_sum(strategy="bookkeeping", *, scan_layers=False):
  """The clipped sum of a small T5 over users with one, three and two queries."""
  rng = np.random.default_rng(0)
  counts, number = [1, 3, 2], 6
  records = {
    "inputs": rng.integers(3, 23, (number, 5)).astype(np.int32),
    "targets": rng.integers(3, 23, (number, 4)).astype(np.int32),
  }
  who = np.repeat(np.arange(len(counts)), counts)
  config = finetune_dp.Config(
    clip_norm=0.3, strategy=strategy, scan_layers=scan_layers
  )
  params = t5_checkpoints.flatten(random_t5.params(CONFIG))
  grad_fn = finetune_dp.grad_fn(config, {}, CONFIG, of_users=True)
  batch = users.grouped(records, who, 3)
  total, aux = jax.jit(grad_fn)(params, batch)
  return params, records, who, total, aux


def test_a_t5_clips_the_mean_gradient_of_a_user_in_one_backward_pass():
  params, records, who, total, aux = t5_sum()

  def loss(params, own):
    return jnp.mean(
      finetune_dp.loss_fn(params, own, public={}, model_config=CONFIG)
    )

  gradient = jax.jit(jax.grad(loss))
  expected = jax.tree.map(np.zeros_like, params)
  for user in range(3):
    own = gradient(params, {k: v[who == user] for k, v in records.items()})
    norm = np.sqrt(sum(np.sum(np.square(v)) for v in own.values()))
    np.testing.assert_allclose(aux.norms[user], norm, rtol=1e-3)
    scale = min(1, 0.3 / norm)
    expected = jax.tree.map(lambda a, b, s=scale: a + s * b, expected, own)
  for name, value in expected.items():
    np.testing.assert_allclose(
      total[name], value, rtol=0, atol=2e-3 * np.abs(value).max()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("strategy", "scan_layers"), [("vmap", False), ("bookkeeping", True)]
)
def test_every_form_of_the_step_clips_users_alike(strategy, scan_layers):
  *_, expected, ours = t5_sum()
  *_, found, theirs = t5_sum(strategy, scan_layers=scan_layers)
  np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-3)
  for name, value in expected.items():
    scale = np.abs(value).max()
    np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-3 * scale)


def run_of(data, **changes):
  config = plan.RunConfig(**changes)
  return types.SimpleNamespace(
    prepared=data,
    plan=rows.Plan(config=config, stages=plan.STAGES),
    config=config,
    check_vocabulary=lambda start: None,
    start=None,
  )


@pytest.fixture(autouse=True)
def _documents_are_not_read(monkeypatch):
  """Runs of `run_of` have no folder."""
  monkeypatch.setattr(finetune_dp, "_check_prefix", lambda run: None)


def test_a_batch_of_more_users_than_there_are_is_refused():
  config = finetune_dp.Config(batch_size=USERS + 1)
  message = "30, the number of private train users, got 31"
  with pytest.raises(ValueError, match=message):
    finetune_dp.check(run_of(of_users(), finetune_dp=config))
  fewer = dataclasses.replace(config, batch_size=USERS)
  finetune_dp.check(run_of(of_users(), finetune_dp=fewer))


def test_delta_must_be_below_one_over_the_users():
  config = finetune_dp.Config(batch_size=9, delta=1 / USERS)
  with pytest.raises(ValueError, match=r"n private train users\).*a user to"):
    finetune_dp.check(run_of(of_users(), finetune_dp=config))


def test_the_text_alone_is_no_unit_beside_users():
  config = direct_dp.Config(
    method="row", negatives="batch", unit="query", batch_size=8
  )
  with pytest.raises(ValueError, match="unit must be 'pair' for UNIT='user'"):
    direct_dp.check(run_of(of_users(), direct_dp=config))


# Released scores.


def test_intervals_of_released_scores_know_how_many_queries_a_user_has():
  means = np.array([[0.3], [0.6]])
  known = {"noise": 0.01, "number": 60, "confidence": 0.95, "most": MOST}
  groups = [
    types.SimpleNamespace(row=made_up.row(x), label=x, statement=None)
    for x in "ab"
  ]
  config = release_scores.Config(enabled=True)
  rows = release_scores._rows(
    config, groups, means, noise=0.01, number=60, most=MOST
  )
  assert rows[0].means == {"nDCG@10": noisy_results.mean(0.3, **known)}
  scores = types.SimpleNamespace(
    rows=rows,
    statement=types.SimpleNamespace(unit=unit_lib.user(MOST)),
    **{"noise": 0.01, "num_queries": 60, "confidence": 0.95},
  )
  [pair] = noisy_results.pairs(scores, "nDCG@10")
  assert pair.less == noisy_results.difference(0.6, 0.3, **known)
  known["most"] = 1
  assert pair.less != noisy_results.difference(0.6, 0.3, **known)


@pytest.mark.parametrize("method", ["example", "batch"])
def test_the_words_of_direct_training_say_what_is_clipped(tmp_path, method):
  """Queries are clipped one by one in two methods alone."""
  config = direct_dp.Config(method=method)
  settings = dataclasses.replace(
    direct_dp._settings(config, 8.0), num_users=USERS
  )
  space = workspace.Workspace(tmp_path, secret_seed=1)
  words = private_training._terms(settings, space, of_users())
  one_by_one = method in ("example", "row")
  drawn = "drawn_queries" if one_by_one else "drawn_pairs"
  said = wording.write(words.assumptions[0], words.unit)
  assert words.assumptions[0] == drawn
  assert ("clipped one by one" in said) == one_by_one
  assert "noise is for all of a user's together" in said
