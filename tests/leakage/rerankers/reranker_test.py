"""What all five rerankers promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.leakage import rerankers

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


def test_the_order_of_pairs_changes_no_loss(reranker, params):
  batch = reranker.featurize(QUERIES[:4], DOCUMENTS[:4])
  swapped = {name: array[[2, 3, 0, 1]] for name, array in batch.items()}
  loss_of = jax.jit(reranker.loss)
  loss = loss_of(params, batch)
  np.testing.assert_allclose(loss_of(params, swapped), loss, rtol=1e-5)
  reversed_labels = {name: x[[1, 0, 3, 2]] for name, x in batch.items()}
  assert abs(loss_of(params, reversed_labels) - loss) > 1e-6


def test_texts_without_a_piece_have_finite_gradients(reranker, params):
  batch = reranker.featurize(["", ""], ["", "apple"])
  gradient = jax.jit(jax.grad(reranker.loss))(
    params, batch, {"dropout": jax.random.key(1)}
  )
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", ["monoBERT", "Duet"])
def test_dropout_follows_its_key_and_is_off_without_one(make_reranker, name):
  reranker = make_reranker(name, dropout_rate=0.5)
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


def test_parameters_follow_the_key(reranker):
  def leaves(seed):
    return jax.tree.leaves(reranker.init(jax.random.key(seed)))

  for one, same, other in zip(leaves(0), leaves(0), leaves(1), strict=True):
    np.testing.assert_array_equal(one, same)
    is_constant = np.ptp(np.asarray(one)) == 0  # biases, norms
    assert is_constant or not np.array_equal(one, other)


def test_what_a_reranker_shows_is_short_and_holds_its_settings(make_reranker):
  shown = repr(make_reranker("monoBERT", dropout_rate=0.25))
  assert "dropout_rate=0.25" in shown and len(shown) < 500
  table = np.zeros((100, 8), np.float32)
  terms = rerankers.Terms(vocabulary=Tall(), embeddings=table, dim=77)
  shown = repr(rerankers.KNRM(terms=terms))
  assert "dim=77" in shown and "array" not in shown and "Tall" not in shown


class Tall:
  """A vocabulary that would show."""

  vocab_size = 100
