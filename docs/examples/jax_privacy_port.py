"""DP-SGD of a logistic regression, as in jax_privacy's execution plan example.

The same data, epsilon, delta, batches, steps, clip norm and learning rate. Here
the claim also covers a data set with one record more, and the script prints it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.privacy import claim, sampling, statement, terms

rng = np.random.default_rng(0)
x, true = rng.normal(size=(5000, 50)), rng.normal(size=50)
y = rng.random(5000) < 1 / (1 + np.exp(-x @ true))
records = {"x": x.astype(np.float32), "y": y}


def loss_fn(params, batch):
  logits = batch["x"] @ params["weights"] + params["bias"]
  return jax.nn.softplus(jnp.where(batch["y"], -logits, logits))


sampler = sampling.Poisson.with_margin(
  num_examples=5000, expected_batch_size=250, multiple_of=32
)
grad_fn = optim.clipped_grad(loss_fn, l2_clip_norm=1.0)
promise = claim.calibrated(
  epsilon=2.0, delta=1e-5, sampler=sampler, steps=200,
  l2_clip_norm=grad_fn.l2_clip_norm, words=terms.EXAMPLES,
  l2_sensitivity=grad_fn.sensitivity("ADD_OR_REMOVE_ONE"),
)  # fmt: skip
secret = np.random.SeedSequence().entropy
tx = optax.chain(
  optim.privatize(
    l2_sensitivity=promise.l2_sensitivity,
    noise_multiplier=promise.noise_multiplier,
    denominator=250,
    key=optim.secret_key(secret, "noise"),
  ),
  optax.sgd(0.25),
)


@jax.jit
def step(params, state, batch):
  updates, state = tx.update(grad_fn(params, batch)[0], state)
  return optax.apply_updates(params, updates), state


params = {"weights": jnp.zeros(50), "bias": jnp.array(0.0)}
first_loss, state = loss_fn(params, records).mean(), tx.init(params)
for number in range(promise.steps):
  batch = sampler.take(records, sampler.batch([secret, 1], number))
  params, state = step(params, state, batch)
last_loss = loss_fn(params, records).mean()
print(f"loss (private): {first_loss:.3f} before, {last_loss:.3f} after")
print(statement.in_words(promise.statement("logistic regression")))
