"""Neighbours that gradient ascent finds: how far a record moves a sum at most.

Ascent needs derivatives of the clipped sums themselves; where a method has none,
it is tried on the records that were found for another.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import optim
from synthq_jax.losses import contrastive as losses
from synthq_jax.optim import clipping, strategies
from tests.red_team import losses as table

STEPS, STARTS, RATE = 60, 6, 0.1


def length(first: Any, second: Any) -> jax.Array:
  squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), first, second)
  return jnp.sqrt(sum(jax.tree.leaves(squares)) + 1e-30)


def ascend(objective: Any, starts: Any) -> tuple[Any, jax.Array]:
  """Returns the last points of Adam, and the objective at every step."""
  optimizer = optax.adam(RATE)

  def climb(point: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
      point, state = carry
      value, slope = jax.value_and_grad(objective)(point)
      # Slopes that are not finite are those of a record that was dropped.
      slope = jax.tree.map(lambda x: -jnp.nan_to_num(x), slope)
      change, state = optimizer.update(slope, state)
      return (optax.apply_updates(point, change), state), value

    (point, _), values = jax.lax.scan(
      step, (point, optimizer.init(point)), length=STEPS
    )
    return point, values

  return jax.jit(jax.vmap(climb))(starts)


# Sums over examples.


def of_examples(name: str, change: str) -> dict[str, float]:
  """Returns, by strategy, the largest move over its claim.

  Args:
    name: of a loss of the table whose batch has x and g.
    change: "removed" or "replaced".
  """
  case = table.CASES[name]
  rest = case.batch(3)

  def moved(strategy: str, records: Any) -> jax.Array:
    grad_fn = clipping.clipped_grad(
      case.loss, l2_clip_norm=1.0, strategy=strategy
    )

    def total(record: Any, absent: bool) -> Any:
      batch = dict(rest)
      for field, x in record.items():
        batch[field] = jnp.concatenate([jnp.asarray(rest[field])[:2], x[None]])
      mask = jnp.array([False, False, absent])
      return grad_fn(case.params, batch, is_padding_example=mask)[0]

    first = total(records[0], False)
    if change == "removed":
      return length(first, total(records[0], True))
    return length(first, total(records[1], False)) / 2

  random = np.random.default_rng(0)
  shape = (STARTS, 2, table.LENGTH, table.DIM)
  x, g = (jnp.asarray(random.normal(size=shape), jnp.float32) for _ in range(2))

  def split(point: Any) -> Any:
    return [{"x": point["x"][i], "g": point["g"][i]} for i in range(2)]

  small = {"x": 0.01 * x, "g": g}
  found, _ = ascend(lambda point: moved("vmap", split(point)), small)
  worst = {}
  for strategy in strategies.STRATEGIES:
    of = jax.jit(lambda point, s=strategy: moved(s, split(point)))
    values = []
    for start in range(STARTS):
      for factor in (1.0, 1e3):
        point = jax.tree.map(lambda x, i=start: x[i], found)
        values.append(of({**point, "x": factor * point["x"]}))
    worst[strategy] = float(np.max(values))
  return worst


# Contrastive sums.

PAIRS, INPUTS, VECTOR, CLIP = 5, 4, 3, 0.05
SHARP = losses.Softmax(temperature=0.5)
CONTRASTIVE = {
  "logit exact": (optim.Logit(), SHARP, "pair"),
  "logit bound": (optim.Logit(norms="bound"), SHARP, "pair"),
  "logit sigmoid": (
    optim.Logit(),
    losses.Sigmoid(temperature=0.5, max_batch_size=PAIRS),
    "pair",
  ),
  "logit spreadout": (optim.Logit(), losses.Spreadout(), "pair"),
  "batch": (optim.Batch(), SHARP, "pair"),
  "group": (optim.Group(size=4, groups=2), SHARP, "pair"),
  "example": (optim.Row(), SHARP, "pair"),
}
for _name in ("all", "pair", "query"):
  CONTRASTIVE[f"row batch {_name}"] = (
    optim.Row(gradients=_name),
    SHARP,
    "query",
  )
  CONTRASTIVE[f"row public {_name}"] = (
    optim.Row(negatives="public", gradients=_name),
    SHARP,
    "pair",
  )


def _encode(params: Any, x: jax.Array) -> jax.Array:
  y = x @ params["w"] + params["b"][None]
  return y / jnp.linalg.norm(y, axis=1, keepdims=True)


def of_pairs(name: str, change: str) -> float:
  """Returns the largest move of a contrastive sum over its claim.

  The others' records climb, too: the claim is for every batch.

  Args:
    name: among `CONTRASTIVE`.
    change: "removed" or "replaced".
  """
  method, loss, unit = CONTRASTIVE[name]
  fn = optim.contrastive_clipped_grad(
    _encode,
    _encode,
    loss=loss,
    l2_clip_norm=CLIP,
    method=method,
    max_batch_size=PAIRS,
  )
  random = np.random.default_rng(0)
  draw = random.normal
  params = {
    "w": jnp.asarray(draw(size=(INPUTS, VECTOR)) / 2, jnp.float32),
    "b": jnp.asarray(draw(size=VECTOR), jnp.float32),
  }
  public = {
    "public_negatives": jnp.asarray(draw(size=(3, INPUTS)), jnp.float32)
  }
  last = jnp.arange(PAIRS) == PAIRS - 1

  def total(x: jax.Array, removed: bool) -> Any:
    batch = {"queries": x[0], "documents": x[1]}
    if "public" in name:
      batch |= public
    if name == "group":
      batch["example_id"] = jnp.arange(PAIRS)
    if unit == "query":
      batch["has_query"] = ~(last & removed)
      removed = False
    return fn(params, batch, is_padding_example=last & removed)[0]

  def moved(point: Any) -> jax.Array:
    if change == "removed":
      return length(total(point["x"], False), total(point["x"], True))
    other = point["other"] if unit == "pair" else point["other"][:1]
    x = point["x"].at[: len(other), -1].set(other)
    return length(total(point["x"], False), total(x, False))

  starts = {
    "x": jnp.asarray(draw(size=(STARTS, 2, PAIRS, INPUTS)) * 3, jnp.float32),
    "other": jnp.asarray(draw(size=(STARTS, 2, INPUTS)) * 3, jnp.float32),
  }
  relation = "ADD_OR_REMOVE_ONE" if change == "removed" else "REPLACE_ONE"
  _, values = ascend(moved, starts)
  return float(jnp.nanmax(values)) / fn.sensitivity(relation, unit)
