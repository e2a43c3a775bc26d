"""User-level privacy: noise that hides whole clients.

DP-FedAvg: each client's update is clipped, the sum gets noise and is divided by
a fixed number. `fedavg` trains so, and `claim` says what that promises. Ask `few_clients.check_meaningful` first: there is a number of clients
below which the claim would be true and say nothing.
"""

import math

import dp_accounting
import jax
import optax

from synthq_jax import optim
from synthq_jax.federated import aggregation, local_training
from synthq_jax.federated import fedavg as fedavg_lib
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import sampling, terms

__all__ = [
  "claim",
  "fedavg",
]

_RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def claim(
  *,
  sampler: sampling.Poisson,
  rounds: int,
  l2_clip_norm: float,
  noise_multiplier: float,
  delta: float,
) -> claim_lib.Claim:
  """Returns the promise of DP-FedAvg, from its public settings.

  Formal guarantee:
    Unit: one client, with everything it holds. Relation: ADD_OR_REMOVE_ONE.
    That of `claim.Claim`, for everybody who sees all models of `rounds` rounds
    of `fedavg` whose cohorts `sampler` drew, each a new draw. Public: these
    settings. Assumes what `terms.CLIENT` says.

    Dropping out. A client that is drawn and sends nothing, or nan, adds zero,
    whose norm is below the clip norm as that of any update is, and the divisor
    is no count of those who answered. So it may drop out for reasons that lie
    in its own data: that is one more way for its update to depend on them. It
    is another matter if it makes OTHERS drop out, by keeping the server busy or
    since a round with few answers is thrown away: then one client moves the sum
    by more than the clip norm, and nothing is claimed. A client that is drawn
    and stays away is still counted as drawn.

    Padding. Rows of a cohort that no client fills add zero, too.

  >>> sampler = sampling.Poisson.with_margin(
  ...     num_examples=10_000, expected_batch_size=500)
  >>> privacy = claim(sampler=sampler, rounds=100, l2_clip_norm=0.5,
  ...                 noise_multiplier=1.0, delta=1e-5)
  >>> round(privacy.epsilon, 2)
  3.5

  Args:
    sampler: draws the clients of a round, which are its records.
    rounds: of the whole training: the steps of the claim.
    l2_clip_norm: of a client's update, over all parameters.
    noise_multiplier: noise standard deviation over the clip norm.
    delta: below 1 / num_clients; see `few_clients`.

  Raises:
    ValueError: for draws that nothing is claimed for, and without clipping.
  """
  if not isinstance(sampler, sampling.Poisson):
    raise ValueError(
      "expected a privacy.sampling.Poisson as the sampler of clients, got"
      f" {type(sampler).__name__}: draw clients with federated.cohorts.poisson"
    )
  if not (l2_clip_norm > 0 and math.isfinite(l2_clip_norm)):
    raise ValueError(
      f"expected l2_clip_norm > 0 and finite, got l2_clip_norm={l2_clip_norm}"
    )
  return claim_lib.Claim(
    sampler=sampler,
    steps=rounds,
    noise_multiplier=noise_multiplier,
    l2_clip_norm=l2_clip_norm,
    delta=delta,
    relation=_RELATION,
    words=terms.CLIENT,
  )


def fedavg(
  update: local_training.ClientUpdate,
  privacy: claim_lib.Claim,
  *,
  noise_key: jax.Array,
  server: optax.GradientTransformation | None = None,
  clients_at_once: int = 1,
  mesh: jax.sharding.Mesh | None = None,
) -> fedavg_lib.FedAvg:
  """Builds federated averaging that hides whole clients.

  Formal guarantee: that of `claim`, if `apply` is called at most
  `privacy.steps` times, each time with the clients that `privacy.sampler` drew
  for that round, `is_dropped` where it drew padding. What `server` does to the
  noisy mean is post-processing. The metrics are private.

  The noise is a function of the key and `State.round`. Whoever goes on from
  parameters alone has to set that number, and whoever makes a round again (with
  other devices or other code, which round otherwise) has to take another key,
  as another training: the noise of a round that was drawn twice falls out of
  the difference of two models.

  Args:
    update: what a client does.
    privacy: from `claim`: clip norm, noise, denominator.
    noise_key: secret key for the noise, and for nothing else. A key of
      `jax.random.key(number)` has 32 bits: make it with
      `jax.random.wrap_key_data` from two secret words.
    server: an optimizer that takes less the noisy mean update for a gradient;
      None: `optax.sgd(1.0)`, which adds that mean.
    clients_at_once: as in `fedavg.fedavg`.
    mesh: as in `fedavg.fedavg`.

  Returns:
    The functions; `apply` and `add` refuse weights.

  References:
    McMahan et al. (2018), arXiv:1710.06963, algorithm 1 with the estimator
    that divides by a fixed number.
  """
  privacy.check_plain(terms.CLIENT)
  sums = aggregation.Sum(l2_clip_norm=privacy.l2_clip_norm)
  private_mean = optim.privatize(
    l2_sensitivity=sums.sensitivity(_RELATION),
    noise_multiplier=privacy.noise_multiplier,
    denominator=privacy.sampler.expected_batch_size,
    key=noise_key,
  )
  found = fedavg_lib.fedavg(
    update,
    server=optax.chain(
      private_mean, optax.sgd(1.0) if server is None else server
    ),
    aggregation=sums,
    clients_at_once=clients_at_once,
    mesh=mesh,
  )

  def finish(
    state: fedavg_lib.State, total: aggregation.Total
  ) -> tuple[fedavg_lib.State, dict[str, jax.Array]]:
    noise, *rest = state.server_state
    noise = noise._replace(step=state.round)
    return found.finish(state._replace(server_state=(noise, *rest)), total)

  def apply(
    state: fedavg_lib.State, cohort: fedavg_lib.Cohort, key: jax.Array
  ) -> tuple[fedavg_lib.State, dict[str, jax.Array]]:
    return finish(state, found.add(found.begin(state), state, cohort, key))

  return found._replace(apply=apply, finish=finish)
