"""Wrong use of contrastive losses fails, in one line that says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive as losses
from synthq_jax.privacy import sampling

SOFTMAX = losses.Softmax(temperature=0.5)
BOTH = losses.Softmax(temperature=0.5, directions=2)
SIGMOID = losses.Sigmoid(temperature=0.5, max_batch_size=8)
PARAMS = {"w": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)}


def encode(params, x):
  x = x @ params["w"]
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def not_normalized(params, x):
  return 3.0 * encode(params, x)


def make(method, loss=SOFTMAX, *, size=8, clip=1.0, document=encode):
  return optim.contrastive_clipped_grad(
    encode,
    document,
    loss=loss,
    l2_clip_norm=clip,
    method=method,
    max_batch_size=size,
  )


def make_batch(size):
  rng = np.random.default_rng(1)
  return {
    name: rng.normal(size=(size, 3)).astype(np.float32)
    for name in ("queries", "documents")
  }


def refuses(function, match):
  with pytest.raises(ValueError, match=match) as error:
    function()
  assert "\n" not in str(error.value)


def test_similarities_outside_their_range_are_refused():
  fn = make(optim.Logit(), document=not_normalized)
  refuses(
    lambda: fn(PARAMS, make_batch(5)), "from encode_document: divide them"
  )


@pytest.mark.parametrize("jit", [False, True])
def test_a_batch_s_own_documents_are_no_public_negatives(jit):
  """A pair moved all rows, where the noise is for one."""
  fn = make(optim.Row(negatives="public"))

  def step(params, batch):
    return fn(params, {**batch, "public_negatives": batch["documents"]})[0]

  step = jax.jit(step) if jit else step
  batch = make_batch(5)
  refuses(lambda: step(PARAMS, batch), "that no record decides, got fields of")
  public = {"public_negatives": make_batch(7)["documents"]}
  assert fn(PARAMS, batch | public)[0]["w"].shape == (3, 4)


def test_rows_that_a_sampler_drew_are_no_public_negatives():
  sampler = sampling.Poisson(
    num_examples=6, expected_batch_size=2, max_batch_size=8
  )
  records = make_batch(6)
  records["public_negatives"] = records["documents"].copy()
  batch = sampler.take(records, sampler.batch(1, 0))
  fn = make(optim.Row(negatives="public"))
  refuses(lambda: fn(PARAMS, batch), "that no record decides, got fields of")


def test_vectors_that_half_precision_makes_a_little_longer_than_1_pass():
  def in_half(params, x):
    x = (x @ params["w"]).astype(jnp.bfloat16)
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)

  documents = make_batch(200)["documents"]
  vectors = in_half(PARAMS, documents).astype(jnp.float32)
  lengths = np.linalg.norm(vectors, axis=1)
  assert lengths.max() > 1.001
  batch = make_batch(8)
  batch["documents"] = documents[np.argsort(-lengths)[:8]]
  fn = make(optim.Row(negatives="batch"), document=in_half)
  assert np.isfinite(fn(PARAMS, batch)[0]["w"]).all()


def test_a_batch_beyond_the_declared_maximum_is_refused():
  fn = make(optim.Logit())
  for call in (fn, jax.jit(lambda params, batch: fn(params, batch))):
    refuses(
      lambda call=call: call(PARAMS, make_batch(9)),
      "at most max_batch_size=8 .* a batch of 9",
    )


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({"documents": np.zeros((3, 3))}, "5 queries and 3 documents"),
    ({"negatives": np.zeros((5, 2, 3))}, "hard_negatives=0"),
    ({"has_query": np.ones(4, bool)}, "has_query"),
  ],
)
def test_a_batch_that_was_not_declared_is_refused(change, match):
  refuses(lambda: make(optim.Logit())(PARAMS, make_batch(5) | change), match)


@pytest.mark.parametrize(
  ("build", "match"),
  [
    (lambda: make(optim.Row(), BOTH), "directions=1"),
    (lambda: make(optim.Row(negatives="public"), SIGMOID), "Softmax"),
    (lambda: make(optim.Logit(), clip=0.0), "l2_clip_norm"),
    (lambda: make(optim.Logit(), size=0), "max_batch_size"),
    (lambda: make(optim.Logit(), losses.softmax), "Softmax"),
    (lambda: make(optim.Group(size=9)), "size=9"),
    (lambda: optim.Group(size=1), "size=1"),
    (lambda: optim.Logit(norms="fast"), "fast"),
    (lambda: optim.Row(negatives="private"), "private"),
    (lambda: optim.Row(gradients="none"), "none"),
    (lambda: make(optim.Logit()).sensitivity("REPLACE_ONE", "user"), "user"),
    (lambda: make(optim.Logit()).sensitivity("REPLACE_ONE"), "unit=None"),
  ],
)
def test_a_method_that_does_not_fit_is_refused(build, match):
  refuses(build, match)


@pytest.mark.parametrize(
  ("method", "loss", "options", "match"),
  [
    (optim.Group(size=4), SOFTMAX, {}, "example_id"),
    (optim.Row(negatives="public"), SOFTMAX, {}, "public_negatives"),
    (optim.Logit(), BOTH, {"has_query": np.ones(5, bool)}, "directions"),
  ],
)
def test_a_field_that_is_missing_or_too_much_is_named(
  method, loss, options, match
):
  fn = make(method, loss)
  refuses(lambda: fn(PARAMS, make_batch(5) | options), match)


@pytest.mark.parametrize(
  ("method", "name"),
  [
    (optim.Row(negatives="public"), "labels"),
    (optim.Logit(), "public_negatives"),
  ],
)
def test_a_field_that_nothing_would_read_is_refused(method, name):
  """Weights, masks or negatives would be ignored in silence."""
  batch = make_batch(5) | {"example_id": np.arange(5)}
  if method == optim.Row(negatives="public"):
    batch["public_negatives"] = np.ones((3, 3), np.float32)
  make(method)(PARAMS, batch)
  refuses(
    lambda: make(method)(PARAMS, batch | {name: np.ones((5, 3))}),
    f"got {name}, which nothing would read",
  )


@pytest.mark.parametrize(
  ("method", "change", "match"),
  [
    (optim.Logit(), {"document_ids": np.array(list("abcde"))}, "document_ids"),
    (
      optim.Row(),
      {"document_ids": np.arange(5) / 2},
      "got float64: give an array of a h",
    ),
    (optim.Group(size=4), {"example_id": np.array(list("abcde"))}, "example_"),
    (optim.Batch(), {"queries": ["a", "b"]}, "batch.'queries'..0. of str"),
  ],
)
def test_ids_and_texts_that_are_no_numbers_are_named(method, change, match):
  with pytest.raises((TypeError, ValueError), match=match) as error:
    make(method)(PARAMS, make_batch(5) | change)
  assert "\n" not in str(error.value)


def test_lists_of_rows_are_told_to_be_one_array():
  """A list is a tree: each of its arrays was taken for a whole batch."""
  batch = make_batch(5) | {"documents": list(np.eye(5, 3))}
  refuses(lambda: make(optim.Row())(PARAMS, batch), "documents .* np.stack")


def test_an_encoder_that_returns_more_than_vectors_is_refused():
  fn = make(optim.Row(), document=lambda params, x: (encode(params, x), x))
  refuses(lambda: fn(PARAMS, make_batch(5)), "got tuple: return the pooled")


def test_a_batch_that_is_no_mapping_is_refused():
  refuses(
    lambda: make(optim.Logit())(PARAMS, tuple(make_batch(5).values())),
    "got tuple: pass a dict",
  )


class OwnLoss:
  """The softmax by another name, which the package does not know."""

  losses = staticmethod(SOFTMAX.losses)
  weights = staticmethod(SOFTMAX.weights)
  sensitivity = staticmethod(SOFTMAX.sensitivity)


def test_rows_of_a_loss_that_nobody_knows_are_refused():
  """A row's clip bounds nothing where other rows look at its query."""
  refuses(lambda: make(optim.Row(), OwnLoss()), "give rows of public negatives")
  batch = make_batch(4)
  for method in (optim.Logit(), optim.Batch()):
    total, _ = make(method, OwnLoss())(PARAMS, batch)
    expected, _ = make(method)(PARAMS, batch)
    np.testing.assert_array_equal(total["w"], expected["w"])


def test_dropout_is_refused():
  key = jax.random.key(0)
  refuses(
    lambda: make(optim.Logit())(PARAMS, make_batch(5), key=key), "dropout"
  )


def test_logit_refuses_encoders_in_half_precision():
  """One pass back for many pairs would round with all of them."""

  def half(params, x):
    x = x.astype("bfloat16") @ params["w"].astype("bfloat16")
    x = x.astype(jnp.float32)
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)

  def call(method):
    fn = make(method, document=half)
    return lambda: jax.jit(lambda batch: fn(PARAMS, batch))(make_batch(4))

  refuses(call(optim.Logit()), "float32 for Logit, got bfloat16")
  call(optim.Row(gradients="query"))()
