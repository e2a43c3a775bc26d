"""Defines the image encoders of the Logit-DP paper: a small net and ResNet-18.

Convolutions are products of patches with a kernel, so that per-example clipping
keeps their gradients in factors. Only `norm="batch"` looks at other examples of
a batch, which no clipping bounds: use it for training without privacy alone.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from synthq_jax import extras
from synthq_jax.models import dual_encoder

with extras.required("run"):
  import flax.linen as nn

__all__ = [
  "NORMS",
  "Convolution",
  "EmbeddingNet",
  "ResNet18",
  "extract_patches",
]

NORMS = ("none", "group", "batch")
"""Normalisations of ResNet-18; "batch" couples the examples of a batch."""

_BY_INPUTS = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_BY_BOTH = nn.initializers.variance_scaling(1.0, "fan_avg", "normal")


def extract_patches(
  images: Float[Array, "batch height width channels"], size: int, stride: int
) -> Float[Array, "batch rows columns patch"]:
  """Extracts square patches from images, which are padded with zeros.

  Padding is TensorFlow's "SAME": ceil(height / stride) rows of patches.

  >>> import jax.numpy as jnp
  >>> extract_patches(jnp.ones((1, 5, 5, 3)), size=3, stride=2).shape
  (1, 3, 3, 27)

  Args:
    images: any floating-point images.
    size: height and width of a patch in pixels, at least 1.
    stride: distance between patches in pixels, at least 1.

  Returns:
    Patches, flattened in the order of a kernel [size, size, channels].
  """
  counts, margins = [], [(0, 0)]
  for length in images.shape[1:3]:
    count = -(-length // stride)
    missing = max((count - 1) * stride + size - length, 0)
    counts.append(count)
    margins.append((missing // 2, missing - missing // 2))
  padded = jnp.pad(images, [*margins, (0, 0)])
  rows, columns = ((count - 1) * stride + 1 for count in counts)
  return jnp.concatenate(
    [
      padded[:, i : i + rows : stride, j : j + columns : stride]
      for i in range(size)
      for j in range(size)
    ],
    axis=-1,
  )


class Convolution(nn.Module):
  """Computes a convolution as a product of patches and a kernel.

  Attributes:
    features: number of channels of the output.
    size: height and width of the kernel in pixels.
    stride: distance between patches in pixels.
    use_bias: whether to add a bias.
  """

  features: int
  size: int = 3
  stride: int = 1
  use_bias: bool = False

  @nn.compact
  def __call__(
    self, images: Float[Array, "batch height width channels"]
  ) -> Float[Array, "batch rows columns features"]:
    return nn.Dense(
      self.features, use_bias=self.use_bias, kernel_init=_BY_INPUTS
    )(extract_patches(images, self.size, self.stride))


class EmbeddingNet(nn.Module):
  """Embeds images by three convolutions of stride 2, their mean and a linear
  map.

  For images of three channels and the default sizes it has 6,296 parameters.

  >>> import jax, jax.numpy as jnp
  >>> images = jnp.ones((2, 8, 8, 1))
  >>> net = EmbeddingNet()
  >>> params = jax.jit(net.init)(jax.random.key(0), images)
  >>> jax.jit(net.apply)(params, images).shape
  (2, 8)

  Attributes:
    dim: length of the embeddings.
    channels: number of channels of each convolution.

  References:
    Kong, Munoz Medina and Ribero (2023), arXiv:2310.03104, appendix B.1
    (sizes, and the mean over places, as in their published code).
  """

  dim: int = 8
  channels: Sequence[int] = (8, 16, 32)

  @nn.compact
  def __call__(
    self, images: Float[Array, "batch height width channels"]
  ) -> Float[Array, "batch dim"]:
    x = images
    for features in self.channels:
      x = nn.relu(Convolution(features, stride=2, use_bias=True)(x))
    x = jnp.mean(x, axis=(1, 2))
    return dual_encoder.normalize(nn.Dense(self.dim, kernel_init=_BY_BOTH)(x))


class _Activation(nn.Module):
  """Normalises over groups of channels or over the batch, then applies ReLU."""

  norm: str

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch height width channels"]
  ) -> Float[Array, "batch height width channels"]:
    if self.norm == "none":
      return nn.relu(x)
    channels = x.shape[-1]
    groups, axes = channels, (0, 1, 2, 4)
    if self.norm == "group":  # groups of about 16 channels
      groups, axes = math.gcd(channels, max(1, channels // 16)), (1, 2, 4)
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    mean, variance = (
      f(grouped, axis=axes, keepdims=True) for f in (jnp.mean, jnp.var)
    )
    x = ((grouped - mean) / jnp.sqrt(variance + 1e-6)).reshape(x.shape)
    scale = self.param("scale", nn.initializers.ones, (channels,))
    bias = self.param("bias", nn.initializers.zeros, (channels,))
    return nn.relu(x * scale[None, None, None] + bias[None, None, None])


class _Block(nn.Module):
  """Applies a residual block whose activations come before its convolutions."""

  features: int
  stride: int
  projects: bool
  norm: str

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch height width channels"]
  ) -> Float[Array, "batch rows columns features"]:
    shortcut, x = x, _Activation(self.norm)(x)
    if self.projects:
      shortcut = Convolution(self.features, size=1, stride=self.stride)(x)
    x = Convolution(self.features, stride=self.stride)(x)
    return Convolution(self.features)(_Activation(self.norm)(x)) + shortcut


class ResNet18(nn.Module):
  """Embeds images by a ResNet-18, by default without normalisation.

  With `norm="batch"` a batch is normalised by its own mean and variance in
  evaluation too, as in the Logit-DP paper's published code.

  Attributes:
    dim: length of the embeddings.
    width: number of channels of the first group; each other group doubles it.
    norm: one of `NORMS`.

  References:
    He et al. (2016), arXiv:1603.05027 (activations first); Wu and He (2018),
    arXiv:1803.08494 (group normalisation).
  """

  dim: int = 8
  width: int = 64
  norm: str = "none"

  @nn.compact
  def __call__(
    self, images: Float[Array, "batch height width channels"]
  ) -> Float[Array, "batch dim"]:
    x = Convolution(self.width, size=7, stride=2)(images)
    x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    for group in range(4):
      for block in range(2):
        first = group > 0 and block == 0
        stride = 2 if first else 1
        x = _Block(self.width * 2**group, stride, first, self.norm)(x)
    x = jnp.mean(_Activation(self.norm)(x), axis=(1, 2))
    return dual_encoder.normalize(nn.Dense(self.dim)(x))
