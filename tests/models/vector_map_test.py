"""The map of a frozen encoder's vectors: losses, sensitivity, shrinkage."""

import functools

import jax
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.models import vector_map

DIM, DOCUMENTS, QUERIES, TAU = 12, 40, 7, 0.05
RNG = np.random.default_rng(0)


def unit(rows):
  vectors = RNG.normal(size=(rows, DIM)).astype(np.float32)
  return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


VECTORS = unit(DOCUMENTS)
MAP = {"map": 0.3 * RNG.normal(size=(DIM, DIM)).astype(np.float32)}
ASKED = unit(QUERIES)
CHOSEN = vector_map.choose_candidates(
  np.argsort(-ASKED @ VECTORS.T, axis=1)[:, :9],
  [[3], [1, 2], [4], [], [5, 6, 7, 8, 9], [0], [39]],
  size=6,
  most_relevant=3,
)
BATCH = {"queries": ASKED, **CHOSEN._asdict()}
POOL = np.array([0, 3, 5, 17, 30], np.int32)


@functools.cache
def grad_fn(clip):
  """Returns the clipped sum, compiled, and its sensitivity."""
  loss = functools.partial(vector_map.get_losses, vectors=VECTORS, pool=POOL)
  made = optim.clipped_grad(loss, l2_clip_norm=clip)
  return jax.jit(made), made.sensitivity("ADD_OR_REMOVE_ONE")


def loss_by_hand(row, matrix, pool):
  asked = ASKED[row].astype(np.float64)
  moved = asked + asked @ matrix.astype(np.float64)
  there = CHOSEN.rows[row][CHOSEN.candidate[row]].tolist()
  scores = {x: VECTORS[x] @ moved / TAU for x in there}
  weights = {x: np.exp(score) for x, score in scores.items()}
  left_out = CHOSEN.left_out[row].tolist()
  for x in pool:
    if x not in weights and x not in left_out:
      weights[x] = np.exp(VECTORS[x] @ moved / TAU) * DOCUMENTS / len(pool)
  total = np.log(sum(weights.values()))
  wanted = CHOSEN.rows[row][CHOSEN.relevant[row]].tolist()
  return np.mean([total - scores[x] for x in wanted]) if wanted else 0.0


@jax.jit
def losses_of(pool):
  return vector_map.get_losses(MAP, BATCH, vectors=VECTORS, pool=pool)


@pytest.mark.parametrize("pool", [POOL, None], ids=["pool", "candidates"])
def test_the_loss_is_the_cross_entropy_over_candidates_and_pool(pool):
  losses = losses_of(pool)
  drawn = [] if pool is None else pool.tolist()
  expected = [loss_by_hand(row, MAP["map"], drawn) for row in range(QUERIES)]
  np.testing.assert_allclose(losses, expected, rtol=1e-4)
  assert losses[3] == 0.0 and min(losses[:3]) > 0.0


def test_no_relevant_document_is_a_negative_of_the_pool():
  """Those beyond `most_relevant` were: the map moved queries away from them."""
  left_out = CHOSEN.left_out[4]
  left_out = left_out[left_out >= 0]
  assert len(left_out) == 2
  assert {*left_out, *CHOSEN.rows[4][:3]} == {5, 6, 7, 8, 9}
  without = np.setdiff1d(np.arange(DOCUMENTS), left_out)
  scores = np.asarray(vector_map.map_queries(MAP, ASKED)) @ VECTORS.T / TAU
  wanted = scores[4, CHOSEN.rows[4][:3]]
  expected = np.log(np.exp(scores[4, without]).sum()) - wanted.mean()
  losses = losses_of(np.arange(DOCUMENTS, dtype=np.int32))
  assert losses[4] == pytest.approx(expected, rel=1e-4)


def test_one_query_moves_the_sum_by_the_sensitivity_at_most_and_attains_it():
  clip = 0.5
  clipped, bound = grad_fn(clip)
  whole, aux = clipped(MAP, BATCH)
  moves = []
  for row in range(QUERIES):
    is_left_out = np.arange(QUERIES) == row
    rest, _ = clipped(MAP, BATCH, is_padding_example=is_left_out)
    moves.append(np.linalg.norm(whole["map"] - rest["map"]))
  assert max(moves) <= bound * (1 + 1e-4)
  assert aux.norms.max() > clip
  assert max(moves) == pytest.approx(bound, rel=1e-4)


@pytest.mark.parametrize("hostile", [1e4, 1e38, np.nan], ids=str)
def test_a_hostile_vector_moves_the_sum_by_no_more(hostile):
  clip = 0.5
  asked = ASKED.copy()
  asked[2] = hostile * np.sign(VECTORS[1] + 1e-3)
  batch = {**BATCH, "queries": asked}
  clipped, _ = grad_fn(clip)
  whole, _ = clipped(MAP, batch)
  rest, _ = clipped(MAP, batch, is_padding_example=np.arange(QUERIES) == 2)
  moved = np.linalg.norm(np.asarray(whole["map"]) - np.asarray(rest["map"]))
  assert moved <= clip * (1 + 1e-4)


def test_a_query_chooses_and_loses_what_it_does_alone():
  near = np.argsort(-ASKED @ VECTORS.T, axis=1)[:, :9]
  alone = vector_map.choose_candidates(
    near[4:5], [[5, 6, 7, 8, 9]], size=6, most_relevant=3
  )
  np.testing.assert_array_equal(alone.rows[0], CHOSEN.rows[4])
  loss = functools.partial(vector_map.get_losses, vectors=VECTORS, pool=POOL)
  optim.check_independence(loss, MAP, BATCH)
  assert not CHOSEN.relevant[3].any() and CHOSEN.candidate[3].all()


def test_sizes_that_do_not_fit_are_refused():
  near = np.zeros((2, 5), int)
  with pytest.raises(ValueError, match="same queries, got 2 and 1"):
    vector_map.choose_candidates(near, [[1]], size=6)
  with pytest.raises(ValueError, match="expected size >= 5, got size=4"):
    vector_map.choose_candidates(near, [[1], [2]], size=4)
