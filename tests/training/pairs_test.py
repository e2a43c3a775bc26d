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
  settings: loop.Settings = loop.Settings(progress=False, log_every=30)


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


@functools.partial(jax.jit, static_argnames="distilled")
def loss(params, batch, distilled=0.0):
  return pairs.loss_fn(
    params, batch, model_config=CONFIG, temperature=0.1, distilled=distilled
  )


@jax.jit
def encode(params, tokens):
  return dual_encoder.encode(params, CONFIG, tokens)


def test_training_brings_queries_to_their_documents(params, tmp_path):
  trained = pairs.train(
    Recipe(), params, CONFIG, records(), loop.Files.below(tmp_path, "test")
  )
  before, after = loss(params, records()), loss(trained, records())
  assert np.mean(after) < 0.5 * np.mean(before)


def test_a_second_training_goes_on_in_the_order_of_rows(params, tmp_path):
  seen = []

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Watched(Recipe):
    def rows(self, step, total):
      seen.extend(super().rows(step, total).tolist())
      return super().rows(step, total)

  recipe = Watched(steps=3, batch_size=4, warmup_steps=0)
  rows = {key: value[:12] for key, value in records().items()}
  for first in (0, 3):
    files = loop.Files(
      directory=tmp_path / str(first),
      metrics_path=tmp_path / f"{first}.jsonl",
      description="part",
    )
    pairs.train(recipe, params, CONFIG, rows, files, first=first)
  assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12))
  assert seen[:12] != seen[12:]  # the second epoch, not the first again


def test_another_pair_of_the_same_document_is_no_negative(params):
  batch = {name: values[:4] for name, values in records().items()}
  twin = {name: values[[0, 1, 2, 3, 0]] for name, values in batch.items()}
  np.testing.assert_allclose(
    loss(params, twin)[0], loss(params, batch)[0], rtol=1e-5
  )
  other = dict(twin, rows=np.arange(5, dtype=np.int32))
  assert loss(params, other)[0] > loss(params, batch)[0] + 0.1


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


def with_negatives(seed=1):
  """A batch with two hard negatives for each pair, and margins."""
  rng, batch = np.random.default_rng(seed), records()
  rows = rng.integers(0, 16, (16, 2)).astype(np.int32)
  return batch | {
    "negatives": batch["documents"][rows],
    "negative_rows": rows,
    "margins": rng.normal(size=(16, 2)).astype(np.float32),
  }


@pytest.mark.parametrize("distilled", [0.0, 0.3])
def test_hard_negatives_are_columns_of_every_row_but_their_own(
  params, distilled
):
  batch = with_negatives()
  found = loss(params, batch, distilled)
  queries = np.asarray(encode(params, batch["queries"]), np.float64)
  own = np.asarray(encode(params, batch["documents"]), np.float64)
  for i in range(16):
    columns = [(own[j], batch["rows"][j]) for j in range(16)]
    hard = batch["negative_rows"].ravel()
    columns += [(own[row], row) for row in hard]
    scores = [
      queries[i] @ vector / 0.1
      for j, (vector, row) in enumerate(columns)
      if j == i or row != batch["rows"][i]
    ]
    softmax = np.log(np.exp(scores).sum()) - queries[i] @ own[i] / 0.1
    margins = [
      (queries[i] @ own[i] - queries[i] @ own[row]) / 0.1
      for row in batch["negative_rows"][i]
    ]
    squared = np.mean((np.array(margins) - batch["margins"][i]) ** 2)
    expected = (1 - distilled) * softmax + distilled * squared
    assert found[i] == pytest.approx(expected, rel=1e-4)


@functools.cache
def whole_gradient(hard):
  """A batch, what its loss reads beside, and its loss and gradient at once."""
  batch = with_negatives() if hard else records()
  known = {
    "model_config": CONFIG,
    "temperature": 0.1,
    "distilled": 0.5 if hard else 0.0,
  }
  mean = lambda params: pairs.loss_fn(params, batch, **known).mean()  # noqa: E731
  return batch, known, jax.jit(jax.value_and_grad(mean))(start())


@pytest.mark.parametrize(("size", "hard"), [(1, True), (4, True), (16, False)])
def test_a_cached_gradient_is_the_gradient(params, size, hard):
  batch, known, (expected, of_all) = whole_gradient(hard)
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


def test_a_cached_gradient_holds_fewer_texts_in_memory(params):
  rows = np.ones((512, 32), np.int32)
  batch = {"queries": rows, "documents": rows, "rows": np.arange(512)}

  def size(gradient):
    compiled = jax.jit(gradient).lower(params).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  known = {"model_config": CONFIG, "temperature": 0.1}
  whole = size(
    jax.grad(lambda params: pairs.loss_fn(params, batch, **known).mean())
  )
  cached = size(
    lambda params: pairs.cached_value_and_grad(
      params, batch, microbatch_size=8, **known
    )
  )
  assert cached < whole / 8
