"""The audit finds what a model knows by heart, and finds chance elsewhere."""

import dataclasses
import functools
import itertools
import json
import math
import types

import dp_accounting
import made_up
import numpy as np
import pytest
import random_t5
import tiny_runs

from synthq_jax.audit import canaries as canaries_lib
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5, t5_checkpoints, t5_config
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, statement, terms
from synthq_jax.runtime import prepared_files, results, workspace
from synthq_jax.stages import audit
from synthq_jax.storage import artifacts

MODEL = dataclasses.replace(
  t5_config.get("tiny"), num_encoder_layers=1, num_decoder_layers=1
)
PREPARED = types.SimpleNamespace(
  document_length=12,
  query_length=14,
  vocab_size=MODEL.vocab_size,
  token_ids=MODEL.token_ids,
  num_queries={"train": 100},
)
PREFIX = "ask: "


class WordVocabulary:
  """Splits at spaces, so that a test needs no SentencePiece model."""

  vocab_size, extra_ids = MODEL.vocab_size, 12
  eos_id, unk_id, sentinels = 1, 2, ()

  def __init__(self, texts):
    words = dict.fromkeys(word for text in texts for word in text.split())
    self.words = ["", "", "?", *map(str, range(10)), *words]
    assert len(self.words) < self.vocab_size - self.extra_ids

  def encode(self, text):
    return [self.words.index(word) for word in text.split()]

  def decode(self, ids):
    ids = itertools.takewhile(lambda i: i != self.eos_id, ids)
    return " ".join(self.words[i] for i in ids if i < len(self.words))


untrained = functools.partial(random_t5.params, MODEL, spread=0.0)


def trained(params, records, steps):
  model = t5.Transformer(MODEL)

  def loss(params):
    logits = model.apply(
      {"params": params}, records["inputs"], t5.shift_right(records["targets"])
    )
    return seq2seq.cross_entropy(logits, records["targets"]).mean()

  return random_t5.trained(loss, params, steps)


TEXTS = [
  f"{color} {thing} is the name of a page"
  for color in ("red", "blue", "green", "black", "white", "gray")
  for thing in ("river", "garden", "window", "table", "bridge")
]
VOCABULARY = WordVocabulary([PREFIX, *TEXTS])


def make(number, seed, **changes):
  given = {"kinds": ("own_query", "new_tokens"), "repetitions": (1,)}
  return canaries_lib.make(
    TEXTS, VOCABULARY, number=number, seed=seed, digits=3, **given | changes
  )


def tokenized(canaries):
  return canaries_lib.tokenize(
    canaries,
    VOCABULARY,
    prefix=PREFIX,
    document_length=PREPARED.document_length,
    query_length=PREPARED.query_length,
  )


@pytest.fixture(name="audited")
def _audited(tmp_path, monkeypatch):
  """Returns a function that audits parameters with some canaries."""
  space = workspace.Workspace(tmp_path, secret_seed=7)
  monkeypatch.setattr(prepared_files, "vocabulary", lambda *_: VOCABULARY)

  def audited(params, canaries, *, public=None, claim=None, **changes):
    t5_checkpoints.save(space.public("finetune_dp/eps8"), params, MODEL)
    start = tmp_path / "start"
    if public is None:
      public = untrained(seed=0)
    t5_checkpoints.save(start, public, MODEL)
    generator = made_up.checkpoint(statement=claim or statement.non_private())
    few = {"num_candidates": 200, "num_ranked": 20, "queries_per_canary": 4}
    return tiny_runs.make(
      audit.STAGE,
      audit.Config(**few | changes),
      space,
      row=generator.row,
      name="eps8",
      inputs=audit.Inputs(
        prepared=PREPARED,
        start=start,
        prefix=PREFIX,
        canaries=canaries,
        generator=generator,
      ),
    )

  return audited


def claimed(epsilon):
  """Returns the statement of one Gaussian step."""
  sigma = dp_accounting.get_sigma_gaussian(epsilon, 1e-5)
  return claim_lib.Claim(
    sampler=sampling.FixedOrder(num_examples=64, batch_size=64),
    relation="REPLACE_SPECIAL",
    noise_multiplier=sigma,
    l2_clip_norm=1.0,
    steps=1,
    delta=1e-5,
    words=terms.QUERIES,
  ).statement("finetune_dp/1a2b")


@pytest.fixture(name="learned", scope="module")
def _learned():
  """Returns canaries, and a model that knows the inserted ones by heart."""
  canaries = make(14, seed=1)
  rows = canaries_lib.repeated(canaries)
  records = {k: v[rows] for k, v in tokenized(canaries).items()}
  return canaries, trained(untrained(seed=0), records, 250)


@pytest.mark.slow
def test_a_model_that_knows_canaries_by_heart_ranks_and_writes_them(
  audited, learned, tmp_path
):
  canaries, params = learned
  report = audited(params, canaries)
  cells = {cell.kind: cell for cell in report.cells}
  query = cells["own_query"]
  assert set(query.ranks) == {1}
  assert set(query.exposure) == {math.log2(200)}
  assert query.leaked == len(query.ranks)
  assert query.leaked_held_out == 0
  assert np.mean(query.held_out_ranks) > 3
  assert cells["new_tokens"].leaked is None  # no text can tell them
  assert set(cells["new_tokens"].ranks) == {1}
  (bound,) = report.bounds
  assert (bound.attack, bound.repetitions) == ("likelihood", 1)
  assert bound.auroc[0] > 0.99
  assert report.ceiling >= report.lower_bound == bound.epsilon_one_run > 0.5
  assert report.claimed_epsilon == math.inf
  assert not report.exceeds_claim  # nothing was claimed
  assert report.control > 0.001
  directory = tmp_path / report.directory
  assert report.directory == "private/audit/eps8"
  assert artifacts.load(directory, results.AuditReport) == report
  lines = (directory / "canaries.jsonl").read_text().splitlines()
  found = [json.loads(line) for line in lines]
  assert [one["rank"] == 1 for one in found if one["inserted"]].count(True) == (
    len(canaries_lib.repeated(canaries))
  )


def test_a_claim_that_memory_refutes_is_refuted(audited, learned):
  canaries, params = learned
  for epsilon, refuted in ((0.4, True), (20.0, False)):
    claim = claimed(epsilon)
    report = audited(params, canaries, claim=claim)
    assert report.claimed_epsilon == pytest.approx(epsilon, rel=0.01)
    assert report.claimed_delta == 1e-5
    assert report.exceeds_claim == refuted


def test_an_untrained_model_ranks_by_chance_and_leaks_nothing(audited):
  canaries = make(60, seed=1, kinds=("own_query", "own_document"))
  report = audited(
    untrained(seed=1), canaries, public=untrained(seed=2), num_ranked=9
  )
  for cell in report.cells:
    # Uniform ranks in 1..9: mean 5, deviation 2.58 / sqrt(30).
    assert abs(np.mean(cell.ranks) - 5) < 4 * 2.58 / math.sqrt(30)
    assert not cell.leaked
  query = {cell.kind: cell for cell in report.cells}["own_query"]
  # log2(200 / rank) of a uniform rank is 1.42 on average.
  assert abs(np.mean(query.exposure) - 1.42) < 4 * 1.4 / math.sqrt(30)
  assert report.lower_bound < 0.5
  assert report.control > 0.001


def test_the_scores_of_the_public_checkpoint_are_subtracted(audited):
  canaries = make(40, seed=1, kinds=("own_query",))
  (bound,) = audited(
    untrained(seed=1), canaries, public=untrained(seed=1)
  ).bounds
  assert bound.auroc[0] == 0.5  # all are 0


def test_the_papers_kinds_alone_have_ranks_and_no_exposure(audited):
  canaries = make(6, seed=2, kinds=("digits_document",))
  (cell,) = audited(untrained(seed=1), canaries).cells
  assert len(cell.ranks) + len(cell.held_out_ranks) == 6
  assert cell.exposure == ()
  assert cell.leaked is cell.leaked_held_out is None


@pytest.mark.slow
def test_canaries_in_the_public_checkpoint_void_the_audit(audited, learned):
  """Planted: pre-training has met the inserted ones, or all of them."""
  canaries, params = learned
  assert audited(params, canaries, public=params).is_contaminated
  every = {k: v for k, v in tokenized(canaries).items()}
  knows_all = trained(untrained(seed=0), every, 250)
  assert audited(knows_all, canaries, public=untrained(seed=0)).is_contaminated
  assert not audited(params, canaries, public=untrained(seed=0)).is_contaminated


def test_groups_are_held_against_the_claim_for_groups(audited, learned):
  _, params = learned
  canaries = make(8, seed=3, repetitions=(1, 2, 50))
  claim = claimed(1.0)
  report = audited(params, canaries, claim=claim)
  found = {one.repetitions: one.claimed_epsilon for one in report.bounds}
  assert found == {
    1: claim.epsilon,
    2: 2 * claim.epsilon,
    50: math.inf,  # the delta of 50 records is above 1
  }


def test_a_secret_in_the_synthetic_set_is_a_leak():
  one = next(one for one in make(4, seed=0) if one.kind == "own_query")
  digits = list(one.spelled)
  other = next(one for one in make(4, seed=0) if one.kind == "new_tokens")
  found = audit._leaked([one], [["nothing"]], ["a", " ".join(digits), "b"])
  assert found.tolist() == [True]
  assert not audit._leaked([other], [[other.spelled]], [])  # no text tells it
  # Not where two queries meet.
  found = audit._leaked([one], [["nothing"]], [digits[0], "".join(digits[1:])])
  assert found.tolist() == [False]


def test_an_audit_needs_inserted_and_held_out_canaries(audited):
  canaries = make(8, seed=0)
  for side in (True, False):
    one_side = [one for one in canaries if one.inserted is side]
    with pytest.raises(ValueError, match="inserted and held-out canaries"):
      audited(untrained(seed=0), one_side)
