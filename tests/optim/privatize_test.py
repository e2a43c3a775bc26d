"""Noise: its size, its independence, its repeatability."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from jax.sharding import Mesh, PartitionSpec

from synthq_jax import optim
from synthq_jax.optim import keys as keys_lib
from synthq_jax.optim import noise as noise_lib
from synthq_jax.privacy import sampling

KEY = jax.random.key(11)
ZEROS = {"a": jnp.zeros((100, 200)), "b": jnp.zeros((100, 200))}


ARGUMENTS = dict(
  l2_sensitivity=0.5, noise_multiplier=3.0, denominator=10.0, key=KEY
)


def make(**changes):
  return optim.privatize(**(ARGUMENTS | changes))


def draw(transform, steps=1, tree=None):
  tree = ZEROS if tree is None else tree
  state, means = transform.init(tree), []
  for _ in range(steps):
    mean, state = jax.jit(transform.update)(tree, state)
    means.append(mean)
  return means


@pytest.fixture(name="drawn", scope="module")
def _drawn():
  """The noise of two steps."""
  return draw(make(), steps=2)


def has_std(values, std, confidence=1 - 1e-6):
  """Whether a chi-squared test of the variance accepts the value `std`."""
  values = np.asarray(values, np.float64).reshape(-1)
  statistic = np.sum((values / std) ** 2)
  low, high = scipy.stats.chi2.interval(confidence, values.size)
  return low <= statistic <= high


def test_the_noise_has_the_std_of_multiplier_times_sensitivity(drawn):
  for leaf in drawn[0].values():
    assert has_std(leaf, 3.0 * 0.5 / 10.0)
    assert not has_std(leaf, 1.1 * 3.0 * 0.5 / 10.0)
    assert not has_std(leaf, 0.9 * 3.0 * 0.5 / 10.0)


def correlation(a, b):
  return abs(np.corrcoef(np.reshape(a, -1), np.reshape(b, -1))[0, 1])


def test_leaves_of_equal_shape_and_steps_get_independent_noise():
  first, second = draw(make(), steps=2)
  bound = 5 / np.sqrt(20_000)
  assert correlation(first["a"], first["b"]) < bound
  assert correlation(first["a"], second["a"]) < bound
  assert correlation(first["a"], second["b"]) < bound
  assert correlation(first["a"], first["a"]) > bound


@pytest.mark.parametrize("derive", ["split", "fold_in"])
def test_a_child_of_a_key_has_noise_of_its_own(derive):
  """`split(key, n)[i]` is `fold_in(key, i)`, which must not be a step's key."""
  parent = jax.random.key(11)
  children = {
    "split": lambda i: jax.random.split(parent, 3)[i],
    "fold_in": lambda i: jax.random.fold_in(parent, i),
  }
  of_parent = draw(make(key=parent), steps=3)
  bound = 5 / np.sqrt(20_000)
  for i in range(3):
    for mine in draw(make(key=children[derive](i)), steps=2):
      for theirs in of_parent:
        assert correlation(mine["a"], theirs["a"]) < bound
  # The leaves' digests keep noises apart even then: the keys themselves tell.
  for i in range(3):
    mine = noise_lib._derive_step_key(parent, jnp.int32(i))
    theirs = children[derive](i)
    assert (jax.random.key_data(mine) != jax.random.key_data(theirs)).any()


@jax.tree_util.register_pytree_with_keys_class
class _Twins:
  """Two children under one key."""

  def __init__(self, *children):
    self.children = children

  def tree_flatten_with_keys(self):
    return [(jax.tree_util.DictKey("w"), one) for one in self.children], None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(*children)


@pytest.mark.parametrize(
  ("make_key", "logged"),
  [
    (lambda: jax.random.key(2**32 - 1), 1),
    (lambda: jax.random.PRNGKey(0), 1),
    (lambda: optim.secret_key(42, "noise"), 1),
    (lambda: optim.secret_key(2**32, "noise"), 0),
    (lambda: jax.random.split(jax.random.key(0))[1], 0),  # nothing can see it
  ],
)
def test_a_noise_key_that_can_be_guessed_is_logged_once(
  make_key, logged, caplog
):
  keys_lib._log_guessable.cache_clear()
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      key = make_key()
      jax.jit(lambda key=key: make(key=key).init(ZEROS))()
  messages = [record.getMessage() for record in caplog.records]
  assert len(messages) == logged
  assert all("a seed below 2^32" in message for message in messages)


def test_two_leaves_of_one_path_are_refused():
  tree = _Twins(jnp.zeros(3), jnp.zeros(3))
  transform = make()
  with pytest.raises(ValueError, match="path of its own for each leaf"):
    transform.update(tree, transform.init(tree))


def test_a_resumed_run_draws_the_same_noise(drawn):
  transform = make()
  state = transform.init(ZEROS)._replace(step=jnp.int32(1))
  resumed, state = jax.jit(transform.update)(ZEROS, state)
  np.testing.assert_array_equal(resumed["a"], drawn[1]["a"])
  assert state.step == 2
  assert len(jax.tree.leaves(state)) == 1


@pytest.mark.parametrize("wrap", [None, 2])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
def test_a_step_that_a_cast_of_the_state_rounds_is_refused(dtype, wrap):
  """256 + 1 is 256 in bfloat16: all later steps would share one noise."""
  transform = make() if wrap is None else optim.accumulate(make(), parts=wrap)
  state = optax.tree.cast(transform.init(ZEROS), dtype)
  with pytest.raises(ValueError, match=f"as int32, got {jnp.dtype(dtype)}"):
    transform.update(ZEROS, state)


def test_another_key_draws_other_noise(drawn):
  (other,) = draw(make(key=jax.random.key(12)))
  assert correlation(drawn[0]["a"], other["a"]) < 5 / np.sqrt(20_000)


def test_the_sum_is_divided_by_the_public_denominator_only():
  transform = make(noise_multiplier=0.0)
  (mean,) = draw(transform, tree={"a": jnp.array([20.0, -5.0])})
  np.testing.assert_array_equal(mean["a"], [2.0, -0.5])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("wrap", [None, 2])
def test_a_half_precision_sum_is_refused(dtype, wrap):
  """One record moves a sum of 2,057 by 1, and by 16 once it is in bfloat16."""
  record = jnp.full(1024, 1 / 32)
  more, fewer = (count * record for count in (2057, 2056))
  assert jnp.linalg.norm(more - fewer) == 1.0
  moved = more.astype(jnp.bfloat16) - fewer.astype(jnp.bfloat16)
  assert jnp.linalg.norm(moved.astype(jnp.float32)) == 16.0
  transform = make() if wrap is None else optim.accumulate(make(), parts=wrap)
  state = transform.init(record.astype(dtype))  # parameters may be
  transform.update(more, state)
  with pytest.raises(ValueError, match="clipped sum in float32, got the param"):
    transform.update(more.astype(dtype), state)


@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("noise_multiplier", -0.1),
    ("noise_multiplier", np.inf),
    ("l2_sensitivity", 0.0),
    ("l2_sensitivity", -1.0),
    ("l2_sensitivity", np.nan),
    ("denominator", 0.0),
    ("denominator", -3.0),
    ("denominator", np.inf),
  ],
)
def test_a_number_that_is_out_of_range_later_releases_nothing(
  name, value, is_traced
):
  """Traced, or of a schedule: a sensitivity of 0 would add no noise."""

  @jax.jit
  def mean(value):
    number = value if is_traced else lambda step: value + 0 * step
    transform = make(**{name: number})
    return transform.update(jnp.ones(3), transform.init(jnp.ones(3)))[0]

  assert np.isnan(mean(jnp.float32(value))).all()
  assert np.isfinite(mean(jnp.float32(0.5))).all()


def test_correlated_noise_goes_on_with_what_it_remembers():
  """Noise that forgot would leave in what later steps are to take away."""
  sampler = sampling.CyclicPoisson.with_margin(
    num_examples=100, expected_batch_size=5, cycle_length=3
  )
  noise = optim.banded(sampler=sampler, steps=5, bands=3)
  transform = make(noise=noise)
  update, state = jax.jit(transform.update), transform.init(ZEROS)
  known = noise.init(ZEROS)
  for step in range(5):
    found, state = update(ZEROS, state)
    drawn, known = noise.draw(KEY, jnp.array(step), ZEROS, known)
    np.testing.assert_allclose(
      found["a"], 0.15 * drawn["a"], rtol=1e-5, atol=1e-6
    )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    state.noise,
    known,
  )


def test_two_transforms_of_one_key_add_different_noise_to_their_leaves():
  """As under `optax.multi_transform`, where each sees leaves of its own."""
  (first,) = draw(make(), tree={"a": ZEROS["a"]})
  (second,) = draw(make(), tree={"b": ZEROS["b"]})
  assert correlation(first["a"], second["b"]) < 5 / np.sqrt(20_000)
  assert correlation(first["a"], first["a"]) > 0.99


@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx: optax.masked(tx, {"a": True, "b": False}),
    lambda tx: optax.multi_transform(
      {"x": tx, "y": optax.sgd(1.0)}, {"a": "x", "b": "y"}
    ),
  ],
  ids=["masked", "multi_transform"],
)
def test_leaves_that_would_go_on_without_noise_are_refused(wrap):
  """`masked(dp_adam)` passed the clipped sum of the other leaves on as it was."""
  with pytest.raises(ValueError, match="whole clipped sum.*optax.chain"):
    wrap(make()).init(ZEROS)
  with pytest.raises(ValueError, match="whole clipped sum"):
    wrap(optim.dp_adam(1e-3, **ARGUMENTS)).init(ZEROS)


def test_parts_of_the_parameters_may_have_optimizers_of_their_own(drawn):
  """The way that the refusal names."""
  labels = {"a": "fast", "b": "slow"}
  tx = optax.chain(
    make(),
    optax.multi_transform(
      {"fast": optax.sgd(1.0), "slow": optax.sgd(0.1)}, labels
    ),
  )
  updates, _ = tx.update(ZEROS, tx.init(ZEROS))
  noise = drawn[0]
  np.testing.assert_allclose(updates["a"], -noise["a"], rtol=1e-6)
  np.testing.assert_allclose(updates["b"], -0.1 * noise["b"], rtol=1e-6)


def test_parameters_that_are_no_floating_point_numbers_are_refused():
  with pytest.raises(ValueError, match=r"\['n'\] of int32"):
    make().init({"w": jnp.zeros(2), "n": jnp.zeros(3, jnp.int32)})


def test_parts_of_a_sum_inside_shard_map_are_refused():
  """Every device would add the same noise to its part."""
  mesh = Mesh(np.array(jax.devices()[:4]), ("parts",))
  transform = make()

  def step(total):
    return transform.update(total, transform.init(None))[0]

  def sharded(spec, **options):
    return jax.jit(
      jax.shard_map(
        step, mesh=mesh, in_specs=(spec,), out_specs=spec, **options
      )
    )

  with pytest.raises(ValueError, match=r"mesh axes \['parts'\]"):
    sharded(PartitionSpec("parts"))(jnp.zeros(8))
  with pytest.raises(ValueError, match=r"mesh axes \['parts'\]"):
    sharded(PartitionSpec("parts"), check_vma=False)(jnp.zeros(8))
  whole = sharded(PartitionSpec())(jnp.zeros(8))
  np.testing.assert_array_equal(whole, jax.jit(step)(jnp.zeros(8)))


def test_several_sums_under_vmap_do_not_share_their_noise():
  """Their differences would have none."""
  tx = make()
  several = jax.tree.map(lambda x: jnp.stack([x, x]), ZEROS)
  states = jax.vmap(tx.init)(several)
  for update in (jax.vmap(tx.update), jax.vmap(jax.jit(tx.update))):
    with pytest.raises(ValueError, match="several under jax.vmap and one key"):
      update(several, states)

  def with_key(key, tree):
    own = optim.privatize(
      l2_sensitivity=1.0, noise_multiplier=1.0, denominator=1.0, key=key
    )
    return own.update(tree, own.init(tree))[0]

  keys = jax.random.split(jax.random.key(0), 2)
  made = jax.vmap(with_key)(keys, several)
  assert correlation(made["a"][0], made["a"][1]) < 5 / np.sqrt(20_000)


def test_one_sum_under_several_noise_multipliers_does_not_share_its_noise():
  """Twice the mean of half the noise, less the other, was the sum itself."""
  total = {"a": jnp.arange(5.0)}
  key = jax.random.key(0)

  def release(noise_multiplier, key, denominator=1.0):
    tx = optim.privatize(
      l2_sensitivity=1.0,
      noise_multiplier=noise_multiplier,
      denominator=denominator,
      key=key,
    )
    return tx.update(total, tx.init(total))[0]["a"]

  several = jnp.array([0.5, 1.0])
  with pytest.raises(ValueError, match="several under jax.vmap and one key"):
    jax.vmap(lambda number: release(number, key))(several)
  small, large = jax.vmap(release)(several, jax.random.split(key))
  assert jnp.abs(2 * small - large - total["a"]).max() > 0.1
  # Means of one noisy sum are post-processing.
  assert jnp.isfinite(jax.vmap(lambda c: c * release(1.0, key))(several)).all()
  divided = jax.vmap(lambda number: release(1.0, key, number))(several)
  np.testing.assert_allclose(divided[0], 2 * divided[1], rtol=1e-6)


def test_numbers_in_half_precision_are_refused():
  tx = optax.inject_hyperparams(optim.privatize, static_args="key")(
    l2_sensitivity=0.5,
    noise_multiplier=0.705,
    denominator=1.0,
    key=jax.random.key(0),
  )
  params = jnp.zeros(9, jnp.bfloat16)  # in whose precision numbers are kept
  with pytest.raises(ValueError, match="in single precision, got bfloat16"):
    tx.update(jnp.zeros(9), tx.init(params))


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_of_single_examples_are_no_sum(jit):
  """They passed, unclipped, and turned parameters into [batch, ...]."""
  params = {"w": jnp.zeros((8, 2)), "b": jnp.zeros(2)}
  named = {"noise_multiplier": 1.0, "denominator": 4, "key": jax.random.key(0)}
  summed = optim.dp_adam(0.1, l2_sensitivity=1.0, **named)
  stacked = optim.dp_aggregate(l2_clip_norm=1.0, **named)
  batch = jax.tree.map(lambda x: jnp.ones((8, *x.shape)), params)
  for transform, wrong, right in (
    (summed, batch, params),
    (stacked, params, batch),
  ):
    state = transform.init(params)
    update = functools.partial(transform.update, is_padding_example=None)
    update = jax.jit(update) if jit else update
    with pytest.raises(ValueError, match="with the parameters' shapes, got"):
      update(wrong, state, params)
    updates, _ = update(right, state, params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
