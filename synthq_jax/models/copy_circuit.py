"""An initialisation from which a small T5 can copy its input at once.

Copying through cross-attention needs two things that a small model takes long
to find: the encoder tells every position which token stood before it, and the
decoder looks where that token is the one it wrote last, and hands over what
stands there (the induction heads of Olsson et al. 2022, across two stacks).
Both can be written down. Half of the heads of the encoder's first layer get a
bias towards the previous position and carry its embedding through a rotation;
half of the heads of the decoder's first cross-attention compare the decoder's
embedding with what they carry; its values pass through unchanged. Training
starts there instead of at random kernels and is free to move away.
"""

import jax
import jax.numpy as jnp

from synthq_jax.models import t5_config

__all__ = ["add"]

_PREVIOUS_BUCKET = 1  # relative position -1 when both directions have buckets
_PREVIOUS_BIAS = 6.0
_SHARPNESS = 1.5


def add(params, config: t5_config.T5Config, key: jax.Array):
  """Returns parameters whose attention kernels hold the copy circuit.

  Args:
    params: fresh parameters of `t5.Transformer(config)`.
    config: with num_heads * head_dim == emb_dim and tied logits, without which
      what is handed over would not be read as a token.
    key: draws the rotations.

  Returns:
    The same tree with new values in the first layers' attention.

  Raises:
    ValueError: if the shape has no room for the circuit.
  """
  dim, width = config.emb_dim, config.num_heads * config.head_dim
  if width != dim or not config.logits_via_embedding or config.num_heads < 2:
    raise ValueError(
      "the copy circuit needs num_heads * head_dim == emb_dim, two heads and"
      f" logits_via_embedding, got {width}, emb_dim={dim},"
      f" num_heads={config.num_heads},"
      f" logits_via_embedding={config.logits_via_embedding}"
    )
  match, carry, hand_over = (
    jnp.linalg.qr(jax.random.normal(k, (dim, dim)))[0]
    for k in jax.random.split(key, 3)
  )
  heads = config.num_heads // 2
  ours = jnp.arange(dim) < heads * config.head_dim  # columns of our heads
  params = jax.tree.map(lambda leaf: leaf, params)  # a copy of the dicts
  bias = params["encoder"]["relpos_bias"]
  bias["rel_embedding"] = (
    bias["rel_embedding"].at[:heads, _PREVIOUS_BUCKET].add(_PREVIOUS_BIAS)
  )
  first = params["encoder"]["layers_0"]["attention"]
  _put(first, "value", ours[None, :], match)
  _put(first, "out", ours[:, None], carry.T)
  cross = params["decoder"]["layers_0"]["encoder_decoder_attention"]
  _put(cross, "query", ours[None, :], _SHARPNESS * match)
  _put(cross, "key", ours[None, :], carry)
  everywhere = jnp.ones((1, 1), bool)
  _put(cross, "value", everywhere, hand_over)
  _put(cross, "out", everywhere, hand_over.T)
  return params


def _put(attention, name: str, where: jax.Array, value: jax.Array) -> None:
  """Writes `value` into a kernel where the mask says so."""
  old = attention[name]["kernel"]
  where = jnp.broadcast_to(where, old.shape)
  attention[name]["kernel"] = jnp.where(where, value, old)
