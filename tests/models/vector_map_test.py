"""The map of a frozen encoder's vectors: losses, sensitivity, shrinkage."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax import optim
from synthq_jax.models import vector_map
from synthq_jax.privacy import claim, sampling

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


def test_a_pool_of_all_documents_is_the_softmax_over_the_collection():
  losses = losses_of(np.arange(DOCUMENTS, dtype=np.int32))
  scores = np.asarray(vector_map.map_queries(MAP, ASKED)) @ VECTORS.T / TAU
  logs = np.asarray(jax.nn.log_softmax(jnp.asarray(scores), axis=1))
  for row in (0, 1, 2):
    wanted = CHOSEN.rows[row][CHOSEN.relevant[row]]
    assert losses[row] == pytest.approx(-logs[row, wanted].mean(), rel=1e-4)


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


@jax.jit
@jax.grad
def gradient_of_one(params, one):
  return vector_map.get_losses(params, one, vectors=VECTORS, pool=POOL)[0]


def gradient(row):
  one = {name: value[row : row + 1] for name, value in BATCH.items()}
  return np.asarray(gradient_of_one(MAP, one)["map"])


def test_the_gradient_of_a_query_has_rank_one_and_its_norm_is_found():
  clipped, _ = grad_fn(1e6)
  _, aux = clipped(MAP, BATCH)
  for row in range(QUERIES):
    full = gradient(row)
    assert aux.norms[row] == pytest.approx(np.linalg.norm(full), rel=1e-4)
    assert np.linalg.matrix_rank(full, tol=1e-4) <= 1


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


@pytest.mark.parametrize(
  "hostile",
  [0.0, 1e4, -1e4, 1e18, 1e38, np.inf, np.nan],
  ids=str,
)
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


def test_equal_records_add_up_to_their_number_of_clip_norms():
  one = {name: np.repeat(value[:1], 50, 0) for name, value in BATCH.items()}
  clipped, _ = grad_fn(0.5)
  total, aux = clipped(MAP, one)
  assert aux.norms.min() > 0.5
  assert np.linalg.norm(total["map"]) == pytest.approx(50 * 0.5, rel=1e-4)


def test_a_query_with_a_thousand_relevant_documents_is_one_record():
  vectors = unit(1200)
  near = np.argsort(-ASKED[:2] @ vectors.T, axis=1)[:, :40]
  chosen = vector_map.choose_candidates(
    near, [range(100, 1100), [7]], size=16, most_relevant=4
  )
  assert chosen.relevant.sum(axis=1).tolist() == [4, 1]
  negatives = chosen.rows[0][~chosen.relevant[0] & chosen.candidate[0]]
  assert not ({*negatives.tolist()} & {*range(100, 1100)})
  batch = {"queries": ASKED[:2], **chosen._asdict()}
  clipped = jax.jit(
    optim.clipped_grad(
      functools.partial(vector_map.get_losses, vectors=vectors, pool=POOL),
      l2_clip_norm=0.5,
    )
  )
  whole, _ = clipped(MAP, batch)
  rest, _ = clipped(MAP, batch, is_padding_example=np.array([True, False]))
  moved = np.linalg.norm(np.asarray(whole["map"]) - np.asarray(rest["map"]))
  assert moved <= 0.5 * (1 + 1e-4)


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


def test_a_private_training_learns_what_the_queries_share():
  dim, count, steps = 16, 400, 12
  rng = np.random.default_rng(1)
  documents = rng.normal(size=(300, dim)).astype(np.float32)
  documents /= np.linalg.norm(documents, axis=1, keepdims=True)
  turn, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
  wanted = rng.integers(0, 300, count)
  asked = (documents[wanted] @ turn).astype(np.float32)
  near = np.argsort(-asked @ documents.T, axis=1)[:, :20]
  chosen = vector_map.choose_candidates(near, wanted[:, None], size=20)
  batch = {"queries": asked, **chosen._asdict()}
  clipped = optim.clipped_grad(
    functools.partial(
      vector_map.get_losses,
      vectors=documents,
      pool=np.arange(0, 300, 5),
      temperature=0.1,
    ),
    l2_clip_norm=1.0,
  )
  promise = claim.calibrated(
    epsilon=8,
    sampler=sampling.Poisson(
      num_examples=count, expected_batch_size=count, max_batch_size=count + 1
    ),
    steps=steps,
    l2_clip_norm=clipped.sensitivity("ADD_OR_REMOVE_ONE"),
  )
  transform = optim.dp_dual_averaging(
    1.0,
    l2_sensitivity=promise.l2_sensitivity,
    noise_multiplier=promise.noise_multiplier,
    denominator=count,
    key=jax.random.key(3),
  )
  params = vector_map.init(dim)
  state = jax.jit(transform.init)(params)
  compiled, update = jax.jit(clipped), jax.jit(transform.update)
  losses = []
  for _ in range(steps):
    total, aux = compiled(params, batch)
    losses.append(float(aux.losses.mean()))
    updates, state = update(total, state, params)
    params = optax.apply_updates(params, updates)
  rank = lambda x: (np.asarray(x) @ documents.T).argmax(axis=1)  # noqa: E731
  before = np.mean(rank(asked) == wanted)
  after = np.mean(rank(vector_map.map_queries(params, asked)) == wanted)
  assert losses[-1] < 0.7 * losses[0]
  assert after > before + 0.3
