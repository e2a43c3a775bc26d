"""Settings that are chosen privately: one winner, one price, nothing beside."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest
import random_t5
import small_data
import tiny_runs

from synthq_jax import artifacts
from synthq_jax.cli import main
from synthq_jax.models import prompt, t5, t5_checkpoints, t5_config
from synthq_jax.pipeline import plan, results
from synthq_jax.privacy import accounting, joint, ledger, rounding, selection
from synthq_jax.stages import finetune_dp
from synthq_jax.studies import frame, tuning

MEAN = 3.0


def source(place, kind):
  """A log whose split depends on other records, or on each record alone."""
  if kind == "log":
    asked = [(f"p{i}", small_data.query(i), i % 128) for i in range(256)]
    return small_data.write_user_log(place, asked, 128)
  documents = {f"d{i}": small_data.document(i) for i in range(64)}
  queries = {f"q{i}": small_data.query(i) for i in range(200)}
  judged = {"test": [(f"q{i}", f"d{i % 64}", 1) for i in range(200)]}
  return small_data.write_beir(place, documents, queries, judged)


def config(root, kind, **changes):
  base = tiny_runs.config(source(root / "data", kind))
  run = dataclasses.replace(
    base,
    checkpoint=random_t5.save(root / "t5"),
    finetune_dp=finetune_dp.Config(steps=2, batch_size=16),
    secret_seed=None,
    **changes,
  )
  return tuning.Config(run=run, trials=MEAN, learning_rates=(1e-3, 1e-1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["log", "beir"])
def test_the_best_of_a_secret_number_is_kept_with_the_price_of_all(
  tmp_path, monkeypatch, capsys, kind
):
  chosen, trained = config(tmp_path, kind), []
  inner = tuning._trained

  def noted(run, root, folder):
    assert ledger.read(root / results.PRIVATE / ledger.NAME)  # paid before
    made = inner(run, root, folder)
    own = folder / results.PRIVATE / ledger.NAME
    [(name, _)] = ledger.read(own).items()
    trained.append((name, run.finetune_dp, made))
    return made

  monkeypatch.setattr(tuning, "_trained", noted)
  law = selection.Trials.distribution
  monkeypatch.setattr(
    selection.Trials,
    "distribution",
    lambda self: type("Two", (), {"rvs": lambda _, random_state: 2})(),
  )
  said = frame.run(tuning.STUDY, chosen, tmp_path / "run", progress=False)
  monkeypatch.setattr(selection.Trials, "distribution", law)
  root = tmp_path / "run/tuned"
  assert len(trained) == len({name for name, *_ in trained}) == 2
  winner = artifacts.load(tmp_path / "run/private/winner", tuning.Winner)
  made = artifacts.load(root / "finetune_dp/eps8", results.Checkpoint)
  # One claim of the best, and of scores where they cost other records.
  data = artifacts.load(root / "private/prepare_data", results.PreparedData)
  assert bool(data.division) == (kind == "beir")
  entered = ledger.read(root / results.PRIVATE / ledger.NAME)
  assert list(entered.values()) == list(winner.statements)
  assert len(entered) == 1 + (kind == "beir")
  both = joint.claim(list(winner.statements))
  assert made.statement == (both if data.division else winner.statements[0])
  assert len(made.statement.ledger) == len(entered)  # scores, too
  entry = made.statement.ledger[0]
  apart = kind == "beir"
  trials = selection.Trials(
    mean=MEAN, score_noise=None if apart else chosen.score_noise
  )
  assert entry.trials == winner.trials == trials
  assert 7.9 < made.statement.epsilon <= 8
  # By the library's other way to the same number.
  run = accounting.Run(entry.sampler(), entry.noise_multiplier, entry.steps)
  price = selection.grid_price([run] * 4, trials, delta=made.statement.delta)
  assert made.statement.epsilon == pytest.approx(price, rel=1e-6)
  assert winner.alone < 0.8 * made.statement.epsilon
  together = joint.claim(list(entered.values()))
  assert together.epsilon == pytest.approx(made.statement.epsilon)
  # All trained with that noise, at points of the grid.
  for _, point, one in trained:
    [own] = one.statement.ledger
    assert own.noise_multiplier == entry.noise_multiplier
    assert dataclasses.replace(point, trials=None) in chosen.points
  # Nothing of the others is left, nor how many there were, nor when.
  times = {
    path.stat().st_mtime
    for path in (root, *root.rglob("*"))
    if results.PRIVATE not in path.relative_to(root).parts
  }
  assert len(times) == 1 and made.seconds == 0
  assert not (root / "private/tuning").exists()
  files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
  names = {name for name, *_ in trained}
  text = b"".join(p.read_bytes() for p in files if p.suffix != ".npz").decode(
    errors="ignore"
  )
  assert not [name for name in names if name in text]
  shown = said + "".join(capsys.readouterr())
  assert "[finetune_dp" not in shown
  said = rounding.epsilon(made.statement.epsilon)
  assert f"epsilon {said} at delta" in shown
  # `synthq run` goes on from it.
  plain, _ = main.configure(
    plan.RunConfig, ["recipes/demo_tiny.gin", str(root / "winner.gin")]
  )
  picked = plain.finetune_dp
  assert (picked.learning_rate, picked.clip_norm, picked.trials) == (
    winner.learning_rate, winner.clip_norm, trials,
  )  # fmt: skip
  after = dataclasses.replace(
    chosen.run,
    finetune_dp=dataclasses.replace(
      chosen.run.finetune_dp,
      learning_rate=picked.learning_rate,
      clip_norm=picked.clip_norm,
      trials=picked.trials,
    ),
  )
  plan.run(after, root, stages=["generate"], progress=False)
  assert "[finetune_dp/eps8] finished earlier" in capsys.readouterr().out
  written = artifacts.load(root / "generate/eps8", results.SyntheticQueries)
  assert written.statement.ledger == made.statement.ledger


def test_a_prompt_is_scored_with_its_prompt(tmp_path, monkeypatch):
  """Without it every trial scored as the public model does: the choice was noise."""
  shape = t5_config.get("tiny")
  params = t5_checkpoints.flatten(t5.init_params(shape, jax.random.key(0)))
  rng = np.random.default_rng(0)
  read, asked = rng.integers(3, 100, (2, 8, 6), dtype=np.int32)
  monkeypatch.setattr(
    finetune_dp,
    "split_records",
    lambda *_: {"inputs": read, "targets": asked},
  )
  scores = {}
  for size in (0.0, 30.0):
    learned = size * rng.normal(size=(4, shape.emb_dim)).astype(np.float32)
    merged = prompt.Prompt(length=4).merge(params, {"embedding": learned})
    place = tmp_path / str(size)
    t5_checkpoints.save(place, t5_checkpoints.unflatten(merged), shape)
    made = types.SimpleNamespace(directory=place.name, prompt_tokens=4)
    scores[size] = tuning._values(None, tmp_path, made, None)
  # Both are worse than chance where the tiny model is: raw losses would do, too.
  assert (scores[0.0] != scores[30.0]).any()


def test_a_score_moves_by_what_it_is_claimed_to_and_has_its_noise():
  rng = np.random.default_rng(0)
  values = rng.uniform(0, 1, 400)
  key = jax.random.key(0)
  for most in (1, 3):
    for corner in (0.0, 1.0):
      more = np.append(values, [corner] * most)
      quiet = tuning.noisy_score(values, 0.0, key, most=most)
      moved = tuning.noisy_score(more, 0.0, key, most=most)
      sums = (moved - 0.5) * len(more) - (quiet - 0.5) * len(values)
      assert abs(sums) == pytest.approx(most / 2)
    drawn = [
      tuning.noisy_score(values, 6.0, jax.random.key(i), most=most)
      for i in range(1000)
    ]
    scale = 6.0 * most / 2 / len(values)
    assert np.std(drawn) == pytest.approx(scale, rel=0.1)
    assert np.mean(drawn) == pytest.approx(values.mean(), abs=4 * scale / 31)


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"law": "Poisson"}, "tuning.Config.law"),
    ({"trials": 0.5}, "trials"),
    ({"clip_norms": ()}, "clip_norms"),
    ({"run": plan.RunConfig(rows=plan.Rows(synthetic=()))}, "one generator"),
    (
      {"run": plan.RunConfig(rows=plan.Rows(synthetic=(math.inf, 8.0)))},
      "finite epsilon",
    ),
    (
      {"run": plan.RunConfig(canaries=plan.Canaries(number=2))},
      "no canaries",
    ),
  ],
)
def test_what_cannot_be_tuned_is_refused_in_a_line(changes, said):
  with pytest.raises(ValueError, match=said) as refused:
    tuning.Config(**changes)
  assert "\n" not in str(refused.value)


def test_a_log_without_dev_queries_is_refused_before_the_ledger(tmp_path):
  documents = {f"d{i}": small_data.document(i) for i in range(64)}
  queries = {f"q{i}": small_data.query(i) for i in range(200)}
  judged = {
    "train": [(f"q{i}", f"d{i % 64}", 1) for i in range(150)],
    "test": [(f"q{i}", f"d{i % 64}", 1) for i in range(150, 200)],
  }
  source = small_data.write_beir(tmp_path / "log", documents, queries, judged)
  chosen = config(tmp_path, "log")
  prepared = dataclasses.replace(chosen.run.prepare_data, source=source)
  run = dataclasses.replace(chosen.run, prepare_data=prepared)
  chosen = dataclasses.replace(chosen, run=run)
  with pytest.raises(ValueError, match="named dev.*got test, train"):
    frame.run(tuning.STUDY, chosen, tmp_path / "work", progress=False)
  assert not list((tmp_path / "work").glob("**/ledger.jsonl"))


def test_the_recipe_of_the_demo_has_four_points_of_one_mechanism():
  chosen, _ = main.configure(tuning.Config, ["studies/tuning.gin"])
  assert len(set(chosen.points)) == 4
  for field in ("batch_size", "steps", "delta", "microbatch_size"):
    assert len({getattr(one, field) for one in chosen.points}) == 1
  assert chosen.trials == 4 and chosen.run.finetune_dp.trials is None
