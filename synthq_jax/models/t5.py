"""Defines T5 in Flax Linen, with the parameter tree of T5X's own network.

One module serves training (`__call__`), the dual encoder (`encode`) and
generation (`read`, `empty_cache`, `decode_step`), whose cache is an explicit
value.

An optional collection, "lora" (`models/lora.py`), adds to "params".
"""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from synthq_jax import extras
from synthq_jax.models import t5_config, t5_layers
from synthq_jax.models.checkpoints import tensors

with extras.required("run"):
  from flax import linen as nn

__all__ = [
  "Begun",
  "DecodeCache",
  "Encoded",
  "Inputs",
  "Transformer",
  "empty_cache",
  "init_params",
  "output_path",
  "output_table",
  "shapes",
  "shift_right",
]


class Inputs(NamedTuple):
  """The encoder's inputs, projected for decoding."""

  crossed: tuple[t5_layers.CachedKeysValues, ...]  # per layer
  mask: Array  # [document, 1, 1, input], True for a token, False for padding


class Encoded(NamedTuple):
  """The encoder's inputs and outputs."""

  tokens: Array  # [document, input]
  outputs: Array  # [document, input, dim]


class Begun(NamedTuple):
  """The outputs of a decoder's first layers, without dropout."""

  states: Array  # [batch, length, dim]
  layers: int


class DecodeCache(NamedTuple):
  """The keys and values of earlier decoding steps, and the inputs."""

  own: tuple[t5_layers.CachedKeysValues, ...]  # per layer, max_length positions
  inputs: Inputs  # of documents; the samples of a document are adjacent rows


def empty_cache(
  config: t5_config.T5Config,
  inputs: Inputs,
  max_length: int,
  num_samples: int = 1,
) -> DecodeCache:
  """Returns a cache with room for `max_length` tokens of every sample."""
  batch = inputs.mask.shape[0] * num_samples
  shape = (batch, config.num_heads, config.head_dim, max_length)
  empty = t5_layers.CachedKeysValues(
    jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
  )
  return DecodeCache((empty,) * config.num_decoder_layers, inputs)


def shift_right(targets: Int[Array, "batch length"]) -> Array:
  """Shifts targets to decoder inputs: token 0 starts every sequence.

  >>> shift_right(jnp.array([[5, 6, 1]])).tolist()
  [[0, 5, 6]]
  """
  return jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]


def output_path(config: t5_config.T5Config) -> str:
  """Returns the path of the parameter that computes logits."""
  if config.logits_via_embedding:
    return "token_embedder/embedding"
  return "decoder/logits_dense/kernel"


def output_table(
  params: Mapping[str, Array], config: t5_config.T5Config
) -> Float[Array, "vocab dim"]:
  """Returns a row for each token; a token's logit is its row times an output.

  Args:
    params: parameters of the model, by path.
    config: the shape of the model.
  """
  table = params[output_path(config)]
  return table if config.logits_via_embedding else table.T


class EncoderLayer(nn.Module):
  """Computes self-attention and feed-forward, each with a norm and a
  residual."""

  config: t5_config.T5Config

  @nn.compact
  def __call__(self, x, mask, bias, *, deterministic):
    config = self.config
    drop = nn.Dropout(
      config.dropout_rate, broadcast_dims=(-2,), deterministic=deterministic
    )
    # [batch, length, dim]
    h = t5_layers.RMSNorm(config.dtype, name="pre_attention_layer_norm")(x)
    attention = t5_layers.Attention(config, name="attention")
    own = attention.keys_values(h)
    x = x + drop(attention(h, own, mask, bias, deterministic=deterministic))
    h = t5_layers.RMSNorm(config.dtype, name="pre_mlp_layer_norm")(x)
    mlp = t5_layers.Mlp(config, name="mlp")
    return x + drop(mlp(h, deterministic=deterministic))


class DecoderLayer(nn.Module):
  """Computes causal self-attention, attention to the input and feed-forward."""

  config: t5_config.T5Config

  def setup(self):
    config = self.config
    self.pre_self_attention_layer_norm = t5_layers.RMSNorm(config.dtype)
    self.self_attention = t5_layers.Attention(config)
    self.pre_cross_attention_layer_norm = t5_layers.RMSNorm(config.dtype)
    self.encoder_decoder_attention = t5_layers.Attention(config)
    self.pre_mlp_layer_norm = t5_layers.RMSNorm(config.dtype)
    self.mlp = t5_layers.Mlp(config)
    self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(-2,))

  def __call__(
    self,
    x,
    crossed,
    mask,
    input_mask,
    bias,
    *,
    cache=None,
    position=None,
    deterministic=True,
  ):
    """Runs the layer; with a cache, on one position that is added to the cache.

    Args:
      x: states [batch, query, dim]; query = 1 with a cache.
      crossed: keys and values of the input; with a cache, of each document.
      mask: True for targets to which a query may attend.
      input_mask: True for tokens of the input, False for padding.
      bias: relative position bias, [1, heads, query, key].
      cache: keys and values so far [batch, heads, head_dim, max_length].
      position: the position of `x` in the cache, a scalar.
      deterministic: whether dropout is off.

    Returns:
      The output [batch, query, dim] and the new keys and values.
    """

    options = {"deterministic": deterministic}

    def drop(y):
      return self.dropout(y, **options)

    h = self.pre_self_attention_layer_norm(x)
    own = self.self_attention.keys_values(h)
    if cache is not None:
      own = cache.insert(own, position)
    x = x + drop(self.self_attention(h, own, mask, bias, **options))
    h = self.pre_cross_attention_layer_norm(x)
    if cache is not None:  # the samples of a document become its query axis
      h = h.reshape(crossed.keys.shape[0], -1, h.shape[-1])
    h = self.encoder_decoder_attention(h, crossed, input_mask, **options)
    x = x + drop(h.reshape(x.shape))
    h = self.pre_mlp_layer_norm(x)
    return x + drop(self.mlp(h, **options)), own


class Encoder(nn.Module):
  """Runs the encoder layers and the final norm."""

  config: t5_config.T5Config

  @nn.compact
  def __call__(self, x, mask, *, deterministic):
    config = self.config
    positions = jnp.arange(x.shape[1])
    bias = t5_layers.RelativePositionBias(
      config, bidirectional=True, name="relpos_bias"
    )(positions, positions)
    drop = nn.Dropout(
      config.dropout_rate, broadcast_dims=(-2,), deterministic=deterministic
    )

    def apply(layer, x):
      return layer(x, mask, bias, deterministic=deterministic)

    length = config.num_encoder_layers
    if config.scan_layers:
      layers = EncoderLayer(config, name="layers")
    else:
      layers = [EncoderLayer(config, name=f"layers_{i}") for i in range(length)]
    x = t5_layers.run_stack(apply, layers, drop(x), config, length=length)
    return drop(t5_layers.RMSNorm(config.dtype, name="encoder_norm")(x))


class Decoder(nn.Module):
  """Runs the decoder layers, the final norm and the logits layer."""

  config: t5_config.T5Config

  def setup(self):
    config = self.config
    self.relpos_bias = t5_layers.RelativePositionBias(
      config, bidirectional=False
    )
    if config.scan_layers:
      self.layers = DecoderLayer(config)
    else:
      self.layers = [
        DecoderLayer(config) for _ in range(config.num_decoder_layers)
      ]
    self.decoder_norm = t5_layers.RMSNorm(config.dtype)
    self.dropout = nn.Dropout(config.dropout_rate, broadcast_dims=(-2,))
    if not config.logits_via_embedding:
      self.logits_dense = t5_layers.Dense(config.vocab_size)

  def cross(self, encoded) -> tuple[t5_layers.CachedKeysValues, ...]:
    """Projects the encoded input to keys and values for every layer."""
    return tuple(
      layer.encoder_decoder_attention.keys_values(encoded).to_cache()
      for layer in self.layers
    )

  def __call__(self, x, encoded, input_mask, *, first=0, deterministic=True):
    """Returns the final states [batch, length, dim] of whole targets.

    Args:
      x: the states before layer `first`; before layer 0 the embedded targets.
      encoded: the encoder's outputs.
      input_mask: True for tokens of the input, False for padding.
      first: the first layer to run; above 0 only without `scan_layers`.
      deterministic: whether dropout is off.
    """
    if not first:
      x = self.dropout(x, deterministic=deterministic)
    last = self.config.num_decoder_layers
    x = self.run(x, encoded, input_mask, first, last, deterministic)
    return self.dropout(self.decoder_norm(x), deterministic=deterministic)

  def run(self, x, encoded, input_mask, first, last, deterministic=True):
    """Returns the states after the layers from `first` to `last` (excluded)."""
    positions = jnp.arange(x.shape[1])
    bias = self.relpos_bias(positions, positions)
    mask = t5_layers.causal_mask(positions, positions)

    def apply(layer, x):
      crossed = layer.encoder_decoder_attention.keys_values(encoded)
      return layer(
        x, crossed, mask, input_mask, bias, deterministic=deterministic
      )[0]

    layers = self.layers
    if not self.config.scan_layers:
      layers = layers[first:last]
    return t5_layers.run_stack(
      apply, layers, x, self.config, length=last - first
    )

  def step(self, x, cache: DecodeCache, position, behind):
    """Returns the states of one position [batch, 1, dim] and the new cache."""
    size = cache.own[0].keys.shape[-1]
    # The cache is a ring: the age of an entry is the number of steps since then.
    ages = (position - jnp.arange(size)) % size
    bias = self.relpos_bias(jnp.zeros(1, int), -ages)
    mask = ages[None] <= jnp.broadcast_to(behind, len(x))[:, None]
    mask = mask[:, None, None]  # [batch, 1, 1, position]
    new_cache = []
    for index, layer in enumerate(self.layers):
      x, own = layer(
        x,
        cache.inputs.crossed[index],
        mask,
        cache.inputs.mask,
        bias,
        cache=cache.own[index],
        position=position,
      )
      new_cache.append(own)
    return self.decoder_norm(x), cache._replace(own=tuple(new_cache))

  def outputs(self, x):
    """Scales states for the product that gives logits: [batch, query, dim],
    float32."""
    x = x.astype(jnp.float32)
    if self.config.logits_via_embedding:
      return x / jnp.sqrt(x.shape[-1])
    return x

  def logits(self, x, embedding):
    """Returns logits [batch, query, vocab] in float32."""
    x = self.outputs(x)
    if self.config.logits_via_embedding:
      return x @ embedding.T
    return self.logits_dense(x)


class Embedder(nn.Module):
  """Looks up token embeddings in a table that encoder and decoder share."""

  config: t5_config.T5Config

  def setup(self):
    self.embedding = self.param(
      "embedding",
      nn.initializers.normal(1.0),
      (self.config.vocab_size, self.config.emb_dim),
    )

  def __call__(self, tokens: Int[Array, "batch length"]) -> Array:
    return jnp.take(self.embedding, tokens, axis=0).astype(self.config.dtype)


class Transformer(nn.Module):
  """Runs T5: an encoder and a decoder over one table of embeddings.

  Token 0 is padding in the input and the start of the decoder's input.
  """

  config: t5_config.T5Config

  def setup(self):
    self.token_embedder = Embedder(self.config)
    self.encoder = Encoder(self.config)
    self.decoder = Decoder(self.config)

  def __call__(
    self,
    encoder_input_tokens: Int[Array, "batch input"],
    decoder_input_tokens: Int[Array, "batch length"],
    *,
    enable_dropout: bool = False,
  ) -> Float[Array, "batch length vocab"]:
    """Returns the logits of each next token, teacher-forced."""
    encoded = self.encode(encoder_input_tokens, enable_dropout=enable_dropout)
    return self.decode(
      encoded,
      encoder_input_tokens,
      decoder_input_tokens,
      enable_dropout=enable_dropout,
    )

  def decode(
    self,
    encoded: Float[Array, "batch input dim"],
    encoder_input_tokens: Int[Array, "batch input"],
    decoder_input_tokens: Int[Array, "batch length"],
    begun: Begun | None = None,
    *,
    enable_dropout: bool = False,
  ) -> Float[Array, "batch length vocab"]:
    """Returns the logits of `__call__` from the outputs of `encode` and
    `begin`."""
    x = self._decoded(
      encoded, encoder_input_tokens, decoder_input_tokens, begun, enable_dropout
    )
    return self.decoder.logits(x, self.token_embedder.embedding)

  def begin(
    self,
    encoded: Float[Array, "batch input dim"],
    encoder_input_tokens: Int[Array, "batch input"],
    decoder_input_tokens: Int[Array, "batch length"],
    layers: int,
  ) -> Float[Array, "batch length dim"]:
    """Returns the states after the decoder's first layers, for `Begun`."""
    return self.decoder.run(
      self.token_embedder(decoder_input_tokens),
      encoded,
      self._input_mask(encoder_input_tokens),
      0,
      layers,
    )

  def outputs(
    self,
    encoder_input_tokens: Int[Array, "batch input"],
    decoder_input_tokens: Int[Array, "batch length"],
    encoded: Float[Array, "batch input dim"] | None = None,
    begun: Begun | None = None,
    *,
    enable_dropout: bool = False,
  ) -> Float[Array, "batch length dim"]:
    """Returns outputs whose product with `output_table`'s rows is the logits.

    Args:
      encoder_input_tokens: input tokens, 0 = padding at the end of a row.
      decoder_input_tokens: the targets' tokens, from `shift_right`.
      encoded: the output of `encode`; None: it is computed.
      begun: the output of `begin`; None: it is computed.
      enable_dropout: whether dropout is on; needs a key of the name "dropout".
    """
    if encoded is None:
      encoded = self.encode(encoder_input_tokens, enable_dropout=enable_dropout)
    x = self._decoded(
      encoded, encoder_input_tokens, decoder_input_tokens, begun, enable_dropout
    )
    return self.decoder.outputs(x)

  def _decoded(self, encoded, inputs, targets, begun, enable_dropout):
    """Returns the decoder's final states [batch, length, dim]."""
    states, first = begun or (self.token_embedder(targets), 0)
    return self.decoder(
      states,
      encoded,
      self._input_mask(inputs),
      first=first,
      deterministic=not enable_dropout,
    )

  def encode(
    self,
    encoder_input_tokens: Int[Array, "batch input"],
    *,
    enable_dropout: bool = False,
  ) -> Float[Array, "batch input dim"]:
    """Returns the encoder's output for each token of the input."""
    return self.encoder(
      self.token_embedder(encoder_input_tokens),
      self._input_mask(encoder_input_tokens),
      deterministic=not enable_dropout,
    )

  def _input_mask(self, tokens: Int[Array, "batch input"]) -> Array:
    """Returns the mask of the encoder's input: False for padding."""
    return (tokens > 0)[:, None, None, :]

  def read(
    self,
    encoder_input_tokens: Int[Array, "document input"],
    encoded: Float[Array, "document input dim"] | None = None,
  ) -> Inputs:
    """Encodes the input and projects it for every layer of the decoder.

    Args:
      encoder_input_tokens: input tokens, 0 = padding at the end of a row.
      encoded: the output of `encode`; None: it is computed.

    Raises:
      ValueError: if the layers are a loop over stacked parameters.
    """
    if self.config.scan_layers:
      raise ValueError(
        "expected scan_layers=False for decoding, got True: unstack the"
        " parameters with scanned.unstack"
      )
    if encoded is None:
      encoded = self.encode(encoder_input_tokens)
    return Inputs(
      self.decoder.cross(encoded), self._input_mask(encoder_input_tokens)
    )

  def decode_step(
    self,
    tokens: Int[Array, " batch"],
    cache: DecodeCache,
    position: Array,
    behind: Int[Array, " batch"] | None = None,
  ) -> tuple[Float[Array, "batch vocab"], DecodeCache]:
    """Returns the logits after `tokens`, and the new cache.

    Args:
      tokens: the last token of each sequence.
      cache: a cache with room for the longest sequence.
      position: the cache position of these tokens: 0, 1, and so on; after the last
        position 0 again, if sequences begin at different steps.
      behind: number of earlier tokens of each sequence; None: `position`.
    """
    position = jnp.asarray(position)
    x, cache = self.decoder.step(
      self.token_embedder(tokens[:, None]),
      cache,
      position,
      position if behind is None else behind,
    )
    logits = self.decoder.logits(x, self.token_embedder.embedding)
    return logits[:, 0], cache


def init_params(config: t5_config.T5Config, key: jax.Array):
  """Initializes parameters as a nested dict of float32 arrays.

  Their tree is T5X's, whatever `config.scan_layers` is; `scanned.stack` converts
  it for a loop over layers.
  """
  config = dataclasses.replace(config, scan_layers=False, remat=False)
  tokens = jnp.ones((1, 2), jnp.int32)
  return Transformer(config).init(key, tokens, tokens)["params"]


@functools.cache
def shapes(
  config: t5_config.T5Config, *, decoder: bool = True
) -> Mapping[str, tuple[int, ...]]:
  """Returns the shape of every parameter, by path, as a read-only mapping.

  Args:
    config: the shape of the model.
    decoder: whether to include the decoder.
  """
  shapes_by_path = {
    path: shape
    for path, shape in tensors.get_shapes(
      functools.partial(init_params, config)
    ).items()
    if decoder or not path.startswith("decoder/")
  }
  return types.MappingProxyType(shapes_by_path)
