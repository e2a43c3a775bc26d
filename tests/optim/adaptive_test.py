"""A clip norm that follows a noisy quantile, and what it costs."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from synthq_jax import optim

KEY = jax.random.key(5)
SETTINGS = dict(initial=0.5, noise_multiplier=1.3, denominator=20.0, key=KEY)


def linear(w, batch):
  return batch["x"] @ w


def released(clip, x, is_padding):
  """Both sums of a step, each over its noise's standard deviation."""
  grad_fn = optim.clipped_grad(
    linear, l2_clip_norm=clip.initial, rescale_to_unit_norm=True
  )
  state = clip.init()
  total, aux = grad_fn(
    jnp.zeros(2),
    {"x": x},
    l2_clip_norm=state.l2_clip_norm,
    is_padding_example=is_padding,
  )
  count = clip.counted(aux.norms, state.l2_clip_norm, is_padding)
  return np.append(total / clip.sum_noise_multiplier, count / clip.count_std)


@pytest.mark.parametrize("std", [None, 0.7, 3.0])
def test_neighbours_move_both_sums_by_what_the_claim_says(std):
  """Formal guarantee: one Gaussian mechanism of the claim's multiplier."""
  clip = optim.AdaptiveClip(**SETTINGS, count_std=std)
  rest = [[0.3, 0.1], [-0.2, 4.0]]
  lasts = [[9.0, 0.0], [-9.0, 0.0], [0.5, 0.0], [-0.01, 0.0], [np.nan, 1.0]]
  none = released(
    clip, jnp.array([*rest, [7.0, 7.0]]), jnp.array([False, False, True])
  )
  every = [
    released(clip, jnp.array([*rest, last]), jnp.zeros(3, bool))
    for last in lasts
  ]
  added = [np.linalg.norm(one - none) for one in every]
  replaced = [
    np.linalg.norm(one - two) for one, two in itertools.combinations(every, 2)
  ]
  limit = 1 / clip.noise_multiplier
  assert max(added) == pytest.approx(limit, rel=1e-5)  # attained
  assert max(replaced) <= 2 * limit * (1 + 1e-5)
  assert clip.sum_noise_multiplier > clip.noise_multiplier


def test_the_noise_of_the_count_is_what_it_says():
  clip = optim.AdaptiveClip(**SETTINGS, count_std=4.0, rate=1e-3)
  states = optim.AdaptiveClipState(
    jnp.full(20_000, 0.5), jnp.arange(20_000, dtype=jnp.int32)
  )
  after = jax.vmap(
    lambda s: clip.update(jnp.zeros(2), s, is_padding_example=None)
  )(states)
  counts = -20 * np.log(after.l2_clip_norm / 0.5) / 1e-3
  assert np.std(counts) == pytest.approx(4.0, rel=0.03)
  assert np.mean(counts) == pytest.approx(1.0, abs=0.15)


def test_the_clip_norm_finds_the_quantile():
  clip = optim.AdaptiveClip(
    initial=0.01, noise_multiplier=1.0, denominator=200, key=KEY, quantile=0.7
  )
  norms = jnp.asarray(np.random.default_rng(0).exponential(2.0, 200))
  padded = jnp.concatenate([norms, jnp.zeros(50)])
  is_padding = jnp.arange(250) >= 200
  step = jax.jit(
    lambda s: clip.update(padded, s, is_padding_example=is_padding)
  )
  state = clip.init()
  for _ in range(150):
    state = step(state)
  below = float(jnp.mean(norms <= state.l2_clip_norm))
  assert below == pytest.approx(0.7, abs=0.08)


@pytest.mark.parametrize(
  "wrong",
  [
    {"count_std": 0.65},
    {"noise_multiplier": 0.0},
    {"denominator": math.inf},
    {"quantile": 1.0},
    {"rate": 0.0},
    {"initial": 1e9},
  ],
)
def test_what_no_claim_covers_is_refused(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    optim.AdaptiveClip(**{**SETTINGS, **wrong})


def test_a_seed_is_refused_and_the_key_is_not_shown():
  with pytest.raises(TypeError, match="a seed is no key"):
    optim.AdaptiveClip(**{**SETTINGS, "key": 0})
  assert "key" not in repr(optim.AdaptiveClip(**SETTINGS))


ROWS, WHOLE = P("rows"), P()


def clip_norms_of_two_devices(norms_spec, states_spec, **options):
  """The clip norm of each device, and that of one device with all norms."""
  clip = optim.AdaptiveClip(**SETTINGS)
  norms = jnp.concatenate([jnp.full(11, 0.1), jnp.full(5, 9.0)])
  padding = jnp.arange(16) == 3
  states = optim.AdaptiveClipState(
    jnp.full(2, clip.initial), jnp.zeros(2, jnp.int32)
  )

  def step(norms, padding, states):
    state = jax.tree.map(lambda x: x[0], states)
    state = clip.update(norms, state, is_padding_example=padding)
    return state.l2_clip_norm[None]

  mapped = jax.shard_map(
    step,
    mesh=Mesh(np.array(jax.devices()[:2]), ("rows",)),
    in_specs=(norms_spec, norms_spec, states_spec),
    out_specs=ROWS,
    **options,
  )
  return jax.jit(mapped)(norms, padding, states), step(norms, padding, states)


@pytest.mark.parametrize(
  "specs, options",
  [
    ((ROWS, WHOLE), {}),
    ((ROWS, WHOLE), {"check_vma": False}),
    ((WHOLE, ROWS), {}),
  ],
)
def test_norms_of_one_device_of_several_are_refused(specs, options):
  """Equal noise on two parts: the difference was the exact count."""
  with pytest.raises(ValueError, match=r"mesh axes \['rows'\]"):
    clip_norms_of_two_devices(*specs, **options)


def test_norms_that_devices_share_are_updated_as_on_one():
  found, wanted = clip_norms_of_two_devices(WHOLE, WHOLE)
  np.testing.assert_allclose(found, [wanted[0], wanted[0]], rtol=1e-6)
