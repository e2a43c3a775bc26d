"""How far one record moves a clipped sum: never beyond the bound, and up to it.

Encoders of one parameter turn points on a circle, so that all gradients of
similarities lie on one line and can add up. An example is its angle and the
speed at which the parameter turns it. At speeds that are large against the clip
norm even similarities of 1 - 1e-4 have gradients to be clipped, and a tilt away
from 1 or -1 gives them the signs that an adversary needs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive as losses
from synthq_jax.optim.contrastive import group

SIZE, CLIP = 6, 2.0
TILT, SPEED = 0.0141, 1e5  # cos(TILT) is 1 - 1e-4

# How another batch differs in its last record.
CHANGES = {
  ("ADD_OR_REMOVE_ONE", "pair"): "absent",
  ("REPLACE_SPECIAL", "pair"): "absent",
  ("REPLACE_ONE", "pair"): "other pair",
  ("ADD_OR_REMOVE_ONE", "query"): "no query",
  ("REPLACE_SPECIAL", "query"): "no query",
  ("REPLACE_ONE", "query"): "other query",
}


def turn(params, x):
  angle = x[:, 0] + params * x[:, 1]
  return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


def make(method, loss, size=SIZE):
  return optim.contrastive_clipped_grad(
    turn,
    turn,
    loss=loss,
    l2_clip_norm=CLIP,
    method=method,
    max_batch_size=size,
  )


def worst(loss, size=SIZE):
  """A batch, and another last record, that attain the bounds for pairs.

  All rows have their documents opposite; the newcomer's document is where their
  queries are, and its query where their documents are. The tilts decide the
  signs of the gradients: one where a weight grows, another where it shrinks.
  The other record is at the same place and turns the other way.
  """
  hard = getattr(loss, "hard_negatives", 0)
  shrink = isinstance(loss, losses.Spreadout)  # the old negatives' own weights
  last = np.arange(size) == size - 1
  q = np.where(last, np.pi + 2 * TILT * shrink, 0.0)
  d = np.where(last, TILT * (-1) ** shrink, np.pi + TILT)

  def batch(queries, documents):
    q_x, d_x = (
      np.stack([angle, np.broadcast_to(speed, size)], axis=1)
      for angle, speed in ((q, queries), (d, documents))
    )
    repeated = np.repeat(d_x[:, None], hard, axis=1)
    return {"queries": q_x, "documents": d_x, "negatives": repeated}

  return batch(SPEED, -SPEED), batch(-99 * SPEED, 99 * SPEED)


def jittered(rng, loss):
  """The worst batch, with angles and speeds that are a little off."""
  return tuple(
    {
      name: x * [1, rng.uniform(0.5, 2)] + rng.normal(size=x.shape) * [0.05, 1]
      for name, x in batch.items()
    }
    for batch in worst(loss)
  )


def at_random(rng, loss):
  """Any batch and any other record, slow or fast."""
  hard = getattr(loss, "hard_negatives", 0)
  speed = 10.0 ** rng.uniform(-1, 4)

  def draw(*shape):
    return rng.normal(size=(*shape, 2)) * [2.0, speed]

  return tuple(
    {
      "queries": draw(SIZE),
      "documents": draw(SIZE),
      "negatives": draw(SIZE, hard),
    }
    for _ in range(2)
  )


def neighbour(batch, other, change, extra):
  """The batch with its last record changed; `extra` are fields beside it."""
  last = np.arange(len(batch["queries"])) == len(batch["queries"]) - 1
  fields = {
    "other pair": ("queries", "documents", "negatives", "example_id"),
    "other query": ("queries",),
  }
  changed = batch | extra
  other = other | {"example_id": extra.get("other_id")}
  for name in fields.get(change, ()):
    if name in changed and other[name] is not None:
      changed[name] = np.concatenate([changed[name][:-1], other[name][-1:]])
  changed.pop("other_id", None)
  return changed | {
    "is_padding": last & (change == "absent"),
    "has_query": ~(last & (change == "no query")),
  }


@functools.cache
def summed(fn):
  """The sums of many batches: one program for all tests of a function."""

  def total(batch):
    padding = batch.pop("is_padding")
    return fn(jnp.float32(0.0), batch, is_padding_example=padding)[0]

  return jax.jit(jax.vmap(total))


def moves(fn, cases, changes, extra=None):
  """How far each case's sum moves under each change, [cases]."""
  unused = set()
  if not getattr(fn.loss, "hard_negatives", 0):
    unused |= {"negatives"}
  if getattr(fn.loss, "directions", 1) == 2:
    unused |= {"has_query"}

  def sums(change):
    batches = [neighbour(*case, change, extra or {}) for case in cases]
    stacked = {
      name: np.stack([batch[name] for batch in batches])
      for name in set(batches[0]) - unused
    }
    return np.asarray(summed(fn)(stacked), np.float64)

  return {change: np.abs(sums(change) - sums(None)) for change in changes}


def check(
  fn, *, units=("pair", "query"), least=0.99, extra=None, adversary=None
):
  """200 random and 21 adversarial neighbours; the bound is attained."""
  rng = np.random.default_rng(1)
  cases = [adversary or worst(fn.loss)]
  cases += [jittered(rng, fn.loss) for _ in range(20)]
  cases += [at_random(rng, fn.loss) for _ in range(200)]
  wanted = {
    relation: change
    for relation, change in CHANGES.items()
    if relation[1] in units
    and not (change == "no query" and getattr(fn.loss, "directions", 1) == 2)
  }
  moved = moves(fn, cases, sorted(set(wanted.values())), extra)
  for relation, change in wanted.items():
    limit, largest = fn.sensitivity(*relation), np.max(moved[change])
    print(f"{relation}: {largest / limit:.5f} of {limit:.4f}")
    assert largest <= limit * (1 + 1e-5), relation
    assert largest >= least * limit, relation


@pytest.mark.parametrize(
  "loss",
  [
    losses.Softmax(temperature=0.5),
    losses.Softmax(temperature=0.5, directions=2),
    losses.Softmax(temperature=0.5, hard_negatives=2),
    losses.Sigmoid(temperature=0.5, bias=0.3, max_batch_size=SIZE),
    losses.Spreadout(),
    losses.Spreadout(max_batch_size=SIZE),
  ],
  ids=["softmax", "both", "hard", "sigmoid", "spreadout", "constant"],
)
def test_clipped_pairs_move_up_to_their_sensitivity_and_not_beyond(loss):
  check(make(optim.Logit(), loss))


def test_a_newcomer_gains_nothing_where_all_other_columns_are_duplicates():
  loss = losses.Softmax(temperature=1.0)
  fn = make(optim.Logit(), loss, size=16)
  ids = {"document_ids": np.r_[np.zeros(15, np.int32), 1]}
  moved = moves(fn, [worst(loss, 16)], ["absent"], ids)["absent"]
  limit = fn.sensitivity("ADD_OR_REMOVE_ONE", "pair")
  assert 0.5 * limit < moved <= limit
  # Dropped from the denominators, they leave one column to the newcomer.
  newcomer = np.exp(1) / (np.exp(1) + np.exp(-1))
  assert 2 * CLIP * 15 * newcomer > 1.8 * limit


SHARP = losses.Softmax(temperature=0.05)


@pytest.mark.parametrize("gradients", ["all", "pair", "query"])
def test_rows_of_the_batch_protect_a_query(gradients):
  check(make(optim.Row(gradients=gradients), SHARP), units=["query"])


def turned(size=SIZE):
  """A batch, and another last record, that turn every row around.

  Old documents stand still, a little apart, and each old query turns so that its
  row's gradient is above zero. The newcomer's document lies where their queries
  are and turns fast enough to decide the sign of all rows.
  """
  last = np.arange(size) == size - 1
  documents = np.where(last, TILT, np.pi + TILT * 2.0 ** np.arange(size))
  old = documents[:-1]
  slopes = np.sin(old) @ np.full(size - 1, 1 / (size - 1)) - np.sin(old)
  signs = np.append(np.sign(slopes), 1.0)

  def batch(speed):
    return {
      "queries": np.stack([np.where(last, np.pi, 0), signs * SPEED], axis=1),
      "documents": np.stack([documents, np.where(last, speed, 0)], axis=1),
    }

  return batch(1e4 * SPEED), batch(-1e4 * SPEED)


@pytest.mark.parametrize(
  ("gradients", "least"), [("all", 0.99), ("pair", 0.2), ("query", 0.2)]
)
def test_a_pair_turns_around_the_rows_of_its_batch(gradients, least):
  fn = make(optim.Row(gradients=gradients), SHARP)
  assert fn.sensitivity("ADD_OR_REMOVE_ONE", "pair") == (2 * SIZE - 1) * CLIP
  check(fn, units=["pair"], least=least, adversary=turned())


@pytest.mark.parametrize("gradients", ["all", "pair", "query"])
def test_rows_of_public_negatives_protect_a_pair(gradients):
  public = np.array([[0.1, SPEED], [np.pi, -SPEED], [2.0, 0.0]])
  fn = make(optim.Row(negatives="public", gradients=gradients), SHARP)
  check(fn, extra={"public_negatives": public})


def test_a_batch_turns_around_whatever_changes():
  fn = make(optim.Batch(), SHARP)
  assert {fn.sensitivity(*relation) for relation in CHANGES} == {2 * CLIP}
  check(fn)


def test_a_record_turns_around_the_groups_it_leaves_and_enters():
  fn = make(optim.Group(size=4, groups=2), SHARP)
  assert fn.sensitivity("REPLACE_ONE", "pair") == 4 * CLIP
  ids = np.arange(100, dtype=np.int32)
  (first, second), _ = group.assign(ids, np.zeros(100, bool), 2, 8)
  extra = {
    "example_id": np.concatenate([second[:3], first[:3]]),
    "other_id": second[3:4],
  }
  check(fn, units=["pair"], extra=extra)


def test_who_is_left_out_of_a_full_group_goes_by_keys_and_not_by_places():
  """Records come and go, and with them the places of all others."""
  ids = np.random.default_rng(1).integers(2**31, size=40).astype(np.int32)

  def stay(ids):
    places, is_filled = group.assign(ids, np.zeros(len(ids), bool), 4, 3)
    return [
      set(ids[np.asarray(row)[np.asarray(filled)]].tolist())
      for row, filled in zip(places, is_filled, strict=True)
    ]

  whole = stay(ids)
  assert [len(members) for members in whole] == [3] * 4  # 28 are left out
  for seed in range(5):
    assert stay(np.random.default_rng(seed).permutation(ids)) == whole
