"""Closed forms against an adversary who chooses similarities and gradients.

The oracle is the mechanism in NumPy: pair gradients are free vectors that get
clipped. Nothing of it knows a closed form.
"""

import dataclasses
import functools
import inspect
import itertools
import math
import statistics

import dp_accounting
import numpy as np
import pytest
from loss_oracle import Loss
from scipy import stats

from synthq_jax.privacy import accounting, sampling, sensitivity
from synthq_jax.studies.images import published_noise

CLIP = 0.7


def bound_of(loss, relation, unit, max_batch_size, **change):
  common = {
    "max_batch_size": max_batch_size,
    "l2_clip_norm": CLIP,
    "relation": relation,
    "unit": unit,
    "similarity_range": (loss.low, loss.high),
  }
  if loss.kind == "spreadout":
    common |= {"declared_batch_size": loss.declared}
    return sensitivity.spreadout(**(common | change))
  common |= {"temperature": loss.temperature, "hard_negatives": loss.hard}
  if loss.kind == "softmax":
    return sensitivity.softmax(
      **(common | {"directions": loss.directions} | change)
    )
  common |= {"bias": loss.bias, "declared_batch_size": loss.declared}
  return sensitivity.sigmoid(**(common | change))


LOSSES = {
  "softmax": Loss("softmax"),
  "softmax cold": Loss("softmax", temperature=0.2),
  "softmax hard": Loss("softmax", hard=2, temperature=0.5),
  "softmax two directions": Loss("softmax", directions=2),
  "softmax hard, two directions": Loss("softmax", hard=1, directions=2),
  "softmax other range": Loss("softmax", low=0.25, high=2.0),
  "sigmoid": Loss("sigmoid", declared=6),
  "sigmoid cold, biased": Loss("sigmoid", 0.2, bias=-1.5, declared=6),
  "sigmoid hard": Loss("sigmoid", hard=2, declared=8),
  "sigmoid other range": Loss("sigmoid", low=0.0, high=3.0, declared=6),
  "spreadout": Loss("spreadout"),
  "spreadout declared": Loss("spreadout", declared=6),
  "spreadout other range": Loss("spreadout", low=-2.0, high=0.5),
}
# A record that is emptied moves what one that is removed does, by a test below.
SETTINGS = list(
  itertools.product(
    LOSSES, ["ADD_OR_REMOVE_ONE", "REPLACE_ONE"], ["pair", "query"]
  )
)


def columns_of_last(shape):
  """The last pair's document and hard negatives."""
  n, columns = shape
  hard = columns // n - 1
  last = np.zeros(columns, bool)
  last[n - 1] = True
  last[columns - hard :] = True
  return last


def changed_entries(shape, unit):
  changed = np.zeros(shape, bool)
  changed[-1] = True
  if unit == "pair":
    changed[:, columns_of_last(shape)] = True
  return changed


def both_weights(loss, relation, unit, s, other, masked=None):
  """Weights before and after in the shape of `s`; what is gone has weight 0."""
  n, columns = s.shape[-2:]
  before = loss.weights(s, masked=masked)
  if relation == "REPLACE_ONE":
    return before, loss.weights(other, masked=masked)
  if unit == "query":
    active = np.arange(n) < n - 1
    return before, loss.weights(s, active=active, masked=masked)
  after = np.zeros_like(before)
  if n > 1:
    kept = np.ix_(np.arange(n - 1), ~columns_of_last((n, columns)))
    inner = s[(..., *kept)]
    mask = None if masked is None else masked[kept]
    after[(..., *kept)] = loss.weights(inner, masked=mask)
  return before, after


def clipped(gradients):
  norms = np.linalg.norm(gradients, axis=-1, keepdims=True)
  return gradients * CLIP / np.maximum(norms, CLIP)


def moved(weights, gradients, gradients_after):
  """How far the sum of weighted clipped gradients moves."""
  before = np.einsum("ij,ijd->d", weights[0], clipped(gradients))
  after = np.einsum("ij,ijd->d", weights[1], clipped(gradients_after))
  return np.linalg.norm(after - before)


def worst_gradients(weights, unit):
  """Free gradients, equal before and after where the pair is the same."""
  before, after = weights
  changed = changed_entries(before.shape, unit)
  direction = np.array([3.0, 4.0])  # Longer than the clip norm.
  sign = np.where(changed, np.sign(-before), np.sign(after - before))
  sign_after = np.where(changed, np.sign(after), sign)
  # A sign of 0 is a weight that does not move: any gradient will do.
  signs = [np.where(x == 0, 1, x) for x in (sign, sign_after)]
  return [x[..., None] * direction for x in signs]


def worst_moved(loss, relation, unit, s, other, masked=None):
  weights = both_weights(loss, relation, unit, s, other, masked)
  return moved(weights, *worst_gradients(weights, unit))


def worst_similarities(loss, n):
  """The last pair likes everybody and is liked, the others keep apart."""
  s = np.full((n, n * (1 + loss.hard)), loss.low)
  if loss.kind == "spreadout":
    s[:] = max(loss.low, loss.high, key=abs)
    return s
  s[changed_entries(s.shape, "pair")] = loss.high
  s[-1, n - 1] = loss.low
  return s


@pytest.mark.parametrize(("name", "relation", "unit"), SETTINGS)
def test_an_adversary_attains_the_bound_exactly(name, relation, unit):
  loss = LOSSES[name]
  for n in (1, 2, 3, 6):
    s = worst_similarities(loss, n)
    reached = worst_moved(loss, relation, unit, s, s)
    bound = bound_of(loss, relation, unit, n)
    np.testing.assert_allclose(reached, bound, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
  ("n", "attained", "replaced", "lemma", "code"),
  [(2, 3.523, 5.285, 2.0, 4.523), (32, 13.925, 15.916, 13.549, 13.319)],
)
def test_an_adversary_exceeds_the_published_lemma(
  n, attained, replaced, lemma, code
):
  """The numbers of docs/lab/reproduction.md, in clip norms at temperature 1."""
  loss = LOSSES["softmax"]
  assert loss.temperature == 1.0
  s = worst_similarities(loss, n)
  for relation, expected in (
    ("ADD_OR_REMOVE_ONE", attained),
    ("REPLACE_ONE", replaced),
  ):
    reached = worst_moved(loss, relation, "pair", s, s) / CLIP
    assert reached == pytest.approx(expected, abs=5e-4)
  a = math.exp(2)
  published = 2 * (1 + (n - 2) * a / (a + n - 1))
  assert published == pytest.approx(lemma, abs=5e-4) and published < attained
  mean = published_noise.published(batch_size=n, temperature=1.0)
  assert n * mean == pytest.approx(code, abs=5e-4)


@pytest.mark.parametrize(("name", "relation", "unit"), SETTINGS)
def test_random_neighbours_stay_below(name, relation, unit):
  loss, random = LOSSES[name], np.random.default_rng(0)
  bound = bound_of(loss, relation, unit, 6)
  largest = 0.0
  for case in range(300):
    n = random.integers(1, 7)  # Batches below the maximum count, too.
    s, other = neighbours(loss, unit, random, n, extreme=case % 2)
    masked = random.random(s.shape) < random.choice([0, 0.5])
    weights = both_weights(loss, relation, unit, s, other, masked)
    if case % 3:
      gradients = random.normal(size=(2, *s.shape, 3))
      gradients[1] = np.where(
        changed_entries(s.shape, unit)[..., None], gradients[1], gradients[0]
      )
    else:
      gradients = worst_gradients(weights, unit)
    largest = max(largest, moved(weights, *gradients))
  assert 0 < largest <= bound * (1 + 1e-12)


def neighbours(loss, unit, random, n, extreme):
  """Similarities before and after, equal where the pair is the same."""
  shape = (2, n, n * (1 + loss.hard))
  if extreme:
    both = random.choice([loss.low, loss.high], size=shape)
  else:
    both = random.uniform(loss.low, loss.high, size=shape)
  s, other = both
  return s, np.where(changed_entries(s.shape, unit), other, s)


# 'Own positive plus one new column': all other columns of old rows are masked.
@pytest.mark.parametrize("dropped", [False, True])
def test_masked_duplicates_must_stay_in_the_denominator(dropped):
  loss, n = LOSSES["softmax"], 32
  masked = ~np.eye(n, dtype=bool)
  masked[-1] = masked[:, -1] = False
  s = worst_similarities(loss, n)
  bound = bound_of(loss, "ADD_OR_REMOVE_ONE", "pair", n)
  if dropped:
    s = np.where(masked, -1e4, s)  # exp(-1e4) is 0: no column at all.
    masked = None
  reached = worst_moved(loss, "ADD_OR_REMOVE_ONE", "pair", s, s, masked)
  assert (reached > 3 * bound) == dropped
  if not dropped:
    assert reached <= bound


def test_missing_hard_negatives_must_stay_in_the_denominator():
  # Where only the new pair had hard negatives, it would bring more columns
  # than the bound allows for.
  loss, n = Loss("softmax", hard=2), 16
  masked = np.zeros((n, 3 * n), bool)
  masked[:, n:-2] = True
  s = worst_similarities(loss, n)
  bound = bound_of(loss, "ADD_OR_REMOVE_ONE", "pair", n)
  kept = worst_moved(loss, "ADD_OR_REMOVE_ONE", "pair", s, s, masked)
  assert kept <= bound * (1 + 1e-12)
  s = np.where(masked, -1e4, s)
  assert worst_moved(loss, "ADD_OR_REMOVE_ONE", "pair", s, s) > 1.5 * bound


@pytest.mark.parametrize(("name", "relation", "unit"), SETTINGS)
def test_larger_batches_need_as_much_noise_or_more(name, relation, unit):
  declared = None if LOSSES[name].declared is None else 2000
  loss = dataclasses.replace(LOSSES[name], declared=declared)
  sizes = [*range(1, 40), 100, 2000]
  bounds = [bound_of(loss, relation, unit, n) for n in sizes]
  assert (np.diff(bounds) >= -1e-12).all()
  loss = dataclasses.replace(loss, declared=None)
  limit = bound_of(loss, relation, unit, math.inf)
  nearly = bound_of(loss, relation, unit, 10**9)
  np.testing.assert_allclose(nearly, limit, rtol=1e-4)
  assert bounds[-1] <= limit * (1 + 1e-12)


def test_a_cold_softmax_is_no_better_than_clipping_everything_apart():
  bound = bound_of(
    LOSSES["softmax"], "ADD_OR_REMOVE_ONE", "pair", 1024, temperature=0.01
  )
  np.testing.assert_allclose(bound, 2 * 1024 * CLIP / 0.01, rtol=1e-9)
  with pytest.raises(ValueError, match="finite limit"):
    bound_of(
      LOSSES["softmax"],
      "ADD_OR_REMOVE_ONE",
      "pair",
      math.inf,
      temperature=0.001,
    )


@pytest.mark.parametrize("unit", ["pair", "query"])
@pytest.mark.parametrize("name", LOSSES)
def test_replacing_never_moves_further_than_removing_twice(name, unit):
  # So that the accountant, which doubles under REPLACE_ONE, covers it.
  for n in [1, 2, 3, 6]:
    replaced = bound_of(LOSSES[name], "REPLACE_ONE", unit, n)
    removed = bound_of(LOSSES[name], "ADD_OR_REMOVE_ONE", unit, n)
    assert replaced <= 2 * removed * (1 + 1e-12)
    assert removed == bound_of(LOSSES[name], "REPLACE_SPECIAL", unit, n)


@pytest.mark.parametrize("relation", list(dp_accounting.NeighboringRelation))
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "spreadout declared"])
def test_noise_for_removing_is_claimed_truly_under_every_relation(
  name, relation
):
  # Noise is 2 x the sensitivity for removing; the exact delta of one Gaussian
  # step follows from how far this relation really moves its mean.
  loss = LOSSES[name]
  std = 2.0 * bound_of(loss, "ADD_OR_REMOVE_ONE", "pair", 6)
  distance = bound_of(loss, relation, "pair", 6) / std
  everything = sampling.Poisson(
    num_examples=50, expected_batch_size=50, max_batch_size=51
  )
  epsilon = accounting.epsilon(
    noise_multiplier=2.0,
    delta=1e-3,
    sampler=everything,
    steps=1,
    relation=relation,
  )
  lost = math.exp(epsilon) * stats.norm.cdf(-distance / 2 - epsilon / distance)
  exact = stats.norm.cdf(distance / 2 - epsilon / distance) - lost
  assert exact <= 1e-3
  if name != "softmax" or relation.name != "REPLACE_ONE":
    assert exact > 0.97e-3  # The softmax moves by less than twice.


RANGES = [(1.0, -1.0), (0.5, 0.5), (-math.inf, 1.0), (-1.0, math.nan)]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"max_batch_size": 0}, "max_batch_size"),
    ({"max_batch_size": 2.5}, "max_batch_size"),
    ({"temperature": 0.0}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    *[({"l2_clip_norm": x}, "l2_clip_norm") for x in (0, math.inf, "1")],
    ({"relation": "ADD_ONE"}, "relation"),
    ({"unit": "document"}, "unit"),
    ({"hard_negatives": -1}, "hard_negatives"),
    ({"directions": 3}, "directions"),
    ({"bias": math.inf}, "bias"),
    ({"declared_batch_size": 4}, "max_batch_size=6 and declared_batch_size=4"),
    ({"declared_batch_size": 0}, "declared_batch_size"),
    *[({"similarity_range": bounds}, "similarity_range") for bounds in RANGES],
  ],
)
def test_arguments_out_of_range_are_refused(change, message):
  settings = {
    "max_batch_size": 6,
    "temperature": 1.0,
    "l2_clip_norm": 1.0,
    "relation": "ADD_OR_REMOVE_ONE",
    "unit": "pair",
  }
  for function in [
    sensitivity.softmax,
    sensitivity.sigmoid,
    sensitivity.spreadout,
    sensitivity.batch,
  ]:
    known = set(inspect.signature(function).parameters)
    if not set(change) <= known:
      continue
    given = {k: v for k, v in (settings | change).items() if k in known}
    with pytest.raises(ValueError, match=message):
      function(**given)


def rows(s, gradients):
  """The sum of rows' softmax gradients, each clipped."""
  weights = LOSSES["softmax"].weights(s)
  return clipped(np.einsum("ij,ijd->id", weights, gradients)).sum(axis=0)


def test_rows_of_the_batch_protect_a_query():
  n, random = 5, np.random.default_rng(0)
  bound = functools.partial(
    sensitivity.row, l2_clip_norm=CLIP, negatives="batch"
  )
  s = random.uniform(-1, 1, size=(n, n))
  other = np.where(changed_entries(s.shape, "query"), -s, s)
  gradients = 100 * random.normal(size=(n, n, 3))
  # One column of the last query that pulls alone, this way or that way.
  gradients[-1, :-1] = 0
  opposite = gradients.copy()
  opposite[-1] *= -1
  replaced = np.linalg.norm(rows(s, gradients) - rows(other, opposite))
  np.testing.assert_allclose(
    replaced, bound(relation="REPLACE_ONE", unit="query")
  )
  gradients[-1] = 0  # No row.
  zeroed = np.linalg.norm(rows(other, opposite) - rows(s, gradients))
  np.testing.assert_allclose(
    zeroed, bound(relation="REPLACE_SPECIAL", unit="query")
  )


def _delta(epsilon: float, noise: float) -> float:
  """Returns the delta of one Gaussian release (Balle and Wang 2018)."""
  normal = statistics.NormalDist()
  lower = normal.cdf(-0.5 / noise - epsilon * noise)
  return normal.cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * lower


def test_poisson_amplifies_nothing_where_documents_show_who_was_drawn():
  # A pair that is drawn moves all other rows by its document, with or without
  # its text: outputs fall apart into "drawn" and "not drawn". Of the first, a
  # share q of all, the text is told apart as without sampling.
  poisson = sampling.Poisson.with_margin(
    num_examples=6561, expected_batch_size=128
  )
  fixed = sampling.FixedOrder(num_examples=6561, batch_size=128)
  epsilon, delta = 8.0, 1 / (2 * 6561)
  target = {"epsilon": epsilon, "delta": delta, "steps": 1}
  amplified = accounting.noise_multiplier(sampler=poisson, **target)
  reached = poisson.probability * _delta(epsilon, amplified)
  assert reached > 20 * delta
  plain = accounting.noise_multiplier(
    sampler=fixed, relation="REPLACE_SPECIAL", **target
  )
  assert _delta(epsilon, plain) <= delta


@pytest.mark.parametrize("unit", ["pair", "query"])
def test_rows_with_public_negatives_protect_pairs(unit):
  for relation, times in [("ADD_OR_REMOVE_ONE", 1), ("REPLACE_ONE", 2)]:
    bound = sensitivity.row(
      l2_clip_norm=CLIP, relation=relation, unit=unit, negatives="public"
    )
    assert bound == times * CLIP
  with pytest.raises(ValueError, match="negatives"):
    sensitivity.row(
      l2_clip_norm=CLIP, relation=relation, unit=unit, negatives="mined"
    )
  with pytest.raises(ValueError, match="max_batch_size"):
    sensitivity.row(
      l2_clip_norm=CLIP, relation=relation, unit="pair", negatives="batch"
    )
