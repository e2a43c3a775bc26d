"""The image encoders: patches against convolutions, sizes, lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthq_jax.models import image_encoders

SHAPES = ((8, 8), (5, 7), (1, 2))


# Every two of size, stride and shape meet once.
@pytest.mark.parametrize(
  "size, stride, shape",
  [
    (size, stride, SHAPES[(i + j) % 3])
    for i, size in enumerate((1, 3, 7))
    for j, stride in enumerate((1, 2, 3))
  ],
)
def test_patches_times_a_kernel_are_a_convolution(size, stride, shape):
  rng = np.random.default_rng(0)
  images = jnp.asarray(rng.normal(size=(2, *shape, 3)), jnp.float32)
  kernel = jnp.asarray(rng.normal(size=(size, size, 3, 4)), jnp.float32)
  want = jax.lax.conv_general_dilated(
    images, kernel, (stride, stride), "SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )  # fmt: skip
  got = image_encoders.extract_patches(images, size, stride) @ kernel.reshape(
    -1, 4
  )
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def fresh(net, images):
  """Fresh parameters, and the images' vectors."""
  return jax.jit(lambda key, x: net.init_with_output(key, x)[::-1])(
    jax.random.key(1), images
  )


def test_the_embedding_net_has_the_papers_size_and_unit_vectors():
  images = jax.random.normal(jax.random.key(0), (4, 32, 32, 3))
  net = image_encoders.EmbeddingNet()
  params, vectors = fresh(net, images)
  assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 6296
  np.testing.assert_allclose(jnp.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
  # A row's vector depends on that row alone.
  np.testing.assert_allclose(
    jax.jit(net.apply)(params, images[2:3]), vectors[2:3], rtol=1e-4, atol=1e-6
  )


def test_resnet_18_has_its_layers_and_no_normalisation():
  images = jax.random.normal(jax.random.key(0), (2, 16, 16, 1))
  net = image_encoders.ResNet18(dim=8, width=4)
  params, vectors = fresh(net, images)
  kernels = [x for x in jax.tree.leaves(params) if x.ndim == 2]
  # 17 convolutions, 3 projections and the last linear map with its bias.
  assert len(kernels) == 21 and len(jax.tree.leaves(params)) == 22
  np.testing.assert_allclose(jnp.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)


def test_groups_of_channels_stand_in_for_batch_normalisation():
  images = jax.random.normal(jax.random.key(0), (3, 16, 16, 1))
  net = image_encoders.ResNet18(dim=8, width=4, norm="group")
  params, vectors = fresh(net, images)
  # A scale and a bias before each of the 17 activations.
  assert len(jax.tree.leaves(params)) == 22 + 2 * 17
  np.testing.assert_allclose(jnp.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
  np.testing.assert_allclose(
    jax.jit(net.apply)(params, images[1:2]), vectors[1:2], rtol=1e-4, atol=1e-5
  )
  _, plain = fresh(image_encoders.ResNet18(dim=8, width=4), images)
  assert jnp.abs(plain - vectors).max() > 1e-3


def test_batch_normalisation_is_that_of_the_batch_at_hand():
  images = 3 + 2 * jax.random.normal(jax.random.key(0), (5, 4, 4, 6))
  activation = image_encoders._Activation("batch")
  params = activation.init(jax.random.key(1), images)
  values = np.asarray(images)
  mean, deviation = values.mean((0, 1, 2)), values.std((0, 1, 2))
  np.testing.assert_allclose(
    activation.apply(params, images),
    np.maximum((values - mean) / deviation, 0),
    rtol=1e-4,
    atol=1e-5,
  )
  net = image_encoders.ResNet18(dim=8, width=4, norm="batch")
  batch = jax.random.normal(jax.random.key(0), (3, 16, 16, 1))
  params, vectors = fresh(net, batch)
  assert len(jax.tree.leaves(params)) == 22 + 2 * 17
  alone = jax.jit(net.apply)(params, batch[1:2])
  assert jnp.abs(alone - vectors[1:2]).max() > 1e-2  # couples the examples
