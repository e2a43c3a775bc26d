"""Networks of many kinds, to measure clipping with: each with loss and batch.

Ordinary networks in Flax, written as their layers suggest, with no thought for
how their gradients are clipped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measuring
import numpy as np
import optax
from flax import linen as nn

from synthq_jax.models import t5, t5_config

__all__ = ["NETWORKS", "Problem", "make"]


class Problem(NamedTuple):
  """What a gradient is taken of."""

  loss_fn: Callable[[Any, Any], jax.Array]
  """`(params, batch)` to losses [batch]."""
  params: Any
  batch: dict[str, jax.Array]


class MLP(nn.Module):
  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, x):
    for width in self.widths[:-1]:
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(self.widths[-1])(x)


class CNN(nn.Module):
  @nn.compact
  def __call__(self, x):
    for width in (32, 64, 128):
      x = nn.relu(nn.Conv(width, (3, 3))(x))
      x = nn.max_pool(x, (2, 2), (2, 2))
    x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
    return nn.Dense(10)(x)


class ResNet(nn.Module):
  """Three stages of residual blocks with group normalisation."""

  blocks: int = 2
  width: int = 32

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(self.width, (3, 3))(x)
    for stage in range(3):
      for block in range(self.blocks):
        stride = 2 if stage and not block else 1
        x = self._block(x, self.width * 2**stage, stride)
    x = nn.relu(nn.GroupNorm(8)(x)).mean((1, 2))
    return nn.Dense(10)(x)

  def _block(self, x, width, stride):
    y = nn.relu(nn.GroupNorm(8)(x))
    short = x
    if x.shape[-1] != width:
      short = nn.Conv(width, (1, 1), (stride, stride))(y)
    y = nn.Conv(width, (3, 3), (stride, stride))(y)
    y = nn.relu(nn.GroupNorm(8)(y))
    return short + nn.Conv(width, (3, 3))(y)


class LSTM(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(8192, 128)(tokens)
    x = nn.RNN(nn.OptimizedLSTMCell(256))(x)
    return nn.Dense(10)(x[:, -1])


class Block(nn.Module):
  """A layer of a transformer, perhaps with experts."""

  heads: int
  is_causal: bool
  experts: int = 0

  @nn.compact
  def __call__(self, x):
    mask = nn.make_causal_mask(x[..., 0]) if self.is_causal else None
    y = nn.LayerNorm()(x)
    x += nn.MultiHeadDotProductAttention(self.heads)(y, mask=mask)
    y = nn.LayerNorm()(x)
    if self.experts:
      return x + Experts(self.experts)(y)
    width = x.shape[-1]
    return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(y)))


class Experts(nn.Module):
  """Two of several experts for each token, at a capacity (GShard)."""

  count: int
  chosen: int = 2

  @nn.compact
  def __call__(self, x):
    length, width = x.shape[1:]
    room = 2 * self.chosen * length // self.count
    gates = nn.softmax(nn.Dense(self.count, use_bias=False)(x))
    weight, which = jax.lax.top_k(gates, self.chosen)
    sent = jax.nn.one_hot(which, self.count).reshape(len(x), -1, self.count)
    place = jnp.cumsum(sent, axis=1) * sent - 1
    sent = (jax.nn.one_hot(place, room) * sent[..., None]).reshape(
      len(x), length, self.chosen, self.count, room
    )
    inputs = jnp.einsum("btker,btd->ebrd", sent, x)
    shape = (self.count, width, 2 * width)
    into = self.param("into", nn.initializers.lecun_normal(), shape)
    shape = (self.count, 2 * width, width)
    out = self.param("out", nn.initializers.lecun_normal(), shape)
    hidden = nn.gelu(jnp.einsum("ebrd,edh->ebrh", inputs, into))
    found = jnp.einsum("ebrh,ehd->ebrd", hidden, out)
    return jnp.einsum("btker,btk,ebrd->btd", sent, weight, found)


class ViT(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Conv(192, (4, 4), (4, 4))(x)
    x = x.reshape(len(x), -1, 192)
    shape = (1, x.shape[1], 192)
    x += self.param("places", nn.initializers.normal(0.02), shape)
    for _ in range(6):
      x = Block(heads=3, is_causal=False)(x)
    return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


class GPT(nn.Module):
  layers: int = 4
  width: int = 256
  vocab: int = 8192
  is_tied: bool = True
  experts: int = 0

  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(self.vocab, self.width)
    x = embed(tokens) + nn.Embed(512, self.width)(jnp.arange(tokens.shape[1]))
    for _ in range(self.layers):
      x = Block(heads=4, is_causal=True, experts=self.experts)(x)
    x = nn.LayerNorm()(x)
    if self.is_tied:
      return embed.attend(x)
    return nn.Dense(self.vocab, use_bias=False)(x)


class DLRM(nn.Module):
  """Tables of categories, their products, and two stacks of layers."""

  tables: int = 8
  rows: int = 10_000
  width: int = 32

  @nn.compact
  def __call__(self, numbers, categories):
    dense = MLP((512, 256, self.width))(numbers)
    found = [
      nn.Embed(self.rows, self.width)(categories[:, table])
      for table in range(self.tables)
    ]
    x = jnp.stack([dense, *found], axis=1)
    products = jnp.einsum("btd,bsd->bts", x, x)
    products = products[:, *np.triu_indices(self.tables + 1, 1)]
    x = jnp.concatenate([dense, products], axis=1)
    return MLP((512, 256, 1))(x)[:, 0]


def _integers(shape: tuple[int, ...], high: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(0).integers(2, high, shape))


def _normal(*shape: int) -> jax.Array:
  draw = np.random.default_rng(0).normal(size=shape)
  return jnp.asarray(draw, jnp.float32)


def _classifier(module: nn.Module, x: jax.Array) -> Problem:
  batch = {"x": x, "label": _integers((len(x),), 10)}

  def loss_fn(params, batch):
    logits = module.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["label"]
    )

  return Problem(loss_fn, module.init(jax.random.key(0), x[:1]), batch)


def _language_model(module: GPT, batch: int, length: int) -> Problem:
  tokens = _integers((batch, length + 1), module.vocab)

  def loss_fn(params, batch):
    logits = module.apply(params, batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["tokens"][:, 1:]
    )
    return losses.mean(-1)

  params = module.init(jax.random.key(0), tokens[:1, :-1])
  return Problem(loss_fn, params, {"tokens": tokens})


def _t5(
  batch: int, inputs: int = 128, *, width: int = 256, layers: int = 4
) -> Problem:
  targets = 32
  config = t5_config.T5Config(
    vocab_size=32_128,
    emb_dim=width,
    num_heads=width // 64,
    head_dim=64,
    mlp_dim=4 * width,
    num_encoder_layers=layers,
    num_decoder_layers=layers,
    mlp_activations=("gelu", "linear"),
    logits_via_embedding=False,
  )
  rows = {
    "inputs": _integers((batch, inputs), 32_128),
    "targets": _integers((batch, targets), 32_128),
  }
  params = t5.init_params(config, jax.random.key(0))
  return Problem(measuring.t5_loss(config), params, rows)


def _dlrm(batch: int) -> Problem:
  module = DLRM()
  rows = {
    "numbers": _normal(batch, 13),
    "categories": _integers((batch, module.tables), module.rows),
    "label": _integers((batch,), 4) % 2,
  }

  def loss_fn(params, batch):
    logits = module.apply(params, batch["numbers"], batch["categories"])
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"])

  params = module.init(
    jax.random.key(0), rows["numbers"][:1], rows["categories"][:1]
  )
  return Problem(loss_fn, params, rows)


def _lora(batch: int, length: int, rank: int = 8) -> Problem:
  """Low-rank changes of all matrices of the layers, the rest frozen."""
  whole = _language_model(GPT(), batch, length)
  frozen, structure = jax.tree.flatten(whole.params)
  paths = jax.tree_util.tree_flatten_with_path(whole.params)[0]
  adapted = {
    jax.tree_util.keystr(path): number
    for number, (path, leaf) in enumerate(paths)
    if leaf.ndim > 1 and "Block" in jax.tree_util.keystr(path)
  }
  params = {
    name: {"a": _normal(len(frozen[n]), rank) / 16, "b": _wide(frozen[n], rank)}
    for name, n in adapted.items()
  }

  def loss_fn(params, batch):
    leaves = list(frozen)
    for name, number in adapted.items():
      change = params[name]["a"] @ params[name]["b"]
      leaves[number] += change.reshape(leaves[number].shape)
    return whole.loss_fn(jax.tree.unflatten(structure, leaves), batch)

  return Problem(loss_fn, params, whole.batch)


def _wide(leaf: jax.Array, rank: int) -> jax.Array:
  return jnp.zeros((rank, leaf.size // len(leaf)))


NETWORKS: dict[str, tuple[Callable[[int], Problem], int]] = {
  "mlp": (lambda n: _classifier(MLP((1024, 1024, 10)), _normal(n, 784)), 256),
  "cnn": (lambda n: _classifier(CNN(), _normal(n, 32, 32, 3)), 128),
  "resnet": (lambda n: _classifier(ResNet(), _normal(n, 32, 32, 3)), 32),
  "lstm": (lambda n: _classifier(LSTM(), _integers((n, 64), 8192)), 64),
  "vit": (lambda n: _classifier(ViT(), _normal(n, 32, 32, 3)), 32),
  "gpt_tied": (lambda n: _language_model(GPT(), n, 128), 32),
  "gpt_untied": (lambda n: _language_model(GPT(is_tied=False), n, 256), 8),
  "t5": (_t5, 16),
  "moe": (lambda n: _language_model(GPT(experts=8), n, 128), 16),
  "dlrm": (_dlrm, 256),
  "lora": (lambda n: _lora(n, 128), 16),
}
"""By name: the problem of a batch size, and the usual size."""
SHAPES: dict[str, tuple[Callable[[int], Problem], int]] = {
  "t5_long": (lambda n: _t5(n, 384), 16),
  "t5_small": (lambda n: _t5(n, width=128, layers=2), 16),
  "t5_wide": (lambda n: _t5(n, width=512, layers=8), 16),
}
"""Other sizes of one of them."""


def make(name: str, size: int | None = None) -> Problem:
  """Returns a problem.

  Args:
    name: among `NETWORKS` and `SHAPES`.
    size: of the batch; None: the usual one.
  """
  build, usual = (NETWORKS | SHAPES)[name]
  return build(size or usual)
