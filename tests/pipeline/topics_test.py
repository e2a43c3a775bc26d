"""Topic counts and votes: what one record moves, and what the noise hides."""

import dataclasses
import json
import math
import types

import made_up
import numpy as np
import pytest
import tiny_runs
from dp_accounting import pld

from synthq_jax import artifacts
from synthq_jax.cli import guide
from synthq_jax.data import passages
from synthq_jax.generation import allocation
from synthq_jax.pipeline import inputs, noisy_sums, plan, results, workspace
from synthq_jax.pipeline import queries as queries_lib
from synthq_jax.privacy import gaussian, ledger, sampling, statement, terms
from synthq_jax.stages import (
  filter_queries,
  generate,
  topic_counts,
  vote_queries,
)

CLUSTERS, QUERIES = 24, 400
PLACES = np.random.default_rng(0).integers(0, CLUSTERS, QUERIES)
TOPICS = topic_counts.Config(clusters=CLUSTERS, misplaced=1.0, epsilon=3.0)
DELTA = 1e-3
_STEP = 1e-3  # of the oracle's losses


def data(root, places, users=None, num_queries=QUERIES, **changes):
  """Writes train queries whose document is that of their place."""
  fields = {} if users is None else {"users": users}
  private = root / "private/prepare_data"
  private.mkdir(parents=True, exist_ok=True)
  rows = np.ones((len(places), 4), np.int32)
  np.savez(private / "train.npz", documents=places, tokens=rows, **fields)
  return made_up.prepared(
    num_documents=CLUSTERS,
    num_queries={"train": num_queries},
    directory=".",
    **changes,
  )


def counted(root, places, config=TOPICS, *, secret=1, users=None, **changes):
  """Makes the counts where each document is a cluster of its own."""
  space = workspace.Workspace(root, secret_seed=secret)
  made = tiny_runs.make(
    topic_counts.STAGE,
    config,
    space,
    prepared=data(root, places, users, **changes),
    encoder=root,
  )
  stored = np.load(root / made.directory / results.TOPICS_NAME)
  return made, stored["counts"]


def voted(root, places, *, secret=1, users=None, writer=None, **changes):
  """Lets queries vote for written ones, one for each document; returns noise."""
  config = vote_queries.Config(**({"epsilon": 3.0, "threshold": 1.0} | changes))
  prepared = data(root, places, users)
  ids = np.array([f"d{i}" for i in range(CLUSTERS)])
  lines = [{"_id": i, "title": "", "text": f"text of {i}"} for i in ids]
  artifacts.write_atomically(
    root / "corpus.jsonl", "".join(json.dumps(x) + "\n" for x in lines)
  )
  owners = np.arange(CLUSTERS)
  (root / "generate").mkdir(exist_ok=True)
  names = [f"s{i}" for i in owners]
  tokens = np.ones((CLUSTERS, 4), np.int32)
  texts = [f"words of {i}" for i in ids]
  queries_lib.save(root / "generate", names, texts, owners, ids, tokens, owners)
  written = results.SyntheticQueries(
    directory="generate",
    name="public_only",
    statement=writer or statement.none(),
    prefix="",
    sampler="",
    num_documents=CLUSTERS,
    queries_per_document=1,
    num_queries=CLUSTERS,
    removed={},
    gauge=0.0,
    copy_rate=0.0,
    mean_words=1.0,
    examples=(),
  )
  space = workspace.Workspace(root, secret_seed=secret)
  return tiny_runs.make(
    vote_queries.STAGE,
    config,
    space,
    name="voted_public_only",
    prepared=prepared,
    encoder=root,
    synthetic=written,
  )


@pytest.fixture(name="planted", autouse=True)
def _planted(request, monkeypatch):
  """Documents are clusters, and a query votes for its document's."""
  if "finished_run" in request.fixturenames:
    return
  read = passages.Passages(
    np.array([f"d{i}" for i in range(CLUSTERS)]),
    np.ones((CLUSTERS, 4), np.int32),
    np.arange(CLUSTERS),
  )
  monkeypatch.setattr(inputs, "document_tokens", lambda *_: read)
  monkeypatch.setattr(topic_counts, "_clusters", lambda *_: np.arange(CLUSTERS))

  def nearest(task, written, private):
    del written, private
    place = task.folders.root / "private/prepare_data/train.npz"
    return np.load(place)["documents"]

  monkeypatch.setattr(vote_queries, "_nearest", nearest)


@pytest.fixture(name="sums")
def _sums(monkeypatch):
  """What noise was added to, and with how much."""
  seen, noisy = [], gaussian.noisy

  def noted(total, std, key):
    made = noisy(total, std, key)
    seen.append((total, std, made))
    return made

  monkeypatch.setattr(gaussian, "noisy", noted)
  return seen


def totals(root, stage, places, users, sums):
  """The exact vector that a stage adds noise to."""
  make = counted if stage == "topics" else voted
  fields = {} if users is None else {"unit": terms.user(4)}
  if users is not None and stage == "topics":
    fields["num_users"] = {"train": 100}
  if stage == "votes":
    fields = {}
  make(root, places, users=users, **fields)
  total, std, _ = sums[-1]
  return total, std


@pytest.mark.parametrize("stage", ["topics", "votes"])
def test_one_query_moves_one_place_by_one(tmp_path, stage, sums):
  before, std = totals(tmp_path / "a", stage, PLACES, None, sums)
  for place in (0, 5, CLUSTERS - 1):
    more = np.append(PLACES, place)
    after, same = totals(tmp_path / f"b{place}", stage, more, None, sums)
    assert std == same
    moved = after - before
    assert moved[place] == 1.0 and np.abs(moved).sum() == 1.0


@pytest.mark.parametrize("stage", ["topics", "votes"])
def test_one_user_moves_the_sum_by_one_at_most_and_attains_it(
  tmp_path, stage, sums
):
  users = np.arange(QUERIES) // 4
  before, _ = totals(tmp_path / "a", stage, PLACES, users, sums)
  for name, own in {
    "alike": [3, 3, 3, 3],
    "apart": [1, 2, 3, 4],
    "one": [7],
    "three": [5, 5, 6],
  }.items():
    more = np.append(PLACES, own)
    asked = np.append(users, [100] * len(own))
    after, _ = totals(tmp_path / name, stage, more, asked, sums)
    moved = after - before
    assert np.abs(moved).sum() == pytest.approx(1.0)
    assert np.linalg.norm(moved) <= 1 + 1e-12
    assert (np.linalg.norm(moved) > 1 - 1e-9) == (len(set(own)) == 1)


def test_neighbours_differ_through_counts_alone(tmp_path):
  """Equal secret, equal noise: what is left of the difference is the query."""
  made, before = counted(tmp_path / "a", PLACES)
  other, after = counted(tmp_path / "b", np.append(PLACES, 9))
  assert dataclasses.replace(made, seconds=other.seconds) == other
  grid = made.noise / 512
  np.testing.assert_allclose(after - before, np.eye(CLUSTERS)[9], atol=grid)


def test_the_noise_has_the_scale_of_the_statement(tmp_path):
  """Variances of 2,400 numbers: four standard errors reject 10% of the scale."""
  truth, drawn = np.bincount(PLACES, minlength=CLUSTERS), []
  for number in range(100):
    made, noisy = counted(tmp_path / str(number), PLACES, secret=None)
    drawn.append(noisy - truth)
  [entry] = made.statement.ledger
  std = entry.noise_multiplier * entry.l2_sensitivity
  assert made.noise == std and entry.steps == 1 and entry.l2_clip_norm == 1
  noise = np.array(drawn) / std
  ratio, error = (noise**2).mean(), math.sqrt(2 / noise.size)
  assert abs(ratio - 1) < 4 * error < 1 - 0.9**2
  assert abs(noise.mean()) < 4 / math.sqrt(noise.size)


def test_votes_stay_by_their_noisy_numbers_alone(tmp_path, sums):
  made = voted(tmp_path, PLACES % 5)
  [(total, std, noisy)] = sums
  lines = (tmp_path / made.directory / "queries.jsonl").read_text()
  names = [json.loads(line)["_id"] for line in lines.splitlines()]
  assert names == [f"s{i}" for i in np.flatnonzero(noisy > std)]
  assert set(names) >= {f"s{i}" for i in np.flatnonzero(total)}
  assert made.removed["not voted for"] == CLUSTERS - len(names)
  [entry] = made.statement.ledger
  assert std == entry.noise_multiplier * entry.l2_sensitivity
  assert entry.l2_sensitivity == 1


def test_a_zipf_law_is_recovered_within_its_interval(tmp_path):
  """Noise and sampling together, cluster by cluster; an even law is not."""
  rng, number = np.random.default_rng(1), 4000
  law = np.arange(1, CLUSTERS + 1) ** -1.0
  law /= law.sum()
  covered, even = [], []
  for draw in range(25):
    places = rng.choice(CLUSTERS, number, p=law)
    made, noisy = counted(
      tmp_path / str(draw), places, secret=None, num_queries=number
    )
    error = np.sqrt(number * law * (1 - law) + made.noise**2)
    covered.append(np.abs(noisy - number * law) < 1.96 * error)
    even.append(np.abs(noisy - number / CLUSTERS) < 1.96 * error)
  slack = 4 * math.sqrt(0.95 * 0.05 / (25 * CLUSTERS))
  assert abs(np.mean(covered) - 0.95) < slack
  assert np.mean(even) < 0.5


def test_noise_misplaces_no_more_than_is_said(tmp_path):
  distances = []
  for draw in range(40):
    made, noisy = counted(tmp_path / str(draw), PLACES, secret=None)
    shares = np.maximum(noisy, 0) / np.maximum(noisy, 0).sum()
    truth = np.bincount(PLACES, minlength=CLUSTERS) / QUERIES
    distances.append(np.abs(shares - truth).sum() / 2)
  assert made.misplaced / 4 < np.mean(distances) < made.misplaced


def generator(**changes):
  """The statement of a generator's training on as many queries."""
  settings = {
    "sampler": sampling.Poisson.with_margin(
      num_examples=QUERIES, expected_batch_size=40
    ),
    "noise_multiplier": 0.9,
    "steps": 30,
    "delta": DELTA,
  }
  return made_up.claim(
    relation="ADD_OR_REMOVE_ONE", accountant="pld", **(settings | changes)
  )


def composed(statements, delta):
  """Epsilon of all releases by dp_accounting, with nothing of ours between."""
  whole = pld.privacy_loss_distribution.identity(_STEP)
  for entry in {x for one in statements for x in one.ledger}:
    is_all = entry.expected_batch_size == entry.num_examples
    q = 1.0 if is_all else entry.expected_batch_size / entry.num_examples
    one = pld.privacy_loss_distribution.from_gaussian_mechanism(
      entry.noise_multiplier,
      value_discretization_interval=_STEP,
      sampling_prob=q,
    )
    whole = whole.compose(one.self_compose(entry.steps))
  return whole.get_epsilon_for_delta(delta)


def test_counts_and_generator_cost_what_pld_says_and_less_than_the_sum(
  tmp_path,
):
  config = dataclasses.replace(TOPICS, epsilon=0.5, delta=DELTA)
  made, _ = counted(tmp_path, PLACES, config)
  wrote = generator()
  claim = generate._statement(
    made_up.checkpoint(statement=wrote), made_up.prepared(), made
  )
  expected = composed([wrote, made.statement], DELTA)
  assert claim.epsilon == pytest.approx(expected, rel=0.01)
  assert wrote.epsilon < claim.epsilon < wrote.epsilon + 0.5
  assert set(claim.ledger) == {*wrote.ledger, *made.statement.ledger}
  assert "noisy count" in claim.notes[-1]


def test_counts_add_little_to_the_generator_of_the_demo():
  wrote = generator(
    sampler=sampling.Poisson.with_margin(
      num_examples=7375, expected_batch_size=1024
    ),
    noise_multiplier=0.912,
    steps=60,
    delta=None,
  )
  made = noisy_sums.of_split(
    topic_counts.Config(),
    made_up.prepared(num_queries={"train": 7375}),
    "train",
    terms.TOPICS,
  )
  both = noisy_sums.joined([wrote, made.statement("topic_counts/1")])
  assert made.noise_multiplier == pytest.approx(6.095, abs=0.01)
  assert wrote.epsilon == pytest.approx(7.988, abs=0.002)
  assert both.epsilon == pytest.approx(8.022, abs=0.002)


def test_votes_and_generator_together_cost_the_epsilon_of_the_row(tmp_path):
  wrote = generator()
  made = voted(
    tmp_path, PLACES % 3, writer=wrote, epsilon=wrote.epsilon + 3, delta=DELTA
  )
  total = wrote.epsilon + 3
  assert 0.99 * total < made.statement.epsilon <= total
  expected = composed([made.statement], DELTA)
  assert made.statement.epsilon == pytest.approx(expected, rel=0.01)
  alone = voted(tmp_path / "alone", PLACES % 3, epsilon=3.0, delta=DELTA)
  [entry] = [x for x in made.statement.ledger if x not in wrote.ledger]
  assert entry.noise_multiplier < alone.statement.ledger[0].noise_multiplier
  with pytest.raises(ValueError, match="spent before"):
    voted(tmp_path / "none", PLACES, writer=wrote, epsilon=wrote.epsilon)


@pytest.mark.parametrize("make", [counted, voted])
def test_the_ledger_has_the_promise_before_there_is_noise(
  tmp_path, monkeypatch, make
):
  def stopped(*arguments, **fields):
    raise RuntimeError("stopped")

  with monkeypatch.context() as patch:
    patch.setattr(gaussian, "normal_numbers", stopped)
    with pytest.raises(RuntimeError, match="stopped"):
      make(tmp_path, PLACES % 3, secret=None)
  path = tmp_path / "private" / ledger.NAME
  [(name, promised)] = ledger.read(path).items()
  assert name.startswith(("topic_counts/", "vote_queries/"))
  assert promised.epsilon <= 3.0
  make(tmp_path, PLACES % 3, secret=None)
  assert list(ledger.read(path)) == [name]  # it went on with the same


def test_few_queries_are_refused_with_a_number_that_does(tmp_path):
  config = topic_counts.Config(clusters=CLUSTERS)
  with pytest.raises(ValueError, match="queries would do") as refused:
    counted(tmp_path, PLACES, config)
  enough = int(
    str(refused.value).partition("where ")[2].split()[0].replace(",", "")
  )
  made, _ = counted(tmp_path, PLACES, config, num_queries=enough)
  assert made.misplaced <= config.misplaced
  with pytest.raises(ValueError, match="queries would do"):
    counted(tmp_path, PLACES, config, num_queries=int(0.98 * enough))


def test_votes_that_noise_outvotes_are_refused_with_a_number(tmp_path):
  config = vote_queries.Config(threshold=1.0)
  with pytest.raises(ValueError, match="would do") as refused:
    vote_queries._check_noise(config, 5.0, 10_000, 400)
  enough = int(
    str(refused.value).partition("; about ")[2].split()[0].replace(",", "")
  )
  vote_queries._check_noise(config, 5.0, 10_000, enough)
  with pytest.raises(ValueError, match="would do"):
    vote_queries._check_noise(config, 5.0, 10_000, enough - 10)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_settings_that_promise_nothing_are_refused(epsilon):
  for config in (topic_counts.Config, vote_queries.Config):
    with pytest.raises(ValueError, match="epsilon"):
      config(epsilon=epsilon)


def with_rows(base, **fields):
  return dataclasses.replace(base, **fields)


def test_what_publishes_topics_without_noise_is_refused(finished_run):
  config = with_rows(finished_run.config, generate=generate.Config(topics=True))
  asked = made_up.prepared(num_asked=5)
  run = types.SimpleNamespace(config=config, prepared=asked)
  with pytest.raises(ValueError, match="WRITTEN_FOR='train'"):
    topic_counts.check(run)


def test_rows_that_cannot_be_voted_on_are_refused(finished_run):
  with pytest.raises(ValueError, match=r"Rows\.voted"):
    plan.Rows(voted=("eps3",))
  config = with_rows(finished_run.config, rows=plan.Rows(voted=("eps8",)))
  with pytest.raises(ValueError, match="costs"):
    vote_queries.check(types.SimpleNamespace(config=config))


def test_settings_without_topics_and_votes_are_written_as_before(finished_run):
  for config in (
    generate.Config(),
    filter_queries.Config(),
    plan.Rows(),
  ):
    assert not {"topics", "voted"} & set(artifacts.to_json(config))
  root = finished_run.root
  for name in ("topic_counts", "vote_queries"):
    assert not (root / name).exists()
    assert not (root / results.PRIVATE / name).exists()


def queries(root, stage, name):
  return [
    json.loads(line)
    for line in (root / stage / name / "queries.jsonl").read_text().splitlines()
  ]


def test_a_run_writes_and_draws_by_topics_and_votes(finished_run, tmp_path):
  """Shares are the noisy ones, the public checkpoint's queries stay as before."""
  root, base = finished_run.copy(tmp_path), finished_run.config
  config = with_rows(
    base,
    generate=dataclasses.replace(base.generate, topics=True),
    filter_queries=filter_queries.Config(topics=True),
    topic_counts=topic_counts.Config(clusters=4, epsilon=5.0, misplaced=1.0),
    vote_queries=vote_queries.Config(epsilon=14.0, threshold=1.0),
    rows=dataclasses.replace(base.rows, voted=("public_only", "eps8")),
  )
  plan.run(config, root, stages=["vote_queries"], progress=False)
  before = queries(finished_run.root, "generate", "public_only")
  assert queries(root, "generate", "public_only") == before
  assert not list((root / "topic_counts").glob("state*"))
  topics = artifacts.load(root / "topic_counts", results.TopicCounts)
  stored = np.load(root / topics.directory / results.TOPICS_NAME)
  drawn = queries(root, "filter_queries", "eps8")
  names = [one["_id"] for one in drawn]
  assert len(set(names)) == len(names)
  owners = np.load(root / "filter_queries/eps8/tokens.npz")["documents"]
  clusters = stored["clusters"]
  there = np.isin(np.arange(4), clusters[owners])
  expected = allocation.apportion(
    np.where(there, stored["counts"], 0.0), len(drawn)
  )
  found = np.bincount(clusters[owners], minlength=4)
  assert (found == expected).all()
  wrote, kept = (
    artifacts.load(root / stage / "eps8", results.SyntheticQueries).statement
    for stage in ("generate", "filter_queries")
  )
  alone = artifacts.load(root / "finetune_dp/eps8", results.Checkpoint)
  assert set(wrote.ledger) == {
    *alone.statement.ledger,
    *topics.statement.ledger,
  }
  assert wrote.ledger == kept.ledger and wrote.epsilon == kept.epsilon
  assert wrote.epsilon > alone.statement.epsilon
  for name in ("public_only", "eps8"):
    made = artifacts.load(
      root / f"vote_queries/voted_{name}", results.SyntheticQueries
    )
    assert made.statement.epsilon <= 14.0
    candidates = {
      (x["_id"], x["text"])
      for x in queries(
        root, "filter_queries" if name == "eps8" else "generate", name
      )
    }
    chosen = queries(root, "vote_queries", f"voted_{name}")
    assert {(x["_id"], x["text"]) for x in chosen} <= candidates
  said = "\n".join(
    guide._price(
      config,
      tmp_path / "none",
      ("finetune_dp", "topic_counts", "vote_queries"),
    )
  )
  assert "epsilon of the topic counts: 5, released" in said
  assert "epsilon of synthetic_voted_public_only: 14, with what" in said


def test_more_users_mean_the_words_of_users(tmp_path):
  prepared = made_up.prepared(unit=terms.user(4))
  space = workspace.Workspace(tmp_path, secret_seed=1)
  for base in (terms.TOPICS, terms.VOTES):
    words = noisy_sums.words(base, terms.WEIGHED, space, prepared)
    assert words.unit == terms.user(4)
    assert terms.WEIGHED in words.assumptions
    assert (
      "How many users and private queries there are." in words.not_protected
    )
