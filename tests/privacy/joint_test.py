"""One claim about several results whose units or relations differ."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from synthq_jax.privacy import (
  accounting,
  joint,
  rounding,
  sampling,
  statement,
)
from synthq_jax.privacy import unit as unit_lib
from tests.privacy import statements

NUM = 1000
DELTA = 1 / (2 * NUM)
POISSON = sampling.Poisson.with_margin(num_examples=NUM, expected_batch_size=50)
EVERYTHING = sampling.Poisson(
  num_examples=NUM, expected_batch_size=NUM, max_batch_size=NUM + 1
)
ORDER = sampling.FixedOrder(num_examples=NUM, batch_size=50)


def query(identifier="query", **changes):
  settings = {
    "sampler": POISSON,
    "noise_multiplier": 1.0,
    "l2_clip_norm": 0.1,
    "steps": 100,
    "delta": DELTA,
  }
  return statements.made(identifier, **(settings | changes))


def text(identifier="text", **changes):
  settings = {
    "sampler": ORDER,
    "noise_multiplier": 2.0,
    "steps": 40,
    "unit": unit_lib.QUERY_TEXT,
    "relation": "REPLACE_SPECIAL",
  }
  return query(identifier, **(settings | changes))


def gaussian_epsilon(mean, delta):
  """The exact epsilon of N(0, 1) against N(mean, 1)."""

  def excess(epsilon):
    half, shift = mean / 2, epsilon / mean
    lost = math.exp(epsilon) * stats.norm.cdf(-half - shift)
    return stats.norm.cdf(half - shift) - lost - delta

  return optimize.brentq(excess, 0, 100)


def test_a_query_and_its_text_cost_together_what_their_gaussians_do():
  """A text that both releases hold is told from none by their two sums."""
  parts = [
    query(sampler=EVERYTHING, steps=1),
    text(
      sampler=sampling.FixedOrder(num_examples=NUM, batch_size=NUM), steps=1
    ),
  ]
  whole = joint.claim(parts)
  exact = gaussian_epsilon(math.hypot(1 / 1.0, 1 / 2.0), DELTA)
  assert (whole.unit, whole.relation) == (
    unit_lib.QUERY_TEXT,
    "REPLACE_SPECIAL",
  )
  assert exact <= whole.epsilon <= 1.002 * exact
  assert max(one.epsilon for one in parts) < 0.95 * exact


def test_two_results_at_epsilon_8_cost_together_what_privacy_md_says():
  num, delta = 6561, 1 / (2 * 6561)
  batches = sampling.Poisson.with_margin(
    num_examples=num, expected_batch_size=256, multiple_of=8
  )
  order = sampling.FixedOrder(num_examples=num, batch_size=128)
  shared = {"epsilon": 8.0, "delta": delta}
  noise = accounting.noise_multiplier(sampler=batches, steps=300, **shared)
  generator = query(
    sampler=batches, steps=300, noise_multiplier=noise, delta=delta
  )
  steps = 8 * order.steps_per_epoch
  noise = accounting.noise_multiplier(
    sampler=order, steps=steps, relation="REPLACE_SPECIAL", **shared
  )
  retriever = text(
    sampler=order, steps=steps, noise_multiplier=noise, delta=delta
  )
  assert generator.epsilon <= 8 and retriever.epsilon <= 8
  whole = joint.claim([generator, retriever])
  assert rounding.epsilon(whole.epsilon) == "11.95"


def moved_delta(epsilon, probability, noise, grid):
  """The delta of two sums, one of them sampled, by numeric integration."""
  first = stats.norm.pdf(grid, 0, noise[0])
  drawn = stats.norm.pdf(grid, 1, noise[0])
  with_text = (1 - probability) * first + probability * drawn
  there = np.outer(with_text, stats.norm.pdf(grid, 1, noise[1]))
  empty = np.outer(first, stats.norm.pdf(grid, 0, noise[1]))
  cell = (grid[1] - grid[0]) ** 2
  lost = math.exp(epsilon)
  return cell * max(
    np.maximum(there - lost * empty, 0).sum(),
    np.maximum(empty - lost * there, 0).sum(),
  )


def test_emptied_texts_are_as_hard_to_tell_as_claimed_by_integration():
  """The worst case of two releases, without any accountant."""
  parts = [
    query(steps=1, sampler=POISSON, noise_multiplier=0.8),
    text(steps=20, noise_multiplier=1.5),
  ]
  whole = joint.claim(parts)
  grid = np.linspace(-9, 10, 1501)
  attained = moved_delta(whole.epsilon, 0.05, (0.8, 1.5), grid)
  assert 0.98 * DELTA <= attained <= DELTA
  for one in parts:  # neither part's own epsilon covers both
    assert moved_delta(one.epsilon, 0.05, (0.8, 1.5), grid) > 1.1 * DELTA


def test_equal_units_and_relations_compose_as_ever():
  parts = [query("a"), query("b"), statement.none()]
  assert joint.claim(parts) == statement.compose(parts)
  assert joint.claim([statement.none()]) == statement.none()
  assert joint.claim([statement.none(unit=unit_lib.CLIENT), text()]) == text()


def test_what_a_public_result_tells_stays_told_beside_other_units():
  told = statement.none(not_protected=("asked",))
  whole = joint.claim([told, query(), text()])
  assert "asked" in whole.not_protected
  alone = joint.claim([query(), text()])
  assert dataclasses.replace(whole, not_protected=alone.not_protected) == alone


def of_user(identifier, unit, **changes):
  """A Gaussian over all users; how many queries are read says the unit."""
  settings = {"sampler": EVERYTHING, "steps": 1, "unit": unit}
  return query(identifier, **(settings | changes))


@pytest.mark.parametrize("who", [unit_lib.WHO, "device"])
def test_users_of_whom_more_is_read_here_are_the_unit_of_the_whole(who):
  """The fewest would claim nothing of a user with more queries."""
  parts = [of_user(str(most), unit_lib.user(most, who)) for most in (2, 5, 3)]
  alike = [of_user(str(most), unit_lib.user(5, who)) for most in (2, 5, 3)]
  for order in itertools.permutations(parts):
    whole = joint.claim(order)
    assert whole.unit == unit_lib.user(5, who)
    assert whole.epsilon == pytest.approx(statement.compose(alike).epsilon)


@pytest.mark.parametrize("most", [(4, 4), (1, 4)])
def test_users_by_two_columns_have_no_claim_together(most):
  """One user by the one column may be many by the other."""
  person, device = (
    of_user(who, unit_lib.user(number, who))
    for number, who in zip(most, (unit_lib.WHO, "device"), strict=True)
  )
  assert joint.claim([person, device]) is None
  assert joint.claim([device, person, statement.none()]) is None


def test_one_unit_under_two_relations_is_claimed_as_emptied():
  parts = [query("a"), query("b", relation="REPLACE_ONE")]
  whole = joint.claim(parts)
  assert (whole.unit, whole.relation) == (unit_lib.QUERY, "REPLACE_SPECIAL")
  alike = [query("a"), query("b")]
  assert whole.epsilon == pytest.approx(statement.compose(alike).epsilon)
  ordered = joint.claim([query(), text(unit=unit_lib.QUERY)])
  assert ordered.epsilon == joint.claim([query(), text()]).epsilon


@pytest.mark.parametrize("unit", ["client", "pair", "question"])
def test_units_of_which_none_is_part_of_the_other_have_no_claim(unit):
  assert (
    joint.claim([query(), query("b", unit=unit_lib.Unit(kind=unit))]) is None
  )
  assert (
    joint.claim([text(), query("b", unit=unit_lib.Unit(kind=unit))]) is None
  )
  assert (
    joint.claim([query(), text(), query("b", unit=unit_lib.Unit(kind=unit))])
    is None
  )


def test_a_release_counts_once_whatever_the_unit():
  parts = [query(), text(), statement.inherit(text(), "It was read aloud.")]
  assert joint.claim(parts).epsilon == joint.claim(parts[:2]).epsilon
  for order in itertools.permutations(parts):
    assert joint.claim(order).epsilon == pytest.approx(
      joint.claim(parts).epsilon, rel=1e-6
    )


def test_a_single_claim_is_restated_and_not_kept():
  """Both results hold all releases: the first one's own epsilon is smaller."""
  inner = joint.claim([query(), text()])
  whole = joint.claim([query(), inner])
  assert whole.epsilon == pytest.approx(inner.epsilon)
  assert whole.relation == "REPLACE_SPECIAL"


def test_without_privacy_nothing_is_claimed_together():
  assert joint.claim([text(), statement.non_private()]).epsilon == math.inf
  silent = text("silent", noise_multiplier=0.0)
  assert joint.claim([query(), silent]).epsilon == math.inf


def test_the_claim_says_which_claims_it_replaces():
  words = statement.in_words(joint.claim([query(), text()]))
  assert "What single results claim for one query (ADD_OR_REMOVE_ONE)" in words
  assert "one query text (" not in words
  assert "Where one query text is empty" in words
  same = statement.in_words(joint.claim([query(), text(unit=unit_lib.QUERY)]))
  assert "Where one" not in same


def test_compose_still_refuses_and_says_where_to_look():
  with pytest.raises(ValueError, match=r"joint\.claim"):
    statement.compose([query(), text()])


def in_part(identifier, part, **changes):
  """A Gaussian over all records of one part."""
  settings = {"sampler": EVERYTHING, "steps": 1, "part": part}
  return query(identifier, **(settings | changes))


def told_apart(epsilon, first, second, grid):
  """The delta of two Gaussian sums with noise 1 and .8, each moved or not."""
  there = np.outer(
    stats.norm.pdf(grid, first, 1.0), stats.norm.pdf(grid, second, 0.8)
  )
  empty = np.outer(
    stats.norm.pdf(grid, 0.0, 1.0), stats.norm.pdf(grid, 0.0, 0.8)
  )
  cell = (grid[1] - grid[0]) ** 2
  return cell * np.maximum(there - math.exp(epsilon) * empty, 0).sum()


def test_a_record_of_one_part_pays_for_the_dearer_part_by_integration():
  parts = [
    in_part("a", "w:train"),
    in_part("b", "w:test", noise_multiplier=0.8),
  ]
  whole, grid = joint.claim(parts), np.linspace(-8, 9, 1501)
  assert whole.epsilon == max(one.epsilon for one in parts)
  assert told_apart(whole.epsilon, 0, 1, grid) == pytest.approx(DELTA, rel=0.02)
  assert told_apart(whole.epsilon, 1, 0, grid) < DELTA
  # A record that moves others is in both, and that claim would be false of it.
  assert told_apart(whole.epsilon, 1, 1, grid) > 3 * DELTA
  both = joint.claim([in_part("a", ""), in_part("b", "", noise_multiplier=0.8)])
  assert told_apart(both.epsilon, 1, 1, grid) == pytest.approx(DELTA, rel=0.02)


def test_parts_of_other_divisions_joined_parts_and_no_part_add_up():
  train, test = in_part("a", "w:train"), in_part("b", "w:test")
  alone, two = (
    train.epsilon,
    joint.claim([in_part("a", ""), in_part("b", "")]).epsilon,
  )
  assert joint.claim([train, test]).epsilon == pytest.approx(alone)
  for other in ("", "seed 1:test", "w:test+train", "w:dev+train"):
    joined = joint.claim([train, in_part("c", other)])
    assert joined.epsilon == pytest.approx(two)
  three = [train, test, in_part("c", "w:train")]
  for order in itertools.permutations(three):
    assert joint.claim(order).epsilon == pytest.approx(two)
  again = joint.claim([joint.claim([train, test]), in_part("c", "w:train")])
  assert again.epsilon == pytest.approx(two)


@pytest.mark.parametrize("relation", ["REPLACE_ONE", "REPLACE_SPECIAL"])
def test_a_record_that_is_replaced_pays_for_all_parts(relation):
  """Another one, or what is left of it, may be in another part."""
  parts = [
    in_part(name, part, relation=relation)
    for name, part in (("a", "w:train"), ("b", "w:test"))
  ]
  whole = joint.claim(parts)
  assert whole.epsilon > 1.1 * max(one.epsilon for one in parts)


def test_an_emptied_text_pays_for_all_parts():
  parts = [in_part("a", "w:test"), text(part="w:train")]
  bare = [in_part("a", ""), text()]
  assert joint.claim(parts).epsilon == joint.claim(bare).epsilon


def test_a_claim_that_covers_the_others_is_made_anew_for_the_common_unit():
  """Its own epsilon is that of one part; an emptied record pays for all."""
  parts = [in_part("a", "w:train"), in_part("b", "w:test")]
  divided = joint.claim(parts)
  [again] = parts[0].ledger
  covered = text(sampler=EVERYTHING, steps=1, part=again.part)
  covered = dataclasses.replace(covered, ledger=(again,))
  whole = joint.claim([divided, covered])
  assert whole.unit == unit_lib.QUERY_TEXT and whole.ledger == divided.ledger
  bare = [in_part("a", ""), in_part("b", "")]
  assert whole.epsilon == pytest.approx(joint.claim(bare).epsilon)
  assert whole.epsilon > 1.1 * divided.epsilon


def test_a_part_without_a_division_is_refused():
  for part in ("test", ":test", "w:"):
    with pytest.raises(ValueError, match="DIVISION:PART"):
      in_part("a", part)
