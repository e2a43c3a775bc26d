"""Defines the layers of T5: RMS norm, attention, relative positions, feed-forward.

Parameter names, shapes and initialisers are those of T5X's T5, so that
checkpoints convert both ways. T5's attention has no factor 1/sqrt(d): the
initialiser of the query kernels includes it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from synthq_jax import extras
from synthq_jax.models import t5_config

with extras.required("run"):
  from flax import linen as nn

__all__ = [
  "Attention",
  "CachedKeysValues",
  "KeysValues",
  "Mlp",
  "RelativePositionBias",
  "RMSNorm",
  "causal_mask",
  "relative_position_bucket",
  "run_stack",
]

_MASKED = -1e10
_FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
_FAN_AVG = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
_ACTIVATIONS = {"relu": nn.relu, "gelu": nn.gelu, "linear": lambda x: x}


class KeysValues(NamedTuple):
  """Keys and values of an attention layer, as projected."""

  keys: Array  # [batch, key, heads, head_dim]
  values: Array  # [batch, key, heads, head_dim]
  axes = "bkhd"

  def to_cache(self) -> "CachedKeysValues":
    """Transposes keys and values to the layout of decoding steps."""
    return CachedKeysValues(*(jnp.moveaxis(x, 1, -1) for x in self))


class CachedKeysValues(NamedTuple):
  """Keys and values in the axis order of a product with one query.

  In any other order, each step would first copy all of them, which on a CPU takes
  ten times as long as the product.
  """

  keys: Array  # [batch, heads, head_dim, key]
  values: Array  # [batch, heads, head_dim, key]
  axes = "bhdk"

  def insert(self, new: KeysValues, position: Array) -> "CachedKeysValues":
    """Returns a copy with the keys and values of one position replaced."""
    pairs = zip(self, new.to_cache(), strict=True)
    return CachedKeysValues(
      *(
        jax.lax.dynamic_update_slice_in_dim(
          old, update.astype(old.dtype), position, axis=-1
        )
        for old, update in pairs
      )
    )


class RMSNorm(nn.Module):
  """Normalizes as T5 does: no mean, no bias, statistics in float32."""

  dtype: str = "float32"

  @nn.compact
  def __call__(self, x: Float[Array, "*batch dim"]) -> Array:
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    scale = jnp.broadcast_to(scale, x.shape)
    return (x * scale).astype(self.dtype)


class Dense(nn.Module):
  """Applies a linear map without bias, and its low-rank addition if one is
  given."""

  features: int
  dtype: str = "float32"
  initializer: nn.initializers.Initializer = _FAN_IN

  @nn.compact
  def __call__(self, x: Float[Array, "*batch dim"]) -> Array:
    shape = (x.shape[-1], self.features)
    kernel = self.param("kernel", self.initializer, shape)
    x = x.astype(self.dtype)
    # With two batch axes, the kernel's gradient would sum over both, for which XLA
    # copies its factors on CPUs; that takes a fifth of a step's time.
    y = x.reshape(-1, x.shape[-1]) @ kernel.astype(self.dtype)
    y = y.reshape(*x.shape[:-1], self.features)
    if not self.has_variable("lora", "a"):
      return y
    # Not merged into one kernel: clipping needs the products of the factors.
    a = self.get_variable("lora", "a").astype(self.dtype)
    b = self.get_variable("lora", "b").astype(self.dtype)
    scale = self.get_variable("lora", "scale").astype(self.dtype)
    return y + ((x @ a) * jnp.broadcast_to(scale, (*x.shape[:-1], 1))) @ b


def relative_position_bucket(
  offset: Int[Array, "..."],
  *,
  bidirectional: bool,
  num_buckets: int,
  max_distance: int,
) -> Int[Array, "..."]:
  """Maps key position minus query position to a bucket (Raffel et al., 2.1).

  Half of the buckets hold one small distance each. The other half grow with the
  logarithm of the distance up to `max_distance`; farther keys share the last.

  Args:
    offset: key position minus query position, any shape.
    bidirectional: whether keys after the query have buckets of their own.
    num_buckets: number of buckets.
    max_distance: distance from which on keys share the last bucket.

  Returns:
    Buckets in [0, num_buckets), of the shape of `offset`.
  """
  if bidirectional:
    num_buckets //= 2
    base = (offset > 0) * num_buckets
    distance = jnp.abs(offset)
  else:
    base = 0
    distance = jnp.maximum(-offset, 0)
  exact = num_buckets // 2
  # Computed on the host: some distances lie on an edge, and an accelerator's
  # logarithm that rounds down would yield the bucket before.
  distances = np.arange(max_distance + 1)
  ratio = np.maximum(distances, 1) / exact + np.finfo(np.float32).eps
  growth = np.log(ratio) / np.log(max_distance / exact)
  large = exact + (growth * (num_buckets - exact)).astype(int)
  table = np.minimum(
    np.where(distances < exact, distances, large), num_buckets - 1
  )
  table = jnp.asarray(table, jnp.int32)
  return base + jnp.take(table, jnp.minimum(distance, max_distance))


class RelativePositionBias(nn.Module):
  """Looks up a learned bias for each head and bucket of relative position."""

  config: t5_config.T5Config
  bidirectional: bool

  @nn.compact
  def __call__(
    self,
    query_positions: Int[Array, " query"],
    key_positions: Int[Array, " key"],
  ) -> Float[Array, "1 heads query key"]:
    buckets = self.config.relative_attention_num_buckets
    table = self.param(
      "rel_embedding", _FAN_AVG, (self.config.num_heads, buckets)
    )
    bucket = relative_position_bucket(
      key_positions[None, :] - query_positions[:, None],
      bidirectional=self.bidirectional,
      num_buckets=buckets,
      max_distance=self.config.relative_attention_max_distance,
    )
    # The product is as exact as a lookup. The gradient of a lookup is a scatter,
    # which for single examples takes eight times the memory on a TPU.
    of_bucket = jax.nn.one_hot(bucket, buckets, dtype=table.dtype)
    bias = jnp.einsum("hb,qkb->hqk", table, of_bucket, precision="highest")
    return bias[None].astype(self.config.dtype)


def causal_mask(
  query_positions: Int[Array, " query"], key_positions: Int[Array, " key"]
) -> Bool[Array, "1 1 query key"]:
  """Returns the mask of the keys that a query may attend to: none after it."""
  allowed = key_positions[None, :] <= query_positions[:, None]
  return allowed[None, None]


class Attention(nn.Module):
  """Computes multi-head attention with T5's 2-D kernels."""

  config: t5_config.T5Config

  def setup(self):
    width = self.config.num_heads * self.config.head_dim

    def scaled(key, shape, dtype=jnp.float32):
      return _FAN_IN(key, shape, dtype) / jnp.sqrt(self.config.head_dim)

    dtype = self.config.dtype
    self.query = Dense(width, dtype, scaled)
    self.key = Dense(width, dtype)
    self.value = Dense(width, dtype)
    self.out = Dense(self.config.emb_dim, dtype)
    self.dropout = nn.Dropout(self.config.dropout_rate, broadcast_dims=(-2,))

  def keys_values(self, x: Float[Array, "batch key dim"]) -> KeysValues:
    """Projects the attended sequence to keys and values, which decoding
    caches."""
    return KeysValues(self._split(self.key(x)), self._split(self.value(x)))

  def __call__(
    self,
    x: Float[Array, "batch query dim"],
    attended: KeysValues | CachedKeysValues,
    mask: Bool[Array, "#batch 1 #query key"],
    bias: Float[Array, "1 heads query key"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch query dim"]:
    query = self._split(self.query(x))
    # [batch, heads, query, key]
    axes = attended.axes
    scores = jnp.einsum(f"bqhd,{axes}->bhqk", query, attended.keys)
    if bias is not None:
      scores = scores + jnp.broadcast_to(bias, scores.shape)
    mask = jnp.broadcast_to(mask, scores.shape)
    scores = jnp.where(mask, scores.astype(jnp.float32), _MASKED)
    weights = nn.softmax(scores).astype(self.config.dtype)
    weights = self.dropout(weights, deterministic=deterministic)
    # [batch, query, heads * head_dim]
    mixed = jnp.einsum(f"bhqk,{axes}->bqhd", weights, attended.values)
    return self.out(mixed.reshape(*mixed.shape[:2], -1))

  def _split(self, x: Float[Array, "batch length width"]) -> Array:
    return x.reshape(*x.shape[:2], self.config.num_heads, self.config.head_dim)


class Mlp(nn.Module):
  """Computes the feed-forward layer, gated if it has two activations."""

  config: t5_config.T5Config

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length dim"], *, deterministic: bool
  ) -> Float[Array, "batch length dim"]:
    config = self.config
    activations = config.mlp_activations
    hidden = None
    for position, name in enumerate(activations):
      kernel_name = "wi" if len(activations) == 1 else f"wi_{position}"
      part = Dense(config.mlp_dim, config.dtype, name=kernel_name)(x)
      part = _ACTIVATIONS[name](part)
      hidden = part if hidden is None else hidden * part
    hidden = nn.Dropout(config.dropout_rate, broadcast_dims=(-2,))(
      hidden, deterministic=deterministic
    )
    return Dense(config.emb_dim, config.dtype, name="wo")(hidden)


def run_stack(
  apply: Callable[[Any, jax.Array], jax.Array],
  layers: Sequence[nn.Module] | nn.Module,
  x: jax.Array,
  config: t5_config.T5Config,
  *,
  length: int,
) -> jax.Array:
  """Runs layers one after the other, or as one loop, and returns the output.

  Args:
    apply: computes the output of a layer from the layer and its input.
    layers: all layers, or with `config.scan_layers` the one whose parameters are
      stacked.
    x: the input of the first layer.
    config: the shape, with `scan_layers` and `remat`.
    length: number of layers.
  """
  if config.remat:
    apply = nn.remat(apply, prevent_cse=not config.scan_layers)
  if not config.scan_layers:
    for layer in layers:
      x = apply(layer, x)
    return x
  loop = nn.scan(
    lambda layer, x: (apply(layer, x), None),
    variable_axes={"params": 0, "lora": 0},
    split_rngs={"params": True, "dropout": True},
    length=length,
  )
  return loop(layers, x)[0]
