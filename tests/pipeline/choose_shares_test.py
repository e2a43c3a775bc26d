"""Shares beside BM25 that noisy scores on dev queries choose."""

import dataclasses
import functools
import math
import types

import made_up
import numpy as np
import pytest
import tiny_runs

from synthq_jax import artifacts
from synthq_jax.cli import guide
from synthq_jax.pipeline import (
  noisy_sums,
  plan,
  released_results,
  results,
  system_results,
  workspace,
)
from synthq_jax.privacy import joint, ledger, statement, terms
from synthq_jax.stages import choose_shares, fuse, rerank

CHOSEN = choose_shares.Config(enabled=True, epsilon=60.0, widest=1.0)
ROWS = ("untrained", "synthetic_eps8")
SIZE = len(ROWS) * len(CHOSEN.shares)


def promised(config, prepared, size, space=None):
  return noisy_sums.of_split(
    config,
    prepared,
    "dev",
    terms.SHARES,
    how=terms.SUMMED,
    size=size,
    space=space,
  )


SPENT = promised(
  choose_shares.Config(),
  made_up.prepared(num_queries={"train": 9, "dev": 9}),
  2,
).statement("choose_shares/1")


def load(root, place, kind):
  return artifacts.load(root / place, kind)


def shares_of(root, *, secret=7):
  """Runs the stage over rows of a run, whose copy this is."""
  given = {
    "prepared": load(root, "private/prepare_data", results.PreparedData),
    "retrievers": {
      row: load(root, f"train_retriever/{row}", results.Checkpoint)
      for row in ROWS
    },
    "vectors": {
      row: load(root, f"encode_documents/{row}", system_results.Vectors)
      for row in ROWS
    },
    "fusion": fuse.Config(),
    "drop_identical": True,
  }
  space = workspace.Workspace(root, secret_seed=secret)
  return tiny_runs.make(
    choose_shares.STAGE, CHOSEN, space, digest=f"digest{secret}", **given
  )


def sums(monkeypatch, root, scores=None):
  """Returns the promise and the sum of a release, before its noise."""
  caught = []
  with monkeypatch.context() as patch:
    if scores is not None:
      patch.setattr(choose_shares, "_scores", scores)
    right = noisy_sums.draw

    def draw(task, promise, total):
      caught.append((promise, total))
      return right(task, promise, total)

    patch.setattr(noisy_sums, "draw", draw)
    shares_of(root)
  return caught[0]


def without_query(monkeypatch, place):
  """Leaves one dev query out of all that the stage reads."""
  right = choose_shares._search.asked

  def asked(*given):
    judged = right(*given)
    names = list(judged.qrels)
    keep = [i for i in range(len(names)) if i != place]
    return judged._replace(
      qrels={names[i]: judged.qrels[names[i]] for i in keep},
      queries=[judged.queries[i] for i in keep],
      query_tokens=judged.query_tokens[keep],
    )

  monkeypatch.setattr(choose_shares._search, "asked", asked)


def test_one_query_moves_the_sum_by_the_sensitivity_at_most(
  finished_run, tmp_path, monkeypatch
):
  root = finished_run.copy(tmp_path)
  promise, whole = sums(monkeypatch, root)
  assert whole.shape == (SIZE,)
  assert promise.l2_sensitivity == math.sqrt(SIZE) / 2
  with monkeypatch.context() as patch:
    without_query(patch, 0)
    _, less = sums(patch, root)
  assert 0 < np.linalg.norm(whole - less) <= promise.l2_sensitivity


def test_a_query_that_all_shares_answer_attains_the_sensitivity(
  finished_run, tmp_path, monkeypatch
):
  """So a claim for one row, or one share, would be false."""
  root = finished_run.copy(tmp_path)

  def scores(task, judged, lexical, dense):
    found = np.zeros((len(judged.qrels), len(task.settings.shares)))
    found[0] = 1.0
    return found

  promise, whole = sums(monkeypatch, root, scores)
  with monkeypatch.context() as patch:
    without_query(patch, 0)
    _, less = sums(patch, root, lambda *given: np.zeros_like(scores(*given)))
  assert np.linalg.norm(whole - less) == pytest.approx(promise.l2_sensitivity)


def test_each_share_is_scored_as_the_fused_row_would_be():
  judged = types.SimpleNamespace(
    qrels={"q1": {"a": 1}, "q2": {"c": 1}},
    queries=["x", "y"],
    drop_identical=True,
  )
  lexical = {"q1": {"a": 2.0, "b": 1.0}, "q2": {"a": 3.0, "b": 2.0}}
  dense = {"q1": {"b": 2.0, "a": 1.0}, "q2": {"c": 0.9, "a": 0.1}}
  task = types.SimpleNamespace(
    inputs={"fusion": fuse.Config()},
    settings=choose_shares.Config(shares=(0.0, 0.3, 0.8)),
  )
  found = choose_shares._scores(task, judged, lexical, dense)
  second, third = 1 / math.log2(3), 1 / math.log2(4)
  # At .3: q1's a, b have .7, .3; q2's a, b, c .7, 0, .3.
  expected = [[1.0, 1.0, second], [third, second, 1.0]]
  np.testing.assert_allclose(found, expected)


def test_a_run_fuses_by_shares_that_dev_queries_choose(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  before = {
    row: load(root, f"fuse/{row}", system_results.Fusion)
    for row in (*ROWS, "public_only")
  }
  config = dataclasses.replace(finished_run.config, choose_shares=CHOSEN)
  said = "\n".join(
    guide._price(config, tmp_path / "none", ("choose_shares", "fuse"))
  )
  assert "shares beside BM25, of dev queries: 60, released" in said
  plan.run(config, root, stages=["fuse"], progress=False)
  made = load(root, "choose_shares", system_results.ChosenShares)
  assert {*made.scores} >= {*before}
  assert not {row for row in made.scores if "direct_dp_group" in row}
  promised = made.statement
  assert promised.epsilon <= 60 and promised.unit == "query"
  [release] = promised.ledger
  assert release.mechanism.startswith("scores of dev queries")
  size = len(made.scores) * len(CHOSEN.shares)
  assert release.l2_sensitivity == pytest.approx(math.sqrt(size) / 2)
  std = release.noise_multiplier * release.l2_sensitivity
  assert made.noise == pytest.approx(std / made.num_queries)
  for row, old in before.items():
    new = load(root, f"fuse/{row}", system_results.Fusion)
    best = max(made.scores[row], key=lambda pair: pair[1])
    assert new.weight == made.share(row) == best[0]
    assert new.scores == made.scores[row]
    assert new.chosen_on == "real dev queries, with noise"
    assert {*new.statement.ledger} == {*old.statement.ledger, release}
    both = joint.claim([old.statement, promised])
    assert new.statement.epsilon == both.epsilon
    assert old.statement.epsilon <= both.epsilon < math.inf
  # What nobody releases chooses without noise, and says so.
  real = load(root, "private/fuse/original", system_results.Fusion)
  exact = load(
    root, "private/choose_shares/without", system_results.ChosenShares
  )
  assert real.chosen_on == "real dev queries" and exact.noise == 0.0
  assert math.isinf(real.statement.epsilon)
  assert math.isinf(exact.statement.epsilon)
  assert real.weight == exact.share("original")
  shared = released_results.read(root).shared
  assert any(name.startswith("choose_shares") for name in shared)
  # Other settings leave the public rule as it was.
  plan.run(finished_run.config, root, stages=["fuse"], progress=False)
  for row, old in before.items():
    again = load(root, f"fuse/{row}", system_results.Fusion)
    assert dataclasses.replace(again, seconds=old.seconds) == old


def test_noise_is_that_of_the_secret_and_none_is_left_out(
  finished_run, tmp_path
):
  """Of two secrets the scores differ by noise of the stated size."""
  root = finished_run.copy(tmp_path)
  found = [shares_of(root, secret=secret) for secret in (1, 2)]
  first, second = (
    np.array([pair[1] for row in ROWS for pair in made.scores[row]])
    for made in found
  )
  spread = np.std(first - second) / (math.sqrt(2) * found[0].noise)
  assert 0.4 < spread < 1.7  # 14 differences
  assert len(ledger.read(root / "private" / ledger.NAME)) >= 2


def test_a_reranker_over_a_chosen_share_has_its_claim(finished_run, tmp_path):
  root, claim = finished_run.copy(tmp_path), made_up.claim()
  space = workspace.Folders(root)
  chosen = dataclasses.replace(claim, ledger=(*claim.ledger, *SPENT.ledger))
  first = dataclasses.replace(
    load(root, "fuse/synthetic_eps8", system_results.Fusion), statement=chosen
  )
  for own in (claim, statement.none()):
    reranker = system_results.Reranker(
      directory="train_reranker/synthetic_eps8",
      name="synthetic_eps8",
      statement=own,
      kind="KNRM",
      num_pairs=1,
      num_parameters=1,
    )
    made = tiny_runs.make(
      rerank.STAGE,
      rerank.Config(first_stage="fused", weight=0.5),
      space,
      name="synthetic_eps8",
      documents=None,
      synthetic=None,
      reranker=reranker,
      chooser=fuse.Config(),
      fusion=first,
    )
    assert set(made.statement.ledger) == set(chosen.ledger)


NUMBERS = {"train": 90, "dev": 40, "test": 30}
IDS = {"train": "ab", "dev": "cd", "test": "ef"}


def _run_with(root, config=CHOSEN, weight=None, fused=True, ids=IDS, **changes):
  settings = types.SimpleNamespace(
    choose_shares=config,
    fuse=fuse.Config(weight=weight),
    rows=plan.Rows(fused=fused),
    seeds=(),
  )
  prepared = made_up.prepared(**({"num_queries": NUMBERS} | changes))
  folder = root / prepared.private_directory
  folder.mkdir(parents=True, exist_ok=True)
  for split, names in ids.items():
    np.savez(folder / f"{split}.npz", ids=list(names))
  return types.SimpleNamespace(config=settings, prepared=prepared, root=root)


def test_what_could_choose_nothing_is_refused_before_any_training(tmp_path):
  run_with = functools.partial(_run_with, tmp_path)
  choose_shares.check(run_with())
  with pytest.raises(ValueError, match=r"Rows\.fused"):
    choose_shares.check(run_with(fused=False))
  for split in ("train", "test"):
    both = run_with(ids=IDS | {split: "cx"})
    with pytest.raises(ValueError, match=f"got 1 of them in split '{split}'"):
      choose_shares.check(both)
  with pytest.raises(ValueError, match="set one or the other"):
    choose_shares.check(run_with(weight=0.3))
  with pytest.raises(ValueError, match="TEST_SPLIT='test'"):
    choose_shares.check(run_with(test_split="dev+test"))
  with pytest.raises(ValueError, match="no dev queries"):
    choose_shares.check(run_with(num_queries={"train": 90, "test": 30}))
  few = dataclasses.replace(CHOSEN, epsilon=0.1, widest=0.02)
  with pytest.raises(ValueError, match="would do; try fewer shares"):
    choose_shares.check(run_with(few))
  choose_shares.check(run_with(dataclasses.replace(few, enabled=False)))


def test_noise_is_checked_for_all_rows_that_are_to_come(tmp_path):
  """Not for one: hours later, nothing would be chosen."""
  numbers = NUMBERS | {"dev": 400}
  wide = dataclasses.replace(CHOSEN, epsilon=1.0, widest=1.0)
  prepared = made_up.prepared(num_queries=numbers)
  one, three = (
    promised(wide, prepared, rows * len(wide.shares)) for rows in (1, 3)
  )
  assert three.l2_sensitivity == pytest.approx(
    math.sqrt(3) * one.l2_sensitivity
  )
  std = math.sqrt(2) * one.l2_sensitivity * one.noise_multiplier / 400
  run = _run_with(
    tmp_path, dataclasses.replace(wide, widest=std), num_queries=numbers
  )
  with pytest.raises(ValueError, match="would do; try fewer shares"):
    choose_shares.check(run)


@pytest.mark.parametrize(
  "changes",
  [
    {"shares": ()},
    {"shares": (0.5, 0.2)},
    {"shares": (0.5, 1.2)},
    {"shares": (-0.1, 0.2)},
    {"shares": (math.nan,)},
    {"epsilon": 0.0},
    {"widest": math.nan},
  ],
)
def test_settings_that_choose_nothing_are_refused(changes):
  with pytest.raises(ValueError, match=next(iter(changes))):
    choose_shares.Config(**changes)


def test_dev_queries_pay_beside_train_queries_where_a_rule_divides_them():
  """The larger of both, not the sum: a record is in one of the parts."""
  divided, whole = (
    made_up.prepared(num_queries=NUMBERS, division=rule)
    for rule in ("words, seed 0", "")
  )
  config = choose_shares.Config(enabled=True, epsilon=1.0)
  space = types.SimpleNamespace(is_fixed=False)
  for prepared, is_sum in ((divided, False), (whole, True)):
    chosen = promised(config, prepared, 14, space).statement("a/1")
    trained = noisy_sums.claim(
      epsilon=1.0,
      delta=chosen.delta,
      units=prepared.num_queries["train"],
      l2_sensitivity=1.0,
      words=noisy_sums.words(terms.TOPICS, "", space, prepared),
      part=prepared.part("train"),
    ).statement("b/1")
    both = joint.claim([chosen, trained]).epsilon
    assert (both > 1.2) == is_sum
