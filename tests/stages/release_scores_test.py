"""Scores that are released: what one query moves, and what the noise hides."""

import contextlib
import dataclasses
import json
import math
import re
import types

import jax
import made_up
import numpy as np
import pytest
import tiny_runs
from scipy import stats

from synthq_jax import intervals
from synthq_jax.privacy import (
  accounting,
  gaussian,
  joint,
  ledger,
  statement,
)
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import (
  noisy_results,
  results,
  stage,
  workspace,
)
from synthq_jax.stages import evaluate, plan, release_scores
from synthq_jax.storage import artifacts

NDCG, RECALL = "nDCG@10", "R@10"
DIVISION = "words, seed 0"


def settings(**changes):
  chosen = {"enabled": True, "measures": (NDCG,), "widest": 10.0}
  return release_scores.Config(**(chosen | changes))


def scored(space, name, table, **changes):
  """Writes the values of a row, measure -> a value for each query."""
  directory = f"private/evaluate/test/{name}"
  values = {
    measure: {f"q{i}": float(v) for i, v in enumerate(column)}
    for measure, column in table.items()
  }
  artifacts.write_atomically(
    space.root / directory / "per_query.json", json.dumps(values)
  )
  fields = {
    "directory": directory,
    "row": made_up.row(name),
    "label": name,
    "test_set": "test",
    "private": True,
    "measures": {m: intervals.Interval(mean=0, low=0, high=0) for m in table},
    "num_queries": len(next(iter(table.values()))),
    "traps": (),
  }
  return results.Evaluation(**(fields | changes))


def released(root, tables, config, *, secret=1, digest="digest", division=""):
  """Runs the stage over rows, name -> measure -> values; returns its result."""
  space = workspace.Workspace(root, secret_seed=secret)
  rows = [scored(space, name, x) for name, x in tables.items()]
  numbers = {"train": 9, "test": rows[0].num_queries}
  return tiny_runs.make(
    release_scores.STAGE,
    config,
    space,
    digest=digest,
    inputs=release_scores.Inputs(
      prepared=made_up.prepared(division=division, num_queries=numbers),
      evaluations=rows,
      systems=(),
    ),
  )


def sums(made):
  """The noisy sums behind what was released, one for each row and measure."""
  means = np.array([[m.here.mean for m in x.means.values()] for x in made.rows])
  return (means.ravel() - 0.5) * made.num_queries


def named(table, measures=(NDCG,)):
  """Rows by name, of an array [query, row x measure]."""
  parts = table.reshape(len(table), -1, len(measures))
  return {
    f"row{i}": {m: parts[:, i, j] for j, m in enumerate(measures)}
    for i in range(parts.shape[1])
  }


@pytest.mark.parametrize("measures", [(NDCG,), (NDCG, RECALL)])
def test_one_query_attains_the_sensitivity_and_none_exceeds_it(
  tmp_path, measures
):
  """Equal secret and digest: equal noise, so that sums differ by the query."""
  rng, size = np.random.default_rng(0), 3 * len(measures)
  config = settings(measures=measures, delta=1e-3, epsilon=5.0)
  table = rng.uniform(0.3, 0.7, (200, size))

  def of(values, where):
    return released(tmp_path / where, named(values, measures), config)

  before = of(table, "before")
  [entry] = before.statement.ledger
  assert entry.l2_sensitivity == pytest.approx(math.sqrt(size) / 2)
  corners = [np.zeros(size), np.ones(size), np.arange(size) % 2]
  moved = []
  for number, row in enumerate([*corners, *rng.uniform(0, 1, (20, size))]):
    after = of(np.vstack([table, row]), f"after{number}")
    assert after.statement.ledger[0].noise_multiplier == entry.noise_multiplier
    moved.append(np.linalg.norm(sums(after) - sums(before)))
  grid = math.sqrt(size) * entry.noise_multiplier * entry.l2_sensitivity / 1024
  np.testing.assert_allclose(moved[:3], entry.l2_sensitivity, atol=grid)
  assert max(moved) <= entry.l2_sensitivity + grid


def test_the_noise_has_the_scale_of_the_statement(tmp_path):
  """Variances of 2,400 numbers: four standard errors reject 10% of the scale."""
  table = np.random.default_rng(0).uniform(0.4, 0.6, (300, 24))
  config, drawn = settings(epsilon=3.0), []
  for number in range(100):
    made = released(tmp_path / str(number), named(table), config, secret=None)
    drawn.append(sums(made) - (table - 0.5).sum(axis=0))
  [entry] = made.statement.ledger
  std = entry.noise_multiplier * entry.l2_sensitivity
  assert made.noise == pytest.approx(std / 300)
  noise = np.array(drawn) / std
  ratio, error = (noise**2).mean(), math.sqrt(2 / noise.size)
  assert abs(ratio - 1) < 4 * error < 1 - 0.9**2
  assert abs(noise.mean()) < 4 / math.sqrt(noise.size)
  for first, second in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
    assert abs((first * second).mean()) < 4 / math.sqrt(first.size)


def covered(interval, truth):
  return interval.low <= truth <= interval.high


def test_intervals_cover_as_they_say_also_at_the_largest_variance(tmp_path):
  """Rows of zeros and ones; `other` is good exactly where BM25 is not."""
  rng, number, chances = np.random.default_rng(0), 400, (0.5, 0.1)
  config, hits = settings(epsilon=2.0), {}
  for draw in range(250):
    lexical = rng.uniform(size=number) < chances[0]
    table = {
      "bm25": {NDCG: lexical},
      "other": {NDCG: ~lexical},
      "rare": {NDCG: rng.uniform(size=number) < chances[1]},
    }
    made = released(tmp_path / str(draw), table, config, secret=None)
    truth = {"bm25": 0.5, "other": 0.5, "rare": 0.1}
    for row in made.rows:
      here = table[row.name][NDCG].mean()
      hits.setdefault("here", []).append(covered(row.means[NDCG].here, here))
      hits.setdefault(f"beyond {row.name}", []).append(
        covered(row.means[NDCG].beyond, truth[row.name])
      )
      for over in row.over_bm25.values():
        hits.setdefault("over", []).append(
          covered(over.here, here - lexical.mean())
        )
        hits.setdefault(f"over {row.name}", []).append(
          covered(over.beyond, truth[row.name] - 0.5)
        )
  for name, seen in hits.items():
    error = math.sqrt(0.95 * 0.05 / len(seen))
    # Differences of a run share the noise of BM25, and are not independent.
    assert np.mean(seen) > 0.95 - 4 * error, name
    if name in ("here", "over", "beyond bm25", "over other"):
      assert np.mean(seen) < 0.95 + 4 * error, name


@pytest.mark.parametrize("bad", [math.nan, 2.0])
def test_values_outside_of_the_cube_move_the_sum_no_further_and_stop_nothing(
  tmp_path, bad
):
  """A release that stops for one query tells of it without noise."""
  column = np.full((100, 1), 0.25)
  quiet = release_scores.compute_centred_sum(column)
  column[7] = bad
  assert (
    np.abs(release_scores.compute_centred_sum(column) - quiet - 0.25) <= 0.5
  )
  released(tmp_path, {"a": {NDCG: column[:, 0]}}, settings())


def test_a_row_says_what_its_system_cost():
  claim = made_up.claim("1")
  assert release_scores._epsilon(claim) == claim.epsilon
  assert release_scores._epsilon(None) is None
  public = statement.none(public=("documents",))
  assert release_scores._epsilon(public) is None
  none = dataclasses.replace(claim, epsilon=0.0)
  assert release_scores._epsilon(none) == 0.0


def test_noise_that_would_hide_the_scores_is_refused(tmp_path):
  config = release_scores.Config(enabled=True)
  with pytest.raises(ValueError, match="are too few queries"):
    released(tmp_path, named(np.full((20, 10), 0.5)), config)
  made = released(tmp_path, named(np.full((2000, 10), 0.5)), config)
  assert 1.96 * made.noise <= config.widest


def test_an_epsilon_without_a_ledger_is_refused(tmp_path):
  made = released(tmp_path, named(np.full((99, 2), 0.5)), settings())
  for claim in (statement.none(), statement.non_private()):
    with pytest.raises(ValueError, match="ledger"):
      dataclasses.replace(made, statement=claim)


def test_the_ledger_has_the_promise_before_there_is_noise(
  tmp_path, monkeypatch
):
  def stopped(*arguments, **fields):
    raise RuntimeError("stopped")

  table = named(np.full((99, 2), 0.5))
  with monkeypatch.context() as patch:
    patch.setattr(gaussian, "normal_numbers", stopped)
    with pytest.raises(RuntimeError, match="stopped"):
      released(tmp_path, table, settings(), secret=None)
  path = tmp_path / "private" / ledger.NAME
  [(name, promised)] = ledger.read(path).items()
  made = released(tmp_path, table, settings(), secret=None)
  assert (made.statement, [name]) == (promised, list(ledger.read(path)))
  again = released(tmp_path, table, settings(), secret=None)
  assert len(ledger.read(path)) == 2  # another release, with noise of its own
  assert not np.allclose(sums(again), sums(made), atol=1e-6)


def test_an_interrupted_release_of_other_values_has_other_noise(
  tmp_path, monkeypatch
):
  """Equal noise on both would tell the difference exactly."""
  kept = []
  normal = gaussian.normal_numbers

  def noted(key, shape):
    kept.append(np.asarray(normal(key, shape)))
    raise RuntimeError("stopped")

  monkeypatch.setattr(gaussian, "normal_numbers", noted)
  for value in (0.5, 0.5, 0.25):
    with pytest.raises(RuntimeError, match="stopped"):
      table = named(np.full((99, 2), value))
      released(tmp_path, table, settings(), secret=None)
  assert (kept[0] == kept[1]).all() and (kept[0] != kept[2]).any()


def promised(config, number, size):
  data = made_up.prepared(num_queries={"train": number, "test": number})
  return release_scores.make_claim(config, data, size=size)


@pytest.mark.parametrize("change", ["noise_multiplier", "l2_sensitivity"])
def test_one_sum_at_two_scales_has_two_noises(tmp_path, monkeypatch, change):
  """One noise at two scales is two equations: the sum follows."""
  drawn, normal = [], gaussian.normal_numbers

  def noted(key, shape):
    drawn.append(np.asarray(normal(key, shape)))
    raise RuntimeError("stopped")

  monkeypatch.setattr(gaussian, "normal_numbers", noted)
  task = stage.Task(
    result_path="stage/name",
    digest="digest",
    settings=None,
    inputs=None,
    folders=workspace.Workspace(tmp_path),
  )
  promise = promised(settings(), 99, 2)
  # So little that the ledger may take the two for one release.
  louder = {change: 1.0005 * getattr(promise, change)}
  for one in (promise, promise, dataclasses.replace(promise, **louder)):
    with contextlib.suppress(RuntimeError, ValueError):
      release_scores.draw(task, one, np.array([3.0, 4.0]))
  assert len(drawn) == 3, "the ledger had to refuse it"
  assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).all()


@pytest.mark.parametrize("most", [1, 4, 9])
def test_a_user_moves_released_scores_by_as_many_queries_as_are_read(most):
  """All at one corner of the cube add up: K times as far, not sqrt(K)."""
  data = made_up.prepared(
    unit=unit_lib.user(most),
    num_users={"train": 500, "test": 500},
    num_queries={"train": 900, "test": 900},
  )
  promise = release_scores.make_claim(settings(), data, size=6)
  alone = promised(settings(), 500, 6)
  assert promise.noise_multiplier == alone.noise_multiplier
  assert promise.sampler.num_examples == 500
  assert promise.words.unit == unit_lib.user(most)
  assert "summed" in promise.words.assumptions
  others = np.random.default_rng(0).uniform(0, 1, (30, 6))
  for corner in (np.zeros(6), np.ones(6), np.arange(6) % 2):
    table = np.vstack([others, *[corner] * most])
    moved = release_scores.compute_centred_sum(
      table
    ) - release_scores.compute_centred_sum(others)
    assert np.linalg.norm(moved) == pytest.approx(promise.l2_sensitivity)


@pytest.mark.parametrize("secret", [7, None])
def test_sums_under_a_fixed_secret_say_that_they_protect_nobody(
  secret, tmp_path
):
  table = named(np.full((99, 2), 0.5))
  made = released(tmp_path, table, settings(), secret=secret)
  assert made.statement.secret_is_fixed == (secret is not None)


def of_part(division, **changes):
  """The statement of a training on the train split."""
  return made_up.claim(
    relation="ADD_OR_REMOVE_ONE",
    sampler=promised(settings(), 64, 1).sampler,
    part=made_up.prepared(division=division).part("train"),
    **changes,
  )


def test_scores_add_to_the_training_unless_one_record_alone_says_its_split(
  tmp_path,
):
  table = named(np.full((99, 2), 0.5))
  claims = {}
  for division in ("", DIVISION):
    place = tmp_path / (division or "none")
    made = released(place, table, settings(epsilon=0.7), division=division)
    training = of_part(division)
    together = joint.claim([training, made.statement])
    parts = max(training.epsilon, made.statement.epsilon)
    claims[division] = together.epsilon / parts
    assert ("split" in made.statement.assumptions) == (not division)
  assert claims[DIVISION] <= 1.0 + 1e-9
  assert claims[""] > 1.05


def test_a_run_shows_released_scores_in_place_of_pseudo_queries(
  finished_run, tmp_path
):
  """Rows without a claim stay away; nothing exact leaves the private folder."""
  root = finished_run.copy(tmp_path)
  config = dataclasses.replace(
    finished_run.config, release_scores=settings(epsilon=50.0, widest=1.0)
  )
  plan.run(config, root)
  made = artifacts.load(root / "release_scores", results.ReleasedScores)
  names = {one.name for one in made.rows}
  assert {"bm25", "untrained", "synthetic_eps8", "direct_dp_eps8"} <= names
  assert not any("original" in name for name in names)
  page = (root / "report/report.md").read_text()
  assert "Scores on private queries, with noise" in page
  assert "Scores on public queries" not in page
  assert page.index("with noise") < page.index("Synthetic queries")
  # The verdict is one of them, and not of pseudo-queries.
  [said] = re.findall(r"\*\*Ship\.\*\* (.*)", page)
  assert f"{made.num_queries} private test queries" in said
  assert "pseudo" not in said.lower()
  before = (finished_run.root / "report/report.md").read_text()
  [said] = re.findall(r"\*\*Ship\.\*\* (.*)", before)
  assert "may order the rows otherwise" in said
  # What is said to be in order is so on the private page.
  exact = {
    one.name: artifacts.load(
      root / "private/evaluate/test" / one.name, results.Evaluation
    ).measures[NDCG].mean
    for one in made.rows
  }  # fmt: skip
  pairs = list(noisy_results.pairs(made, NDCG))
  ordered = [pair for pair in pairs if pair.less.here.low > 0]
  assert len(pairs) == len(exact) * (len(exact) - 1) / 2
  assert all(exact[pair.first] > exact[pair.second] for pair in ordered)
  assert "Which rows are in order" in page
  assert "scores of test queries" in page  # its mechanism
  exact = artifacts.load(
    root / "private/evaluate/test/untrained", results.Evaluation
  )
  [row] = [one for one in made.rows if one.name == "untrained"]
  assert row.means[NDCG].here.mean != exact.measures[NDCG].mean
  files = [p for p in (root / "release_scores").rglob("*") if p.is_file()]
  assert [p.name for p in files] == [artifacts.RESULT_NAME]
  [entry] = made.statement.ledger
  promised = ledger.read(root / "private" / ledger.NAME)
  assert promised[entry.identifier] == made.statement
  assert entry.part == ""  # of a log: later sides depend on earlier ones


def test_a_run_refuses_before_training_what_cannot_be_released(
  finished_run, tmp_path
):
  for one, said in (
    (release_scores.Config(enabled=True), "are too few queries"),
    (settings(measures=("P@1",)), "measures must be of"),
    (settings(measures=("MFR",)), "for every query, got MFR"),
    (settings(delta=0.9), "delta=0.9"),
  ):
    config = dataclasses.replace(finished_run.config, release_scores=one)
    if "MFR" in said:
      scored = dataclasses.replace(config.evaluate, measures=("MFR", NDCG))
      config = dataclasses.replace(config, evaluate=scored)
    assert "P@1" not in evaluate.Config().measures
    with pytest.raises(ValueError, match=said):
      plan.run(config, tmp_path / said)
    assert not (tmp_path / said / "finetune_dp").exists()


def test_scores_that_are_not_required_are_left_out_with_a_line(
  finished_run, tmp_path, capsys
):
  root = finished_run.copy(tmp_path)
  config = dataclasses.replace(
    finished_run.config,
    release_scores=release_scores.Config(enabled=True, required=False),
  )
  plan.run(config, root, stages=["release_scores"])
  said = "".join(capsys.readouterr())
  assert "[release_scores] left out: expected noise of" in said
  assert "are too few queries" in said
  assert not (root / "release_scores").exists()
  text = (root / "private" / ledger.NAME).read_text()
  assert text == (finished_run.root / "private" / ledger.NAME).read_text()


def test_a_release_has_the_delta_of_the_training(tmp_path):
  """One delta for all that is published; of fewer test queries it was larger."""
  table = named(np.full((99, 2), 0.5))
  data = made_up.prepared(num_queries={"train": 4000, "test": 99})
  space = workspace.Workspace(tmp_path, secret_seed=1)
  made = tiny_runs.make(
    release_scores.STAGE,
    settings(),
    space,
    inputs=release_scores.Inputs(
      prepared=data,
      evaluations=[scored(space, name, x) for name, x in table.items()],
      systems=(),
    ),
  )
  assert made.statement.delta == 1 / 8000
  assert promised(settings(delta=0.001), 99, 2).delta == 0.001
  assert release_scores.get_smallest_delta(data, 9000) == 1 / 18000


def test_sampling_intervals_cover_where_users_ask_alike():
  """K = 4 equal queries a user: the mean varies as one of n / 4 queries."""
  rng, users, most = np.random.default_rng(5), 200, 4
  good = (rng.random((2000, users)) < 0.5).mean(axis=1)
  noisy = [x + rng.normal(0, 0.001, 2000) for x in (good, 1 - good)]
  pairs = list(zip(*(x.tolist() for x in noisy), strict=True))

  def covered(most):
    known = {"noise": 0.001, "number": 800, "confidence": 0.95, "most": most}
    means = [noisy_results.mean(a, **known).beyond for a, _ in pairs]
    less = [noisy_results.difference(a, b, **known).beyond for a, b in pairs]
    for truth, found in ((0.5, means), (0.0, less)):
      yield np.mean([one.low <= truth <= one.high for one in found])

  assert all(0.93 < share < 0.97 for share in covered(most))
  assert all(share < 0.75 for share in covered(1))  # as of single queries


def test_noise_has_more_bits_than_the_grid_of_released_sums():
  """In the tails float32 leaves gaps that tell neighbours apart."""
  drawn = gaussian.normal_numbers(jax.random.key(3), 1 << 18)
  assert stats.kstest(drawn, "norm").pvalue > 1e-3
  assert np.mean(drawn != drawn.astype(np.float32)) > 0.99
  far = np.sort(drawn[np.abs(drawn) > 3.5])
  assert len(far) > 60 and len(set(np.round(far * 2**24))) == len(far)


def test_scores_say_what_two_queries_have(tmp_path):
  promise = promised(release_scores.Config(enabled=True), 2000, 4)
  found = accounting.group_epsilon(
    [accounting.Run(promise.sampler, promise.noise_multiplier, 1)],
    delta=promise.delta,
    relation="ADD_OR_REMOVE_ONE",
    size=2,
  )
  assert promise.epsilon < found < 2.5 * promise.epsilon


def run_of(systems):
  """A run with BM25 and these systems scored, by name."""
  rows, made = {}, {}
  for name, fields in {"bm25": None, **systems}.items():
    known = {"directory": name, "epsilon": 8.0, "identifiers": ()}
    known |= fields or {"epsilon": None}
    identifiers = known.pop("identifiers")
    entries = [types.SimpleNamespace(identifier=f"{x}#1") for x in identifiers]
    value = types.SimpleNamespace(
      row=made_up.row(name),
      test_set="test",
      statement=types.SimpleNamespace(ledger=entries),
      **known,
    )
    rows[evaluate.Target("test", value.row)] = types.SimpleNamespace(
      value=value, digest=""
    )
    if fields is not None:
      made[value.row] = types.SimpleNamespace(value=value)
  return types.SimpleNamespace(
    config=types.SimpleNamespace(
      release_scores=release_scores.Config(enabled=True)
    ),
    get_results=lambda stage: rows,
    systems=made,
    prepared=made_up.prepared(num_queries={"train": 99, "test": 50_000}),
    data=(),
  )


def test_released_scores_name_the_trainings_of_what_was_scored():
  identifiers = ("finetune_dp/eps8/x", "votes/y")
  run = run_of({"synthetic_eps8": {"identifiers": identifiers}})
  job = release_scores.make_job(run, None)
  assert job.inputs.systems == ("finetune_dp/eps8/x", "votes/y")


def test_no_score_is_released_of_what_lies_under_private_or_claims_nothing():
  """What is only compared has a claim, which no joint claim of ours counts."""
  hidden = "private/train_retriever/direct_dp_eps8"
  run = run_of(
    {
      "synthetic_eps8": {"identifiers": ("finetune_dp/eps8/x",)},
      "direct_dp_eps8": {"directory": hidden, "identifiers": ("direct/z",)},
      "ltr_untrained": {"directory": "private/learn_to_rank/untrained"},
      "original": {"epsilon": math.inf},
    }
  )
  job = release_scores.make_job(run, None)
  scored = [str(one.row) for one in job.inputs.evaluations]
  assert scored == ["bm25", "synthetic_eps8"]
  assert job.inputs.systems == ("finetune_dp/eps8/x",)
