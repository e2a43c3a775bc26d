"""T5X's trainer with private steps, in this process; needs T5X."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("t5x", reason="T5X is not installed: docs/t5x.md")

import tiny_model  # noqa: E402
import tiny_task  # noqa: E402
from flax import traverse_util  # noqa: E402
from t5x import optimizers, utils  # noqa: E402
from t5x import trainer as trainer_lib  # noqa: E402

from synthq_jax.backends.t5x import (  # noqa: E402
  batches,
  dp_dataset,
  dp_optimizers,
  dp_trainer,
  gradients,
)
from synthq_jax.privacy import sampling  # noqa: E402
from synthq_jax.runtime import fingerprints  # noqa: E402

STRATEGIES = ("vmap", "bookkeeping", "ghost")
NO_NOISE = dataclasses.replace(tiny_model.SETTINGS, epsilon=math.inf)


@pytest.fixture(autouse=True)
def _t5x_promotes_ranks():
  with jax.numpy_rank_promotion("allow"):
    yield


def relative(left, right):
  """The largest difference of two trees over the largest entry of each leaf."""
  pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
  return max(float(jnp.max(abs(a - b)) / jnp.max(abs(b))) for a, b in pairs)


def sums_of_gradients(side, gradients_of):
  """What functions of (model, state, batch) return on side x side devices."""
  model = tiny_model.make_model()
  partitioner, state, axes = tiny_model.make_state(model, side)
  batch = tiny_model.make_batch()

  def all_of_them(state, batch):
    return [gradient(model, state, batch) for gradient in gradients_of]

  call = partitioner.partition(
    all_of_them,
    in_axis_resources=(axes, partitioner.data_partition_spec),
    out_axis_resources=[axes.params] * len(gradients_of),
  )
  return call(state, batch)


def t5xs_own(model, state, batch):
  key = jax.random.PRNGKey(1)
  return trainer_lib.accumulate_grads_microbatched(
    model, state, batch, key, None
  )[0]


def clipped_by(strategy, model, state, batch):
  grad_fn = gradients.clipped_grad(model, l2_clip_norm=1e9, strategy=strategy)
  features, is_padding = gradients.split(batch)
  return grad_fn(
    state.params,
    features,
    key=jax.random.PRNGKey(1),
    is_padding_example=is_padding,
  )[0]


@pytest.mark.parametrize(
  ("side", "strategies"), [(1, STRATEGIES), (2, ("vmap", "bookkeeping"))]
)
def test_gradients_are_t5xs_own_where_nothing_is_clipped(side, strategies):
  ours = [functools.partial(clipped_by, strategy) for strategy in strategies]
  theirs, *found = sums_of_gradients(side, [t5xs_own, *ours])
  for strategy, gradient in zip(strategies, found, strict=True):
    assert relative(gradient, theirs) <= 1e-5, strategy


def capture_gradient(monkeypatch, trainer, batch, run=None):
  """What the trainer hands to T5X's optimizer, and metrics."""
  monkeypatch.setattr(
    dp_trainer.trainer_lib,
    "apply_grads",
    lambda state, gradient, metrics, rate, computer: (gradient, metrics),
  )
  if run is None:
    return jax.jit(trainer._private_step)(trainer.train_state, batch)
  return run(trainer._private_step, trainer.train_state, batch)


def test_noise_has_the_deviation_that_was_accounted_for(monkeypatch, tmp_path):
  """All entries are Gaussian with that deviation, to about 2%."""
  release = tiny_model.make_release(tmp_path)
  trainer = tiny_model.make_trainer(tiny_model.make_model(), release)
  gradient, _ = capture_gradient(monkeypatch, trainer, tiny_model.make_batch(0))
  std = release.noise_multiplier * 0.1 / 8
  drawn = np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)])
  assert len(drawn) > 5000
  # The deviation of n Gaussians is known to 1 / sqrt(2n).
  tolerance = 4 / math.sqrt(2 * len(drawn))
  assert tolerance < 0.05
  assert abs(drawn.std() / std - 1) < tolerance
  assert abs(drawn.mean()) < 4 * std / math.sqrt(len(drawn))
  share = np.mean(np.abs(drawn) < std)
  assert abs(share - 0.6827) < 4 * math.sqrt(0.68 * 0.32 / len(drawn))


def test_the_optimizer_gets_the_clipped_sum_over_the_public_divisor(
  monkeypatch, tmp_path
):
  release = tiny_model.make_release(tmp_path, NO_NOISE)
  trainer = tiny_model.make_trainer(tiny_model.make_model(), release)
  one_gradient = jax.jit(
    lambda params, one: jax.grad(
      lambda p: trainer._model.loss_fn(p, one, None)[0]
    )(params)
  )
  for real in (1, 5):
    batch = tiny_model.make_batch(real)
    mean, _ = capture_gradient(monkeypatch, trainer, batch)
    total = None
    for row in range(real):
      one = {
        k: x[row : row + 1]
        for k, x in batch.items()
        if k not in (batches.EXAMPLE_ID, sampling.IS_PADDING)
      }
      gradient = one_gradient(trainer.train_state.params, one)
      scale = jnp.minimum(1.0, 0.1 / optax.tree.norm(gradient))
      clipped = jax.tree.map(functools.partial(jnp.multiply, scale), gradient)
      total = (
        clipped if total is None else jax.tree.map(jnp.add, total, clipped)
      )
    expected = jax.tree.map(lambda x: x / 8, total)
    assert relative(mean, expected) <= 1e-4


def test_parts_of_a_batch_change_nothing_but_rounding(monkeypatch, tmp_path):
  batch, means = tiny_model.make_batch(11), []
  for parts in (None, 4):
    release = tiny_model.make_release(tmp_path, NO_NOISE, name=f"of_{parts}")
    trainer = tiny_model.make_trainer(
      tiny_model.make_model(), release, num_microbatches=parts
    )
    means.append(capture_gradient(monkeypatch, trainer, batch)[0])
  assert relative(*means) <= 1e-5
  # The noise of a step on two roundings of its gradient would give both away.
  with pytest.raises(ValueError, match="microbatches 4, now 2"):
    tiny_model.make_trainer(
      tiny_model.make_model(), release, num_microbatches=2
    )


@pytest.mark.parametrize(
  ("wrong", "reason"),
  [
    ({"num_microbatches": 3}, "divide BATCH_SIZE = 16, got 3"),
    ({"strategy": "book-keeping"}, "strategy"),
  ],
  ids=str,
)
def test_a_typing_error_uses_up_no_model_dir(tmp_path, wrong, reason):
  """It was found when the step was compiled, after it had become a fact."""
  release, model = tiny_model.make_release(tmp_path), tiny_model.make_model()
  with pytest.raises(ValueError, match=reason):
    tiny_model.make_trainer(model, release, **wrong)
  assert not (tmp_path / "model/privacy/ledger.jsonl").exists()
  tiny_model.make_trainer(model, release)


def test_summaries_hold_private_values_only_when_asked_for(
  monkeypatch, tmp_path
):
  release = tiny_model.make_release(tmp_path)
  found = {}
  for asked in (False, True):
    trainer = tiny_model.make_trainer(
      tiny_model.make_model(), release, writes_private_metrics=asked
    )
    _, metrics = capture_gradient(
      monkeypatch, trainer, tiny_model.make_batch(), run=jax.eval_shape
    )
    found[asked] = set(metrics)
  assert found[False] == {"timing/steps_per_second"}
  assert found[True] - found[False] == {
    "private/loss",
    "private/gradient_norm",
  }


def optax_model(release):
  return tiny_model.make_model(
    dp_optimizers.dp_adafactor(release=release, learning_rate=0.01)
  )


def with_hardware_generator(folder):
  release = tiny_model.make_release(folder)
  rng = jax.random.key_data(jax.random.key(0, impl="unsafe_rbg"))
  tiny_model.make_trainer(tiny_model.make_model(), release, rng=rng)


def with_statistics(folder):
  release, model = tiny_model.make_release(folder), tiny_model.make_model()
  _, state, _ = tiny_model.make_state(model)
  state = state.replace(flax_mutables={"batch_stats": {"mean": jnp.zeros(2)}})
  tiny_model.make_trainer(model, release, train_state=state)


def with_half_precision(folder):
  release, model = tiny_model.make_release(folder), tiny_model.make_model()
  _, state, _ = tiny_model.make_state(model)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
  tiny_model.make_trainer(
    model, release, train_state=state.replace_params(half)
  )


def with_an_ignored_rate(folder):
  release = tiny_model.make_release(folder)
  tiny_model.make_trainer(optax_model(release), release)


def without_a_rate(folder):
  release = tiny_model.make_release(folder)
  tiny_model.make_trainer(
    tiny_model.make_model(), release, learning_rate_fn=None
  )


def with_noise_twice(folder):
  release = tiny_model.make_release(folder)
  model = tiny_model.make_model(optimizers.adamw(learning_rate=0.1))
  tiny_model.make_trainer(model, release, learning_rate_fn=None)


def with_noise_twice_for_some(folder):
  release = tiny_model.make_release(folder)
  private = dp_optimizers.dp_adam(release=release, learning_rate=0.01)
  several = optimizers.MultiOptimizer(
    [
      (_paths("encoder"), private),
      (_paths("decoder", "token"), tiny_model.t5x_adafactor()),
    ]
  )
  dp_trainer._check_optimizer(several, lambda step: 0.01, release)


def _paths(*names):
  return traverse_util.ModelParamTraversal(
    lambda path, _: any(name in path for name in names)
  )


def with_two_releases(folder):
  release = tiny_model.make_release(folder)
  other = tiny_model.make_release(folder, name="other")
  tiny_model.make_trainer(optax_model(other), release, learning_rate_fn=None)


def with_a_count_that_began_anew(folder):
  release = tiny_model.make_release(folder)
  model = optax_model(release)
  _, state, _ = tiny_model.make_state(model)
  for step in (0, 3):
    tiny_model.make_trainer(
      model,
      release,
      learning_rate_fn=None,
      train_state=state.replace_step(jnp.asarray(step)),
    )


def with_weights_before_noise(folder):
  release = tiny_model.make_release(folder)
  tiny_model.make_trainer(
    optax_model(release),
    release,
    learning_rate_fn=None,
    weight_metrics_computer=trainer_lib.WeightMetricsComputer(),
  )


def with_another_rate(folder):
  for rate in (0.01, 0.02):
    tiny_model.make_trainer(
      tiny_model.make_model(),
      tiny_model.make_release(folder),
      learning_rate_fn=lambda step, rate=rate: rate,
    )


def with_another_strategy(folder):
  for strategy in ("bookkeeping", "ghost"):
    tiny_model.make_trainer(
      tiny_model.make_model(),
      tiny_model.make_release(folder),
      strategy=strategy,
    )


@pytest.mark.parametrize(
  ("trap", "reason"),
  [
    (with_hardware_generator, "RANDOM_SEED"),
    (with_statistics, "mutable"),
    (with_half_precision, "float32, .*got bfloat16"),
    (with_an_ignored_rate, "T5X would ignore"),
    (without_a_rate, "learning_rate_fn for T5X's own"),
    (with_noise_twice, "a second one"),
    (with_noise_twice_for_some, "a second one"),
    (with_two_releases, "one release"),
    (with_weights_before_noise, "no noise yet"),
    (with_a_count_that_began_anew, "counted 3 steps"),
    (with_another_rate, "learning_rates"),
    (with_another_strategy, "strategy bookkeeping, now ghost"),
  ],
  ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_trap_of_the_trainer_is_refused(trap, reason, tmp_path):
  with pytest.raises(ValueError, match=reason) as caught:
    trap(tmp_path)
  assert "\n" not in str(caught.value)


def dataset(folder, **changes):
  """Our dataset with a changed configuration."""
  config = {
    "mixture_or_task_name": "synthq_tiny",
    "task_feature_lengths": tiny_model.LENGTHS,
    "split": "train",
    "batch_size": tiny_model.ROWS,
    "shuffle": True,
    "seed": None,
    "pack": False,
  }
  rest = {
    k: changes.pop(k)
    for k in ("num_shards", "num_epochs", "settings")
    if k in changes
  }
  promised = rest.pop("settings", tiny_model.SETTINGS)
  return dp_dataset.get_dataset(
    utils.DatasetConfig(**{**config, **changes}),
    0,
    rest.pop("num_shards", 1),
    tiny_model.make_model().FEATURE_CONVERTER_CLS,
    release=tiny_model.make_release(folder, promised),
    **rest,
  )


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"pack": True}, "pack = False"),
    ({"batch_size": 32}, "max_batch_size"),
    ({"num_shards": 3}, "multiple of the 3"),
    ({"num_epochs": 1}, "num_epochs"),
    ({"mixture_or_task_name": "synthq_tiny_mixture"}, "expected a task"),
    ({"split": "test"}, "NUM_EXAMPLES=40"),
    ({"task_feature_lengths": None}, "set TASK_FEATURE_LENGTHS"),
    *(
      ({"mixture_or_task_name": name}, "one record less")
      for name in tiny_task.COUPLED
    ),
  ],
  ids=str,
)
def test_a_trap_of_the_dataset_is_refused(change, reason, tmp_path):
  with pytest.raises(ValueError, match=reason) as caught:
    dataset(tmp_path, **change)
  assert "\n" not in str(caught.value)


def test_batches_follow_from_the_step_and_begin_with_padding(tmp_path):
  iterator = dataset(tmp_path)
  first = next(iterator)
  assert first[sampling.IS_PADDING].all()
  with pytest.raises(ValueError, match="DPTrainer"):
    next(iterator)
  spec = iterator.element_spec
  iterator._release.begin(0, {})
  drawn = [next(iterator) for _ in range(5)]
  with pytest.raises(ValueError, match="PRIVATE_STEPS=5"):
    next(iterator)
  resumed = dataset(tmp_path)
  resumed._release.begin(3, {})
  next(resumed)
  for name, values in next(resumed).items():
    np.testing.assert_array_equal(values, drawn[3][name])
    assert (values.shape, values.dtype) == (spec[name].shape, spec[name].dtype)


def test_a_training_that_goes_on_reads_its_split_once(tmp_path, monkeypatch):
  """Preprocessors were checked before its first step, on the same records."""
  read, calls = dp_dataset.feature_converters.read_task, []

  def read_task(*arguments, **options):
    calls.append(options["leaves_out"])
    return read(*arguments, **options)

  monkeypatch.setattr(dp_dataset.feature_converters, "read_task", read_task)
  dataset(tmp_path)
  dataset(tmp_path)._release.begin(0, {})
  assert calls == [True, False] * 2
  dataset(tmp_path)
  assert calls == [*[True, False] * 2, False]


def test_what_changes_a_gradient_is_a_fact_of_the_training():
  """Two models made alike have equal facts, also where they hold functions."""
  partitioner, state, _ = tiny_model.make_state(tiny_model.make_model())

  def facts(**options):
    model = tiny_model.make_model(**options)
    return dp_trainer._collect_facts(model, state, lambda step: 0.01)

  first = facts()
  assert first == facts()
  slower = tiny_model.t5x_adafactor()
  slower.hyper_params = slower.hyper_params.replace(decay_rate=0.7)
  for change in (
    {"dropout": 0.1},
    {"label_smoothing": 0.1},
    {"loss_normalizing_factor": 500.0},
    {"optimizer": slower},
  ):
    assert facts(**change)["model"] != first["model"]
  here = fingerprints.machine(partitioner.mesh)
  assert here == fingerprints.machine(partitioner.mesh)
  assert here != fingerprints.machine(None)


def test_parameters_that_differ_in_a_bit_begin_no_training_again():
  """On every mesh the same parameters have the same digest."""
  _, state, _ = tiny_model.make_state(tiny_model.make_model())
  first = dp_trainer._digest(state.params)
  leaves, tree = jax.tree.flatten(state.params)
  mesh = jax.make_mesh((2,), ("data",))
  spread = [
    jax.device_put(
      x,
      jax.sharding.NamedSharding(
        mesh,
        jax.sharding.PartitionSpec("data" if x.shape[0] % 2 == 0 else None),
      ),
    )
    for x in leaves
  ]
  assert dp_trainer._digest(tree.unflatten(spread)) == first
  for place in (0, -1):
    changed = np.array(leaves[place])
    changed.ravel()[3] = np.nextafter(changed.ravel()[3], np.float32(9))
    other = [*leaves]
    other[place] = changed
    assert dp_trainer._digest(tree.unflatten(other)) != first
  turned = [leaf[::-1] for leaf in leaves]
  assert dp_trainer._digest(tree.unflatten(turned)) != first
