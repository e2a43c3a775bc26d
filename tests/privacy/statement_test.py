"""Claims: made from the ledger, passed on, added up, and read aloud."""

import dataclasses
import itertools
import math

import dp_accounting
import made_up
import pytest

from synthq_jax.privacy import (
  accounting,
  joint,
  sampling,
  statement,
  terms,
  wording,
)
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.storage import artifacts
from tests.privacy import statements

SAMPLER = sampling.Poisson.with_margin(
  num_examples=6000, expected_batch_size=256
)
SETTINGS = {
  "sampler": SAMPLER,
  "noise_multiplier": 1.0,
  "l2_clip_norm": 0.1,
  "steps": 300,
  "delta": 1 / 12000,
}


def made(identifier="finetune_dp/1", **changes):
  return statements.made(identifier, **(SETTINGS | changes))


def test_the_claim_is_the_accountants():
  claim = made()
  arguments = {k: v for k, v in SETTINGS.items() if k != "l2_clip_norm"}
  assert claim.epsilon == accounting.epsilon(**arguments)
  assert claim.delta == 1 / 12000
  assert claim.unit == unit_lib.QUERY
  assert claim.relation == "ADD_OR_REMOVE_ONE"
  [release] = claim.ledger
  assert release.noise_multiplier == 1.0
  assert release.l2_clip_norm == 0.1
  assert release.steps == 300
  assert release.sampler() == SAMPLER


@pytest.mark.parametrize("kind", ["made", "composed", "none", "non_private"])
def test_a_statement_survives_json(tmp_path, kind):
  claim = {
    "made": lambda: made(l2_sensitivity=0.2),
    "composed": lambda: statement.compose([made("a"), made("b")]),
    "none": statement.none,
    "non_private": statement.non_private,
  }[kind]()
  artifacts.save(tmp_path, claim, "digest")
  assert artifacts.load(tmp_path, statement.PrivacyStatement) == claim


def test_post_processing_changes_no_number():
  claim = made()
  later = statement.inherit(claim, "Queries were generated.")
  assert later.notes == ("Queries were generated.",)
  assert dataclasses.replace(later, notes=claim.notes) == claim


def test_two_runs_are_composed_by_their_loss_distributions():
  first, second = made("a"), made("b")
  both = statement.compose([first, second])
  assert both.delta == first.delta
  assert first.epsilon < both.epsilon < first.epsilon + second.epsilon
  arguments = {k: v for k, v in SETTINGS.items() if k != "l2_clip_norm"}
  long = accounting.epsilon(**(arguments | {"steps": 600, "delta": both.delta}))
  assert both.epsilon == pytest.approx(long, rel=1e-4)
  assert [release.identifier for release in both.ledger] == ["a", "b"]


def test_an_inherited_release_counts_once():
  claim = made("a")
  later = statement.inherit(claim, "Queries were generated.")
  assert statement.compose([claim, later]).epsilon == claim.epsilon
  both = statement.compose([claim, made("b")])
  again = statement.compose([later, both, made("b")])
  assert (again.epsilon, again.delta) == (both.epsilon, both.delta)
  assert again.ledger == both.ledger


def test_claims_that_share_a_release_add_up_the_others():
  one, other = (statement.compose([made("a"), made(x)]) for x in "bc")
  whole = statement.compose([one, other])
  apart = statement.compose([made("a"), made("b"), made("c")])
  assert whole.epsilon == apart.epsilon > 1.1 * one.epsilon
  assert set(whole.ledger) == set(apart.ledger)


def test_public_results_add_nothing():
  claim = made()
  assert statement.compose([statement.none(), claim]) == claim
  public = statement.compose([statement.none(), statement.none()])
  assert public == statement.none()


def noisy_results(num):
  """Claims about means with noise so large that delta alone covers each."""
  everything = sampling.Poisson(
    num_examples=150, expected_batch_size=150, max_batch_size=151
  )
  changes = {"sampler": everything, "noise_multiplier": 100.0, "steps": 1}
  return [made(str(i), delta=0.005, **changes) for i in range(num)]


@pytest.mark.slow
def test_releases_of_epsilon_0_add_up():
  means = noisy_results(400)
  assert {(one.epsilon, one.delta) for one in means} == {(0.0, 0.005)}
  whole = statement.compose(means)
  assert len(whole.ledger) == 400
  joint = dp_accounting.pld.PLDAccountant()
  joint.compose(dp_accounting.GaussianDpEvent(100.0 / math.sqrt(400)))
  assert joint.get_delta(0.0) == pytest.approx(0.0797, abs=1e-4)
  assert whole.delta == 0.005
  assert whole.epsilon == pytest.approx(joint.get_epsilon(0.005), rel=2e-3)
  assert whole.epsilon > 0.32


def test_a_release_of_epsilon_0_is_no_public_result():
  (mean,) = noisy_results(1)
  assert not mean.is_public and not statement.non_private().is_public
  assert statement.none().is_public
  whole = statement.compose([statement.none(), mean])
  assert whole.ledger == mean.ledger
  words = statement.in_words(whole)
  assert "No private record" not in words
  assert "(0, 0.005)-differentially private" in words
  # No batch has room for two more: the chain of two neighbours is left.
  assert "two records together have only (0, 0.01)" in words
  assert statement.compose([mean, made("x")]).ledger[0] == mean.ledger[0]


def test_a_delta_needs_a_ledger_as_an_epsilon_does():
  with pytest.raises(ValueError, match=r"ledger behind epsilon=0.0, delta=0.1"):
    dataclasses.replace(statement.none(), delta=0.1)


def test_one_result_without_privacy_spoils_the_sum():
  both = statement.compose([made(), statement.non_private()])
  assert both.epsilon == math.inf
  assert both.ledger == made().ledger
  silent = made("c", noise_multiplier=0.0)
  assert statement.compose([made(), silent]).epsilon == math.inf


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    (lambda: [], "at least one"),
    (lambda: [made("a"), made("b", unit=unit_lib.CLIENT)], "unit"),
    (lambda: [made("a"), made("b", relation="REPLACE_ONE")], "relation"),
    (lambda: [made("a"), made("a", steps=301)], "identifier"),
  ],
  ids=["nothing", "two units", "two relations", "two releases of one name"],
)
def test_what_does_not_add_up_is_refused(parts, message):
  with pytest.raises(ValueError, match=message):
    statement.compose(parts())


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"l2_clip_norm": 0.0}, "clip norm"),
    ({"l2_clip_norm": math.inf}, "finite clip norm"),
    ({"l2_sensitivity": 0.0}, "sensitivity"),
    ({"delta": 0.5}, "delta"),
  ],
)
def test_a_claim_is_checked(change, message):
  with pytest.raises(ValueError, match=message):
    made(**change)
  with pytest.raises(ValueError, match="identifier"):
    made(identifier="")


def test_a_group_is_protected_by_the_geometric_sum():
  claim = made(noise_multiplier=8.0)
  epsilon, delta = statement.group(claim, 3)
  base = math.exp(claim.epsilon)
  assert epsilon == pytest.approx(3 * claim.epsilon)
  assert delta == pytest.approx(claim.delta * (1 + base + base**2))
  assert statement.group(made(), 1) == (made().epsilon, made().delta)
  assert statement.group(made(), 1000)[1] == 1


def test_two_records_have_the_accountants_number_at_the_same_delta():
  claim = made()
  found = accounting.group_epsilon(
    [claim.ledger[0].run()],
    delta=claim.delta,
    relation=claim.relation,
    size=2,
  )
  assert claim.epsilon < found < 3 * claim.epsilon
  said = wording.for_two(claim)
  assert said.endswith(f"({math.ceil(found * 1000) / 1000:g}, 8.34e-05)")
  assert f"is protected less: {said}, and" in statement.in_words(claim)
  huge = dataclasses.replace(claim, relation="REPLACE_ONE", epsilon=40.0)
  assert "empty (delta would be 1)" in wording.for_two(huge)


def test_the_words_say_what_the_numbers_say():
  claim = made(l2_sensitivity=0.2)
  text = statement.in_words(statement.inherit(claim, "It was read aloud."))
  shown = math.ceil(claim.epsilon * 1000) / 1000
  for part in (
    f"({shown:g}, 8.34e-05)-differentially private",
    "one query is added or removed",
    "ADD_OR_REMOVE_ONE",
    "256/6000",
    "300 steps",
    "clip norm 0.1",
    "1 x 0.2",
    "It was read aloud.",
    *wording.sentences(claim, "public"),
    *wording.sentences(claim, "assumptions"),
    *wording.sentences(claim, "not_protected"),
  ):
    assert part in text
  assert text.count("\n\n") == 6


def test_no_privacy_and_no_private_data_sound_different():
  assert "NO differential privacy" in statement.in_words(
    statement.non_private()
  )
  told = statement.none(not_protected=("That it was asked.",))
  for claim in (told, statement.compose([statement.none(), told])):
    words = statement.in_words(claim)
    assert "That it was asked." in words and claim.is_public
    assert "no private record" not in words.lower()
  both = statement.compose([statement.none(), told, statement.non_private()])
  assert both.not_protected == told.not_protected
  public = statement.in_words(statement.none())
  assert "No private record" in public
  assert "differentially private" not in public


def test_correlated_noise_and_cyclic_batches_are_told():
  sampler = sampling.CyclicPoisson(
    num_examples=1000,
    expected_batch_size=50,
    max_batch_size=200,
    cycle_length=4,
  )
  claim = made(sampler=sampler, noise_bands=4, delta=1e-4, steps=40)
  words = statement.in_words(claim)
  assert "correlated over 4 steps" in words and "4 x 50/1000" in words
  assert claim.ledger[0].sampler() == sampler


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_a_unit_whose_records_are_all_in_every_step_is_said_to_be(share):
  """Then there is no mixture: the records' sum moves by K times as much."""
  sampler = sampling.Poisson.with_margin(
    num_examples=400,
    expected_batch_size=int(400 * share),
    group_size=3,
    num_units=200,
  )
  claim = made(sampler=sampler, noise_multiplier=30.0, steps=5)
  text = statement.in_words(claim)
  assert "at most 3 records" in text
  assert ("mixture of Gaussians" in text) == (share < 1)
  assert ("every step has them all: 3 times" in text) == (share == 1)


FIXED = terms.QUERIES.but(secret_is_fixed=True)


def fixed(identifier="finetune_dp/1"):
  words = claim_lib.Claim(**SETTINGS, words=FIXED)
  return words.statement(identifier)


def test_a_statement_under_a_fixed_secret_is_marked_and_says_so():
  assert not made().secret_is_fixed
  claim = fixed()
  assert claim.secret_is_fixed
  assert wording.sentences(claim, "assumptions")[0] == wording.FIXED_SECRET
  assert "secret_is_fixed" not in artifacts.to_json(made())
  assert artifacts.to_json(claim)["secret_is_fixed"] is True


@pytest.mark.parametrize("swap", [False, True])
def test_one_fixed_secret_marks_every_claim_that_it_enters(swap):
  parts = [made("a"), fixed("b")][:: -1 if swap else 1]
  assert statement.compose(parts).secret_is_fixed
  assert statement.inherit(fixed(), "It was read aloud.").secret_is_fixed
  assert joint.claim(parts).secret_is_fixed
  assert not statement.compose([made("a"), made("b")]).secret_is_fixed


@pytest.mark.parametrize(
  "change",
  [
    {"unit": "query"},
    {"unit": "user with up to 4 queries"},
    {"assumptions": ["a_name_of_a_later_version"]},
  ],
  ids=str,
)
def test_a_statement_of_another_version_is_refused_and_not_misread(change):
  """Words of an earlier one name users and fixed secrets that no field has."""
  stored = artifacts.to_json(fixed()) | change
  with pytest.raises(ValueError, match="version that wrote it") as error:
    artifacts.from_json(statement.PrivacyStatement, stored)
  assert "\n" not in str(error.value)


def test_every_name_in_the_terms_has_a_sentence_for_every_unit():
  units = (
    *(unit_lib.QUERY, unit_lib.QUERY_TEXT, unit_lib.user(1), unit_lib.user(4)),
    *(unit_lib.EXAMPLE, unit_lib.IMAGE_PAIR, unit_lib.CLIENT),
    unit_lib.Unit(kind="person"),
  )
  known = [x for x in vars(terms).values() if isinstance(x, terms.Terms)]
  assert len(known) == 7
  for words, unit in itertools.product(known, units):
    names = [words.mechanism, words.without_noise or "no_noise"]
    names += [
      x for section in wording.SECTIONS for x in getattr(words, section)
    ]
    for name in names:
      text = wording.write(name, unit)
      assert text != name and not {*"{}\n"} & {*text}, name


def test_what_claims_nothing_claims_nothing_for_two_records():
  nothing = statement.non_private("by hand")
  assert math.isinf(nothing.for_two_records[0])
  private = made_up.claim()
  both = statement.compose(
    [
      private,
      statement.non_private(unit=private.unit, relation=private.relation),
    ]
  )
  assert math.isinf(both.epsilon) and math.isinf(both.for_two_records[0])
  assert math.isfinite(private.for_two_records[0])
