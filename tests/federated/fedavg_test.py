"""Rounds of federated averaging: what they equal, and what changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import random_t5

from synthq_jax.federated import aggregation, cohorts, fedavg, local_training
from synthq_jax.losses import contrastive
from synthq_jax.models import dual_encoder
from synthq_jax.training import mesh

KEY = jax.random.key(5)
# What users compile with. Tests compile faster (conftest.py), by which two
# programs of the same arithmetic may round differently.
AS_USERS = {
  "xla_backend_optimization_level": 3,
  "xla_cpu_use_fusion_emitters": True,
}
CONFIG = random_t5.config(vocab_size=64, emb_dim=16, head_dim=8, mlp_dim=24)


def net_loss(params, batch, key):
  del key
  hidden = jnp.tanh(batch["x"] @ params["first"])
  return jnp.sum((hidden @ params["second"] - batch["y"]) ** 2, axis=-1)


def random_loss(params, batch, key):
  """Losses that depend on the key, as those with dropout do."""
  noise = jax.random.normal(key, params["first"].shape)
  shifted = {**params, "first": params["first"] + 0.1 * noise}
  return net_loss(shifted, batch, None)


def encoder_loss(params, batch, key):
  del key
  encode = functools.partial(dual_encoder.encode, params, CONFIG)
  similarity = encode(batch["queries"]) @ encode(batch["documents"]).T
  is_padding = batch["is_padding"]
  return contrastive.softmax(
    similarity, temperature=0.1, is_padding_example=is_padding
  )


def net_client(rng, steps, rows=6):
  return {
    "x": rng.normal(size=(steps, rows, 5)).astype(np.float32),
    "y": rng.normal(size=(steps, rows, 3)).astype(np.float32),
    "is_padding": np.arange(steps * rows).reshape(steps, rows)
    == steps * rows - 1,  # the last row of the last step
  }


def encoder_client(rng, steps, rows=4):
  return {
    name: rng.integers(2, 64, (steps, rows, length)).astype(np.int32)
    for name, length in (("queries", 5), ("documents", 9))
  } | {"is_padding": np.zeros((steps, rows), bool)}


@functools.cache
def net_params():
  rng = np.random.default_rng(1)
  return {
    "first": jnp.asarray(rng.normal(size=(5, 7)), jnp.float32),
    "second": jnp.asarray(rng.normal(size=(7, 3)), jnp.float32),
  }


@functools.cache
def encoder_params():
  return dual_encoder.encoder_params(random_t5.params(CONFIG))


PROBLEMS = {
  "net": (net_loss, net_client, net_params),
  "encoder": (encoder_loss, encoder_client, encoder_params),
}


def some_clients(number=5, make=net_client):
  rng = np.random.default_rng(3)
  return [make(rng, 1 + (3 * place) % 4) for place in range(number)]


@functools.cache
def training(loss_fn=net_loss, **options):
  return local_training.local_training(loss_fn, optax.adam(0.02), **options)


@functools.cache
def with_sgd(loss_fn):
  """As `training`, but small differences stay small."""
  return local_training.local_training(loss_fn, optax.sgd(0.05))


@functools.cache
def compiled(update, **options):
  """Returns federated averaging whose functions are compiled once."""
  made = fedavg.fedavg(update, **options)
  return made._replace(
    **{
      name: jax.jit(getattr(made, name), compiler_options=AS_USERS)
      for name in made._fields
    }
  )


def one_round(update, cohort, params=None, **options):
  """Returns the state after a round, and its metrics."""
  made = compiled(update, **options)
  state = made.init(net_params() if params is None else params)
  return made.apply(state, cohort, KEY)


def assert_same_bits(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(one, other, tolerance=1e-6):
  jax.tree.map(
    functools.partial(
      np.testing.assert_allclose, rtol=tolerance, atol=tolerance
    ),
    one,
    other,
  )


def differs(one, other):
  return any(
    jax.tree.leaves(jax.tree.map(lambda x, y: (x != y).any(), one, other))
  )


@pytest.mark.parametrize(
  "name", ["net", pytest.param("encoder", marks=pytest.mark.slow)]
)
def test_one_client_is_plain_training_to_the_bit(name):
  loss_fn, make, start = PROBLEMS[name]
  client = make(np.random.default_rng(0), 3)
  update = training(loss_fn, epochs=2)
  cohort = cohorts.stack([client], [7])
  state, metrics = one_round(update, cohort, start())
  plain = jax.jit(update, compiler_options=AS_USERS)(
    start(), client, fedavg.client_key(KEY, 0, 7)
  )
  assert_same_bits(state.params, plain)
  assert differs(state.params, start())
  assert metrics["clients"] == 1 and state.round == 1


@pytest.mark.parametrize(
  "name", ["net", pytest.param("encoder", marks=pytest.mark.slow)]
)
def test_one_client_is_a_plain_loop_with_optax_to_the_bit(name):
  loss_fn, make, start = PROBLEMS[name]
  client = make(np.random.default_rng(0), 3)
  client["is_padding"][:] = False
  state, _ = one_round(
    training(loss_fn, epochs=2), cohorts.stack([client], [7]), start()
  )
  optimizer = optax.adam(0.02)

  @functools.partial(jax.jit, compiler_options=AS_USERS)
  def step(params, opt_state, batch):
    grads = jax.grad(lambda p: jnp.mean(loss_fn(p, batch, None)))(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params, opt_state = start(), optimizer.init(start())
  for _ in range(2):
    for number in range(3):
      batch = {name: rows[number] for name, rows in client.items()}
      params, opt_state = step(params, opt_state, batch)
  assert_same_bits(state.params, params)


def test_identical_clients_are_one_of_them_to_the_bit():
  client = some_clients()[3]
  alone, _ = one_round(training(), cohorts.stack([client], [0]))
  for weights in (None, [3.0, 0.7, 11.0]):
    cohort = cohorts.stack([client] * 3, [4, 8, 2], weights=weights)
    together, _ = one_round(training(), cohort)
    assert_same_bits(together.params, alone.params)
  side_by_side, _ = one_round(training(), cohort, clients_at_once=3)
  assert_close(side_by_side.params, alone.params)


@pytest.mark.parametrize(
  ("clients_at_once", "name"),
  [
    (2, "net"),
    (8, "net"),
    pytest.param(2, "encoder", marks=pytest.mark.slow),
  ],
)
def test_clients_side_by_side_are_clients_one_by_one(name, clients_at_once):
  loss_fn, make, start = PROBLEMS[name]
  cohort = cohorts.stack(
    some_clients(5, make), range(5), weights=[1, 2, 3, 4, 5], size=6
  )
  update = with_sgd(loss_fn)
  alone, expected = one_round(update, cohort, start())
  state, metrics = one_round(
    update, cohort, start(), clients_at_once=clients_at_once
  )
  assert_close(state.params, alone.params)
  assert_close(metrics, expected)
  assert metrics["clients"] == 5


def test_the_mean_is_weighted_as_numpy_weighs():
  clients, weights = some_clients(), np.array([1.0, 0.5, 4.0, 0.0, 2.0])
  cohort = cohorts.stack(clients, range(5), weights=weights)
  state, metrics = one_round(training(), cohort)
  alone = [
    one_round(training(), cohorts.stack([client], [number]))[0].params
    for number, client in enumerate(clients)
  ]
  expected = jax.tree.map(
    lambda *x: np.average(x, axis=0, weights=weights), *alone
  )
  assert_close(state.params, expected)
  assert metrics["clients"] == 4
  uniform, _ = one_round(training(), cohorts.stack(clients, range(5)))
  expected = jax.tree.map(lambda *x: np.mean(x, axis=0), *alone)
  assert_close(uniform.params, expected)


def results(update, cohort):
  """Returns what each client of a cohort sends, [client, ...]."""
  seen = []

  def told(params, batches, key):
    model = update(params, batches, key)
    place = batches["x"][0, 0, 0]  # tells the clients apart
    jax.debug.callback(lambda at, m: seen.append((float(at), m)), place, model)
    return model

  one_round(told, cohort)
  jax.effects_barrier()
  return dict(seen)


@pytest.mark.slow
def test_a_dropped_client_changes_nothing_else():
  clients, ids = some_clients(), [9, 4, 0, 7, 2]
  update = training(random_loss)
  whole = cohorts.stack(clients, ids, weights=[1, 2, 3, 4, 5])
  poisoned = clients[2] | {"x": np.full_like(clients[2]["x"], np.nan)}
  dropped = cohorts.drop(
    cohorts.stack(
      [*clients[:2], poisoned, *clients[3:]], ids, weights=[1, 2, 3, 4, 5]
    ),
    np.arange(5) == 2,
  )
  left = [place for place in range(5) if place != 2]
  without = cohorts.stack(
    [clients[i] for i in left], [ids[i] for i in left], weights=[1, 2, 4, 5]
  )
  everybody, others = results(update, whole), results(update, dropped)
  for place in left:
    at = float(clients[place]["x"][0, 0, 0])
    assert_same_bits(others[at], everybody[at])
    assert differs(others[at], net_params())
  state, metrics = one_round(update, dropped)
  expected, expected_metrics = one_round(update, without)
  assert_same_bits(state, expected)
  assert_same_bits(metrics, expected_metrics)
  assert differs(state.params, one_round(update, whole)[0].params)


def test_a_clients_key_is_its_own_in_every_round():
  client = some_clients()[1]
  made = compiled(training(random_loss))
  apply = made.apply
  state = made.init(net_params())
  first, _ = apply(state, cohorts.stack([client], [3]), KEY)
  again, _ = apply(state, cohorts.stack([client], [3]), KEY)
  assert_same_bits(first, again)
  later = state._replace(round=jnp.int32(1))
  for other_state, number in ((state, 4), (later, 3)):
    other, _ = apply(other_state, cohorts.stack([client], [number]), KEY)
    assert differs(other.params, first.params)


def test_a_round_in_parts_is_the_round_to_the_bit():
  clients = some_clients()
  made = compiled(training())
  state = made.init(net_params())
  expected = made.apply(state, cohorts.stack(clients, range(5)), KEY)
  total = made.begin(state)
  for places in ([0, 1], [2], [3, 4]):
    part = cohorts.stack([clients[i] for i in places], places)
    total = made.add(total, state, part, KEY)
  assert_same_bits(made.finish(state, total), expected)


def test_both_sides_work_without_each_other():
  """As where clients are other machines, and something else connects them."""
  clients, weights = some_clients(), [5.0, 1.0, 2.0, 2.0, 3.0]
  update, mean = jax.jit(training()), aggregation.Mean()
  made = compiled(training())
  state = made.init(net_params())
  sent = [  # on the clients
    update(state.params, client, fedavg.client_key(KEY, state.round, number))
    for number, client in enumerate(clients)
  ]
  total = made.begin(state)  # on the server, in the order of arrival
  for model, weight in zip(sent, weights, strict=True):
    total = mean.merge(total, mean.of(state.params, model, weight))
  state, metrics = made.finish(state, total)
  cohort = cohorts.stack(clients, range(5), weights=weights)
  expected, expected_metrics = one_round(training(), cohort)
  assert_close(state.params, expected.params)
  assert_close(metrics, expected_metrics)


@pytest.mark.parametrize(
  "server",
  [
    optax.sgd(0.5, momentum=0.9),
    pytest.param(optax.adam(0.1), marks=pytest.mark.slow),
    pytest.param(optax.yogi(0.1), marks=pytest.mark.slow),
  ],
  ids=["momentum", "adam", "yogi"],
)
def test_a_server_optimizer_takes_what_clients_changed_for_a_gradient(server):
  clients, weights = some_clients(), np.array([1.0, 2.0, 3.0, 4.0, 5.0])
  cohort = cohorts.stack(clients, range(5), weights=weights)
  made = compiled(training(), server=server)
  apply, update = made.apply, jax.jit(training())
  state = made.init(net_params())
  params, opt_state = net_params(), server.init(net_params())
  for number in range(3):
    models = [
      update(params, client, fedavg.client_key(KEY, number, place))
      for place, client in enumerate(clients)
    ]
    mean = jax.tree.map(
      lambda *x: np.average(x, axis=0, weights=weights), *models
    )
    gradient = jax.tree.map(lambda x, y: x - y, params, mean)
    updates, opt_state = server.update(gradient, opt_state, params)
    params = optax.apply_updates(params, updates)
    state, _ = apply(state, cohort, KEY)
    # Adam's first steps divide what is small by what is small.
    assert_close(state.params, params, tolerance=1e-4)
  plain, _ = one_round(training(), cohort)
  steps, _ = one_round(training(), cohort, server=optax.sgd(1.0))
  assert_close(steps.params, plain.params)


def test_a_fixed_denominator_does_not_follow_who_is_there():
  clients = some_clients()
  sums = aggregation.Sum(denominator=5.0)
  cohort = cohorts.stack(clients, range(5))
  state, _ = one_round(training(), cohort, aggregation=sums)
  assert_close(state.params, one_round(training(), cohort)[0].params)
  three = cohorts.drop(cohort, np.arange(5) >= 3)
  state, _ = one_round(training(), three, aggregation=sums)
  mean, _ = one_round(training(), three)
  expected = jax.tree.map(
    lambda x, y: x + 3 / 5 * (y - x), net_params(), mean.params
  )
  assert_close(state.params, expected)


def test_a_client_that_sends_nan_is_left_out_and_counted():
  clients = some_clients()
  broken = clients[1] | {"y": np.full_like(clients[1]["y"], np.inf)}
  cohort = cohorts.stack([clients[0], broken, clients[2]], range(3))
  for at_once in (1, 3):
    state, metrics = one_round(training(), cohort, clients_at_once=at_once)
    expected, _ = one_round(
      training(), cohorts.stack([clients[0], clients[2]], [0, 2])
    )
    assert_close(state.params, expected.params)
    assert metrics["failed"] == 1 and metrics["clients"] == 2


@pytest.mark.parametrize("server", [None, optax.sgd(1.0)])
def test_a_round_of_nobody_leaves_the_parameters_alone(server):
  cohort = cohorts.stack(some_clients(2), range(2))
  nobody = cohorts.drop(cohort, np.ones(2, bool))
  state, metrics = one_round(training(), nobody, server=server)
  assert_same_bits(state.params, net_params())
  assert metrics["clients"] == 0 and metrics["norm"] == 0


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize(
  "number",
  [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 13))],
)
def test_a_mesh_shares_clients_and_changes_rounding_alone(at_once, number):
  clients = some_clients(number)
  cohort = cohorts.stack(clients, range(number), weights=range(1, number + 1))
  expected, expected_metrics = one_round(training(), cohort)
  state, metrics = one_round(
    training(),
    cohort,
    clients_at_once=at_once,
    mesh=mesh.make(mesh.Shape()),
  )
  assert_close(state.params, expected.params, tolerance=3e-6)
  assert_close(metrics, expected_metrics, tolerance=3e-6)


def test_a_mesh_that_splits_models_is_refused():
  with pytest.raises(ValueError, match="fsdp=1, tensor=2: set both to 1"):
    fedavg.fedavg(training(), mesh=mesh.make(mesh.Shape(tensor=2)))


def test_memory_does_not_grow_with_the_number_of_clients():
  made = fedavg.fedavg(training(), clients_at_once=4)
  rng = np.random.default_rng(0)
  wide = {
    "first": jnp.asarray(rng.normal(size=(5, 2000)), jnp.float32),
    "second": jnp.asarray(rng.normal(size=(2000, 3)), jnp.float32),
  }
  state = made.init(wide)

  def temporaries(number):
    clients = [net_client(rng, 1, rows=1) for _ in range(number)]
    cohort = cohorts.stack(clients, range(number))
    compiled = jax.jit(made.apply).lower(state, cohort, KEY).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  model = 4 * sum(x.size for x in jax.tree.leaves(wide))
  few, many = temporaries(8), temporaries(200)
  assert few > 4 * model
  assert many - few < model  # of 192 more clients


@pytest.mark.parametrize("number", [0, -1])
def test_no_clients_at_once_are_refused(number):
  with pytest.raises(ValueError, match=f"clients_at_once={number}"):
    fedavg.fedavg(training(), clients_at_once=number)
