"""Training of a dual encoder on pairs without noise."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import random_t5

from synthq_jax.models import dual_encoder
from synthq_jax.training import loop, mesh, pairs

CONFIG = random_t5.config()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(pairs.Recipe):
  steps: int = 30
  batch_size: int = 8
  learning_rate: float = 1e-2
  warmup_steps: int = 2
  temperature: float = 0.1
  seed: int = 0
  settings: loop.Settings = loop.Settings(log_every=30)


def start():
  return dual_encoder.encoder_params(random_t5.params(CONFIG))


@pytest.fixture(name="params", scope="module")
def _params():
  return start()


def records():
  """Queries and documents that share one word of 16."""
  words = np.arange(16)
  rng = np.random.default_rng(0)
  noise = rng.integers(20, 40, (2, 16, 2))
  return {
    "queries": np.c_[words + 3, noise[0]].astype(np.int32),
    "documents": np.c_[noise[1], words + 3].astype(np.int32),
    "rows": words.astype(np.int32),
  }


@jax.jit
def loss(params, batch):
  return pairs.loss_fn(params, batch, model_config=CONFIG, temperature=0.1)


@jax.jit
def encode(params, tokens):
  return dual_encoder.encode(params, CONFIG, tokens)


def test_training_brings_queries_to_their_documents(params, tmp_path):
  trained = pairs.train(
    Recipe(), params, CONFIG, records(), loop.Files.below(tmp_path, "test")
  )
  before, after = loss(params, records()), loss(trained, records())
  assert np.mean(after) < 0.5 * np.mean(before)


def test_padding_that_no_text_of_a_batch_needs_is_not_computed(
  params, tmp_path, monkeypatch
):
  made, trained, widths = records(), [], []
  made["documents"] = np.pad(made["documents"], ((0, 0), (0, 3)))
  right = pairs.loss_fn

  def counted(params, batch, **known):
    widths.append((batch["queries"].shape[1], batch["documents"].shape[1]))
    return right(params, batch, **known)

  monkeypatch.setattr(pairs, "loss_fn", counted)
  for step in (8, 1):
    monkeypatch.setattr(pairs, "_LENGTH_STEP", step)
    files = loop.Files.below(tmp_path / str(step), "test")
    trained.append(pairs.train(Recipe(), params, CONFIG, made, files))
  assert {*widths} == {(3, 6), (3, 3)}
  for whole, cut in zip(*map(jax.tree.leaves, trained), strict=True):
    np.testing.assert_allclose(cut, whole, atol=1e-5)


def test_every_epoch_has_all_rows_in_an_order_of_its_own(params, tmp_path):
  seen = []

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Watched(Recipe):
    def rows(self, step, total):
      seen.extend(super().rows(step, total).tolist())
      return super().rows(step, total)

  recipe = Watched(steps=6, batch_size=4, warmup_steps=0)
  rows = {key: value[:12] for key, value in records().items()}
  files = loop.Files.below(tmp_path, "test")
  pairs.train(recipe, params, CONFIG, rows, files)
  assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12))
  assert seen[:12] != seen[12:]


def test_another_pair_of_the_same_document_is_no_negative(params):
  batch = {name: values[:4] for name, values in records().items()}
  twin = {name: values[[0, 1, 2, 3, 0]] for name, values in batch.items()}
  np.testing.assert_allclose(
    loss(params, twin)[0], loss(params, batch)[0], rtol=1e-5
  )
  other = dict(twin, rows=np.arange(5, dtype=np.int32))
  assert loss(params, other)[0] > loss(params, batch)[0] + 0.1


def test_the_second_direction_has_each_document_choose_a_query(params):
  batch = {name: values[:5] for name, values in records().items()}
  turned = dict(batch, queries=batch["documents"], documents=batch["queries"])
  known = {"model_config": CONFIG, "temperature": 0.1}
  both = functools.partial(pairs.loss_fn, **known, directions=2)
  want = (loss(params, batch) + loss(params, turned)) / 2
  np.testing.assert_allclose(both(params, batch), want, rtol=1e-5)
  assert np.abs(want - loss(params, batch)).max() > 1e-3
  mean, _ = pairs.cached_value_and_grad(
    params, batch, microbatch_size=5, **known, directions=2
  )
  np.testing.assert_allclose(mean, want.mean(), rtol=1e-5)
  with pytest.raises(ValueError, match="directions must be 1 or 2, got 3"):
    Recipe(directions=3)


def test_fewer_pairs_than_a_batch_are_refused(params, tmp_path):
  with pytest.raises(ValueError, match="batch_size must be at most 16"):
    pairs.train(
      Recipe(batch_size=17),
      params,
      CONFIG,
      records(),
      loop.Files.below(tmp_path, "test"),
    )


@pytest.mark.parametrize(
  "shape, batch_size",
  [
    (mesh.Shape(data=2, fsdp=2, tensor=2), 8),
    (mesh.Shape(data=4), 6),  # does not divide
  ],
)
def test_on_a_mesh_every_pair_is_still_the_negative_of_all_others(
  params, tmp_path, shape, batch_size
):
  found = [
    pairs.train(
      Recipe(steps=3, batch_size=batch_size),
      params,
      CONFIG,
      records(),
      loop.Files.below(tmp_path / name, "test"),
      mesh=on,
    )
    for name, on in (("one", None), ("many", mesh.make(shape)))
  ]
  for one, many in zip(*map(jax.tree.leaves, found), strict=True):
    assert np.abs(one - many).max() <= 1e-5 * np.abs(one).max()


@functools.cache
def whole_gradient():
  """A batch, what its loss reads beside, and its loss and gradient at once."""
  batch = records()
  known = {"model_config": CONFIG, "temperature": 0.1}
  mean = lambda params: pairs.loss_fn(params, batch, **known).mean()  # noqa: E731
  return batch, known, jax.jit(jax.value_and_grad(mean))(start())


@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_cached_gradient_is_the_gradient(params, size):
  batch, known, (expected, of_all) = whole_gradient()
  cached = functools.partial(
    pairs.cached_value_and_grad, microbatch_size=size, **known
  )
  loss, grads = jax.jit(cached)(params, batch)
  assert float(loss) == pytest.approx(float(expected), rel=1e-5)
  largest = max(np.abs(one).max() for one in jax.tree.leaves(of_all))
  for one, other in zip(
    jax.tree.leaves(grads), jax.tree.leaves(of_all), strict=True
  ):
    np.testing.assert_allclose(one, other, atol=1e-5 * largest)
