"""What all five rerankers promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

QUERIES = ["apple stone", "river", "cloud table", "", "paper unheard"]
DOCUMENTS = [
  "good stone apple stone river",
  "bad",
  "cloud paper fine market table school",
  "music",
  "",
]


@pytest.fixture(scope="module")
def params(reranker):
  return reranker.init(jax.random.key(0))


@functools.partial(jax.jit, static_argnames="reranker")
def compiled(reranker, params, batch):
  """Compiled as a whole: one operation after the other takes far longer."""
  return reranker.score(params, batch)


def score(reranker, params, batch):
  return np.asarray(compiled(reranker, params, batch))


def features(reranker):
  return reranker.featurize(QUERIES, DOCUMENTS)


def test_columns_of_padding_change_no_score(reranker, params):
  batch = features(reranker)
  whole = score(reranker, params, batch)
  needed = max(
    np.flatnonzero((batch[name] != 0).any(axis=0)).max() + 1
    for name in reranker.padded
  )
  for width in (needed, needed + 1):
    assert width < batch[reranker.padded[0]].shape[1]
    cut = {
      name: array[:, :width] if name in reranker.padded else array
      for name, array in batch.items()
    }
    np.testing.assert_allclose(
      score(reranker, params, cut), whole, rtol=1e-5, atol=1e-6
    )


def test_a_row_is_scored_by_itself_whatever_stands_around_it(reranker, params):
  batch = features(reranker)
  whole = score(reranker, params, batch)
  order = np.array([3, 1, 4, 0, 2])
  moved = {name: array[order] for name, array in batch.items()}
  np.testing.assert_allclose(
    score(reranker, params, moved), whole[order], rtol=1e-5, atol=1e-6
  )
  alone = {name: array[2:3] for name, array in batch.items()}
  np.testing.assert_allclose(
    score(reranker, params, alone), whole[2:3], rtol=1e-5, atol=1e-6
  )
  assert len(set(whole.round(6).tolist())) > 2


def test_rows_of_zeros_that_fill_a_batch_up_have_finite_scores(
  reranker, params
):
  batch = {name: np.zeros_like(x) for name, x in features(reranker).items()}
  assert np.isfinite(score(reranker, params, batch)).all()


def test_texts_without_a_piece_have_finite_gradients(reranker, params):
  batch = reranker.featurize(["", ""], ["", "apple"])
  gradient = jax.jit(jax.grad(reranker.loss))(
    params, batch, {"dropout": jax.random.key(1)}
  )
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
  ("name", "options"), [("monoBERT", {"dropout_rate": 0.5}), ("Duet", {})]
)
def test_dropout_follows_its_key_and_is_off_without_one(
  make_reranker, name, options
):
  reranker = make_reranker(name, **options)
  params = reranker.init(jax.random.key(0))
  batch = features(reranker)
  keys = [jax.random.key(number) for number in (1, 1, 2)]
  logits = jax.jit(reranker.logits)
  first, same, other = (logits(params, batch, {"dropout": k}) for k in keys)
  np.testing.assert_array_equal(first, same)
  assert not np.allclose(first, other)
  plain = logits(params, batch)
  np.testing.assert_array_equal(plain, logits(params, batch))
  assert not np.allclose(plain, first)
