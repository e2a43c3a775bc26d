"""What other people's code asks of the transforms, and one line where it errs."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from synthq_jax import optim
from synthq_jax.losses import contrastive
from synthq_jax.optim import strategies

KEY = jax.random.key(0)
BATCH = {"x": jnp.array([[0.1, 0.2], [3.0, -4.0], [0.0, 9.0], [1.0, 1.0]])}
W = jnp.array([0.5, -1.0])
every = pytest.mark.parametrize("strategy", sorted(strategies.STRATEGIES))


def linear(w, batch):
  return batch["x"] @ w


def with_aux(w, batch):
  return batch["x"] @ w, {"square": batch["x"] ** 2}


def distance(first, second):
  return float(optax.tree.norm(jax.tree.map(jnp.subtract, first, second)))


@pytest.mark.parametrize(
  ("strategy", "microbatch"),
  [("bookkeeping", None), ("ghost", 2), ("vmap", 2)],
)
def test_aux_comes_back_with_a_row_for_each_example(strategy, microbatch):
  options = dict(
    l2_clip_norm=1.0, strategy=strategy, microbatch_size=microbatch
  )
  total, aux = jax.jit(optim.clipped_grad(with_aux, has_aux=True, **options))(
    W, BATCH
  )
  plain, _ = jax.jit(optim.clipped_grad(linear, **options))(W, BATCH)
  np.testing.assert_array_equal(total, plain)
  np.testing.assert_array_equal(aux.aux["square"], BATCH["x"] ** 2)


def test_losses_with_aux_are_looked_at_for_what_couples_them():
  optim.check_independence(with_aux, W, BATCH)
  with pytest.raises(ValueError, match="independent losses"):
    optim.check_independence(
      lambda w, b: (b["x"] @ w - jnp.mean(b["x"]), b), W, BATCH
    )


def test_aux_that_is_not_asked_for_or_has_no_rows_is_one_line():
  with pytest.raises(ValueError, match="has_aux=False, got tuple"):
    optim.clipped_grad(with_aux, l2_clip_norm=1.0)(W, BATCH)
  with pytest.raises(ValueError, match="has_aux=True, got"):
    optim.clipped_grad(linear, l2_clip_norm=1.0, has_aux=True)(W, BATCH)
  grad_fn = optim.clipped_grad(
    lambda w, b: (b["x"] @ w, {"mean": b["x"].mean()}),
    l2_clip_norm=1.0,
    has_aux=True,
  )
  with pytest.raises(ValueError, match=r"aux\['mean'\] of shape \(\)"):
    grad_fn(W, BATCH)


def test_argnums_choose_what_is_clipped_together():
  def loss_fn(frozen, x, w, b):
    return frozen * (x @ w + b)

  grad_fn = optim.clipped_grad(
    loss_fn, l2_clip_norm=1.5, argnums=(2, 3), batch_argnum=1
  )
  (w, b), _ = jax.jit(grad_fn)(2.0, BATCH["x"], W, jnp.array(0.5))
  each = 2 * np.concatenate([BATCH["x"], np.ones((4, 1))], axis=1)
  norms = np.linalg.norm(each, axis=1, keepdims=True)
  expected = (each * np.minimum(1, 1.5 / norms)).sum(axis=0)
  np.testing.assert_allclose([*w, b], expected, rtol=1e-5)


@pytest.mark.parametrize("places", [((), 1), ((0, 0), 1), (1, 1), (-1, 1)])
def test_places_that_overlap_are_refused(places):
  with pytest.raises(ValueError, match="argnums and batch_argnum"):
    optim.clipped_grad(
      linear, l2_clip_norm=1.0, argnums=places[0], batch_argnum=places[1]
    )


def test_parameters_without_a_gradient_are_named():
  grad_fn = optim.clipped_grad(lambda p, b: b["x"] @ p["w"], l2_clip_norm=1.0)
  for leaf, kind in ((jax.nn.relu, "custom_jvp"), (3, "int"), ("a", "str")):
    with pytest.raises(TypeError, match=rf"\['f'\] of {kind}"):
      grad_fn({"w": W, "f": leaf}, BATCH)
  grad_fn({"w": W, "f": None}, BATCH)  # what a partition leaves behind
  with pytest.raises(TypeError, match=r"batch\['name'\] of str"):
    grad_fn({"w": W}, {**BATCH, "name": "train"})


def noisy(w, batch, key):
  return batch["x"] @ w * jax.random.uniform(key)


def test_keys_are_one_or_one_for_each_example():
  grad_fn = optim.clipped_grad(noisy, l2_clip_norm=9.0)
  _, folded = grad_fn(W, BATCH, key=KEY)
  keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.arange(4))
  _, given = grad_fn(W, BATCH, key=keys)
  np.testing.assert_array_equal(folded.losses, given.losses)
  raw = jax.random.key_data(keys)
  np.testing.assert_array_equal(
    grad_fn(W, BATCH, key=raw)[1].losses, given.losses
  )
  with pytest.raises(ValueError, match=r"array of \(4,\) keys, got .*\(3,\)"):
    grad_fn(W, BATCH, key=keys[:3])
  with pytest.raises(TypeError, match="a seed is no key"):
    grad_fn(W, BATCH, key=0)


def test_a_missing_key_and_one_too_many_are_one_line():
  with pytest.raises(ValueError, match="call it with key=step_key"):
    optim.clipped_grad(noisy, l2_clip_norm=1.0)(W, BATCH)
  with pytest.raises(ValueError, match="leave key out"):
    optim.clipped_grad(linear, l2_clip_norm=1.0)(W, BATCH, key=KEY)
  with pytest.raises(ValueError, match="the arguments of the loss"):
    optim.clipped_grad(linear, l2_clip_norm=1.0)(W, BATCH, W, W)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_in_the_batch_s_place_is_named(make):
  """A raw key was taken for two examples: "do not average over it"."""
  grad_fn = optim.clipped_grad(
    lambda params, rng, batch: params * batch["x"], l2_clip_norm=1.0
  )
  batch = {"x": jnp.ones(4)}
  with pytest.raises(TypeError, match="got a random key: write loss") as error:
    grad_fn(jnp.array(1.0), make(0), batch)
  assert "\n" not in str(error.value)


def test_a_key_of_a_batch_s_loss_is_not_forgotten():
  grad_fn = optim.batch_clipped_grad(
    lambda w, batch, real, key: jnp.sum(noisy(w, batch, key) * real),
    l2_clip_norm=99.0,
  )
  gradient, _ = grad_fn(W, BATCH, key=KEY)
  expected = BATCH["x"].sum(axis=0) * jax.random.uniform(KEY)
  np.testing.assert_allclose(gradient, expected, rtol=1e-5)
  with pytest.raises(ValueError, match="call it with key=step_key"):
    grad_fn(W, BATCH)
  with pytest.raises(TypeError, match="a seed is no key"):
    grad_fn(W, BATCH, key=0)


NOISE = dict(l2_sensitivity=1.0, noise_multiplier=0.5, denominator=4.0)


def test_a_seed_in_a_key_s_place_is_refused_where_it_is_given():
  for wrong in (0, None, 1.5, np.arange(3)):
    with pytest.raises(TypeError, match="a seed is no key"):
      optim.dp_adam(1e-3, **NOISE, key=wrong)
  with pytest.raises(ValueError, match="one key, got keys"):
    optim.privatize(**NOISE, key=jax.random.split(KEY, 2))
  optim.privatize(**NOISE, key=jax.random.PRNGKey(1))


def encode(params, x):
  x = x * params[None]
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def contrastive_grad(method):
  return optim.contrastive_clipped_grad(
    encode,
    encode,
    loss=contrastive.Softmax(temperature=1.0),
    l2_clip_norm=1.0,
    method=method,
    max_batch_size=4,
  )


def test_losses_and_norms_get_no_noise():
  tx = optim.privatize(**NOISE, key=KEY)
  for made in (
    optim.clipped_grad(linear, l2_clip_norm=1.0)(W, BATCH),
    optim.batch_clipped_grad(
      lambda w, b, real: jnp.sum(b["x"] @ w * real), l2_clip_norm=1.0
    )(W, BATCH),
  ):
    with pytest.raises(ValueError, match="the clipped sum alone"):
      tx.update(made, tx.init(W))
    tx.update(made[0], tx.init(W))


def test_names_of_methods_and_foreign_gradients_are_one_line():
  for wrong in ("logit", optim.Logit, None):
    with pytest.raises(ValueError, match=r"a method such as optim.Logit\(\)"):
      contrastive_grad(wrong)
  with pytest.raises(TypeError, match="take privatize"):
    optim.logit_dp(
      optim.clipped_grad(linear, l2_clip_norm=1.0),
      relation="ADD_OR_REMOVE_ONE",
      unit="pair",
      noise_multiplier=1.0,
      denominator=1.0,
      key=KEY,
    )


def test_relations_are_names_or_constants_everywhere():
  batch = optim.batch_clipped_grad(lambda w, b, r: 0.0, l2_clip_norm=0.5)
  clipped = optim.clipped_grad(linear, l2_clip_norm=0.5)
  for relation in dp_accounting.NeighboringRelation:
    for grad_fn in (clipped, batch):
      assert grad_fn.sensitivity(relation) == grad_fn.sensitivity(relation.name)
    pair = contrastive_grad(optim.Logit()).sensitivity
    assert pair(relation, "pair") == pair(relation.name, "pair")
  for grad_fn in (clipped, batch):
    with pytest.raises(ValueError, match="REPLACE_TWO"):
      grad_fn.sensitivity("REPLACE_TWO")


@every
def test_a_sum_of_unit_norm_moves_by_one_at_any_clip_norm(strategy):
  """Formal guarantee: 1, or 2 if replaced, whatever clip norm the call gives."""
  grad_fn = optim.clipped_grad(
    linear, l2_clip_norm=1.0, strategy=strategy, rescale_to_unit_norm=True
  )
  call = jax.jit(lambda x, c: grad_fn(W, {"x": x}, l2_clip_norm=c)[0])
  rest = jnp.array([[0.3, 0.1], [-0.2, 0.4]])
  far = jnp.array([[50.0, 0.0]])
  padding = jnp.zeros((1, 2))  # whose gradient is zero
  for clip in (1e-6, 0.3, 7.0, 0.0, -2.0):
    sums = [
      call(jnp.concatenate([rest, last]), clip) for last in (far, -far, padding)
    ]
    added, replaced = distance(sums[0], sums[2]), distance(sums[0], sums[1])
    assert added <= grad_fn.sensitivity("ADD_OR_REMOVE_ONE") * (1 + 1e-5)
    assert replaced <= grad_fn.sensitivity("REPLACE_ONE") * (1 + 1e-5)
    if clip > 0:  # attained
      np.testing.assert_allclose([added, replaced], [1, 2], rtol=1e-3)
  assert not np.isfinite(call(rest, jnp.nan)).any()


def test_a_clip_norm_that_changes_needs_sums_of_unit_norm():
  with pytest.raises(TypeError, match="give each call its own"):
    optim.clipped_grad(linear, l2_clip_norm=lambda step: 1.0)
  with pytest.raises(TypeError, match="give each call its own"):
    jax.jit(lambda c: optim.clipped_grad(linear, l2_clip_norm=c) and c)(1.0)
  with pytest.raises(ValueError, match="noise is made for .* declared 1.0"):
    optim.clipped_grad(linear, l2_clip_norm=1.0)(W, BATCH, l2_clip_norm=2.0)
  unit = optim.clipped_grad(linear, l2_clip_norm=1.0, rescale_to_unit_norm=True)
  with pytest.raises(ValueError, match="l2_clip_norm"):
    unit(W, BATCH, l2_clip_norm=0.0)


def stds(tx, steps, size=40_000):
  """The noise of each step, on a sum of zeros."""
  zeros, state, found = jnp.zeros(size), tx.init(jnp.zeros(size)), []
  update = jax.jit(tx.update)
  for _ in range(steps):
    drawn, state = update(zeros, state, zeros)
    found.append(float(jnp.std(drawn)))
  return found


def test_schedules_say_each_step_s_noise():
  tx = optim.privatize(
    l2_sensitivity=lambda step: 2.0 - step / 2,
    noise_multiplier=optax.linear_schedule(1.0, 3.0, 2),
    denominator=lambda step: 1.0 + step,
    key=KEY,
  )
  expected = [1.0 * 2.0 / 1, 2.0 * 1.5 / 2, 3.0 * 1.0 / 3]
  np.testing.assert_allclose(stds(tx, 3), expected, rtol=0.02)


def test_optimizers_that_read_the_records_again_are_refused():
  """The loss of a batch beside its noisy gradient is no post-processing."""
  total = jnp.ones(3)
  for optimizer, more in (
    (optax.polyak_sgd(), {"value": 1.0}),
    (optax.contrib.reduce_on_plateau(), {"value": 1.0}),
    (optax.contrib.sophia(1e-3), {"obj_fn": jnp.sum}),
    (optax.lbfgs(), {"value": 1.0, "grad": total, "value_fn": jnp.sum}),
  ):
    tx = optax.chain(optim.privatize(**NOISE, key=KEY), optimizer)
    with pytest.raises(ValueError, match="read private records again"):
      tx.update(total, tx.init(total), total, **more)
  tx = optim.accumulate(optim.dp_adam(1e-3, **NOISE, key=KEY), parts=1)
  with pytest.raises(ValueError, match="read private records again"):
    tx.update(total, tx.init(total), total, value=1.0)


def test_an_injected_clip_norm_clips_and_is_covered_by_the_noise():
  rest = dict(noise_multiplier=0.5, denominator=4.0, key=KEY)
  every = {"is_padding_example": None}
  gradients = 3 * jnp.eye(4)
  fixed = optim.dp_aggregate(l2_clip_norm=0.25, **rest)
  tx = optax.inject_hyperparams(optim.dp_aggregate, static_args=("key",))(
    l2_clip_norm=lambda step: 0.25 * (step + 1), **rest
  )
  state = tx.init(jnp.zeros(4))
  found, state = jax.jit(tx.update)(gradients, state, jnp.zeros(4), **every)
  expected, _ = fixed.update(gradients, fixed.init(jnp.zeros(4)), **every)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  wide = jnp.zeros((2, 40_000))
  state = tx.init(wide[0])
  _, state = tx.update(wide, state, wide[0], **every)
  second, _ = tx.update(wide, state, wide[0], **every)
  assert float(jnp.std(second)) == pytest.approx(0.5 * 0.5 / 4, rel=0.02)
  with pytest.raises(TypeError, match="inject_hyperparams"):
    optim.dp_aggregate(l2_clip_norm=lambda step: 1.0, **rest)


def test_jax_privacys_noise_takes_our_sums():
  from jax_privacy.experimental import execution_plan

  plan = execution_plan.BandMFExecutionPlanConfig(
    iterations=10,
    strategy=np.ones(1),
    epsilon=None,
    delta=None,
    noise_multiplier=0.5,
    noise_seed=0,
  ).plan
  grad_fn = optim.clipped_grad(
    linear, l2_clip_norm=1.0, rescale_to_unit_norm=True
  )
  theirs = plan.clipped_grad(lambda w, x: jnp.sum(x @ w), batch_argnums=1)
  total, _ = grad_fn(W, BATCH)
  np.testing.assert_allclose(theirs(W, BATCH["x"]), total, rtol=1e-5)
  relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
  moved = theirs.sensitivity(relation)
  assert moved == grad_fn.sensitivity(relation)
  tx = plan.noise_addition_transform
  assert stds(tx, 1) == pytest.approx([0.5 * moved], rel=0.02)


@pytest.mark.parametrize(
  "wrong",
  [
    {"l2_sensitivity": 0.0},
    {"noise_multiplier": -1.0},
    {"noise_multiplier": jnp.inf},
    {"denominator": 0.0},
  ],
)
def test_numbers_out_of_range_are_refused_or_give_nan(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    optim.privatize(**{**NOISE, **wrong}, key=KEY)
  scheduled = {name: lambda _, x=x: x for name, x in wrong.items()}
  tx = optim.privatize(**{**NOISE, **scheduled}, key=KEY)
  mean, _ = tx.update(jnp.zeros(3), tx.init(None))
  assert not np.isfinite(mean).any()


def test_examples_in_two_arguments_are_told_to_be_one_batch():
  def loss(w, x, y):
    return (x @ w - y) ** 2

  grad_fn = optim.clipped_grad(loss, l2_clip_norm=1.0)
  x, y = BATCH["x"], jnp.ones(4)
  hint = "the batch is one argument.*put x and y into a dict"
  for compile_ in (lambda fn: fn, jax.jit):
    with pytest.raises(ValueError, match=hint):
      compile_(grad_fn)(W, x, y)
  with pytest.raises(ValueError, match=hint):
    grad_fn(W, {"x": x, "y": y})
  total, _ = optim.clipped_grad(
    lambda w, batch: loss(w, **batch), l2_clip_norm=1.0
  )(W, {"x": x, "y": y})
  assert jnp.isfinite(total).all()


def test_an_error_of_shapes_notes_that_two_arguments_hold_examples():
  def loss(w, x, labels):
    logits = x[..., None] * w
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

  grad_fn = optim.clipped_grad(loss, l2_clip_norm=1.0)
  with pytest.raises(ValueError) as error:
    grad_fn(W, BATCH["x"], jnp.zeros(4, int))
  assert "put x and labels into a dict" in str(vars(error.value))


@pytest.mark.parametrize("rows", [3, 4])
def test_a_public_argument_may_have_as_many_rows_as_the_batch(rows):
  def loss(w, batch, negatives):
    return batch["x"] @ w - (negatives @ w).max()

  grad_fn = optim.clipped_grad(loss, l2_clip_norm=1.0)
  total, _ = grad_fn(W, BATCH, jnp.ones((rows, 2)))
  assert jnp.isfinite(total).all()
  with pytest.raises(ValueError, match="call it with the arguments") as error:
    grad_fn(W)
  assert "dict" not in str(error.value)


def test_a_loss_with_a_key_is_not_told_of_a_dict():
  def loss(w, batch, rng):
    del rng
    return batch["x"] @ w

  with pytest.raises(ValueError, match="call it with key=step_key$"):
    optim.clipped_grad(loss, l2_clip_norm=1.0)(W, BATCH)


def test_a_loss_that_reads_the_mask_is_told_that_it_is_taken_out():
  def masked(w, batch):
    return jnp.where(batch["is_padding_example"], 0.0, batch["x"] @ w)

  batch = BATCH | {"is_padding_example": np.array([0, 0, 0, 1], bool)}
  with pytest.raises(KeyError) as raised:
    optim.clipped_grad(masked, l2_clip_norm=1.0)(W, batch)
  assert "leave padding out themselves" in raised.value.__notes__[0]


@pytest.mark.parametrize(
  ("loss_fn", "hint"),
  [
    (lambda p, b: b["x"] @ p[:, None], r"\(1, 1\).*take \[:, 0\] of one"),
    (lambda p, b: (b["x"] - p[None]) ** 2, r"\(1, 2\).*add up its other axes"),
    (lambda p, b: (b["x"] @ p).squeeze(), r"\(\).*but by its number"),
  ],
)
def test_a_loss_of_other_axes_is_told_what_to_do_with_them(loss_fn, hint):
  """The line said "do not average over it" to each of them."""
  grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
  with pytest.raises(ValueError, match=f"got shape={hint}"):
    grad_fn(jnp.ones(2), {"x": jnp.ones((3, 2))})
