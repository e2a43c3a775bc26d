"""Per-example clipping over a mesh of eight devices, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_t5
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from synthq_jax import optim
from synthq_jax.losses import seq2seq
from synthq_jax.models import t5

CONFIG = random_t5.config(vocab_size=48, emb_dim=16, num_heads=4, mlp_dim=32)


def loss_fn(params, batch):
  logits = t5.Transformer(CONFIG).apply(
    {"params": params}, batch["inputs"], t5.shift_right(batch["targets"])
  )
  return seq2seq.cross_entropy(logits, batch["targets"])


def make():
  rng = np.random.default_rng(0)
  batch = {
    name: jnp.asarray(rng.integers(2, 48, (8, length)))
    for name, length in (("inputs", 10), ("targets", 6))
  }
  return random_t5.params(CONFIG), batch, jnp.arange(8) == 5


@pytest.mark.parametrize(
  "strategy", ["bookkeeping", pytest.param("ghost", marks=pytest.mark.slow)]
)
def test_data_and_model_shards_change_nothing(strategy):
  params, batch, padding = make()
  mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
  rows = NamedSharding(mesh, P("data"))

  def place(x):
    wide = x.ndim == 2 and x.shape[1] % 2 == 0
    return jax.device_put(
      x, NamedSharding(mesh, P(None, "model") if wide else P())
    )

  grad_fn = optim.clipped_grad(
    loss_fn,
    l2_clip_norm=0.5,
    strategy=strategy,
  )
  step = jax.jit(lambda p, b, m: grad_fn(p, b, is_padding_example=m))
  one, aux = step(params, batch, padding)
  many, aux_many = step(
    jax.tree.map(place, params), *jax.device_put((batch, padding), rows)
  )
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
  np.testing.assert_allclose(aux.norms, aux_many.norms, rtol=1e-5)
  kernel = many["decoder"]["layers_0"]["mlp"]["wi_0"]["kernel"]
  assert len(kernel.sharding.device_set) == 8
