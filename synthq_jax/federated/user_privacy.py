"""User-level privacy: noise that hides whole clients.

DP-FedAvg: each client's update is clipped, the sum gets noise and is divided by
a fixed number. `fedavg` trains so, and `claim` says what that promises. Ask
`check_meaningful` first: there is a number of clients below which the claim
would be true and say nothing.
"""

import math

import dp_accounting
import jax
import optax

from synthq_jax import checks, optim
from synthq_jax.federated import aggregation, cohorts, local_training
from synthq_jax.federated import fedavg as fedavg_lib
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import rounding, sampling, terms

__all__ = [
  "check_meaningful",
  "claim",
  "clients_needed",
  "fedavg",
  "signal_to_noise",
]

_MAX_EPSILON = 10.0
_MAX_DELTA = 1e-3
_EXPONENT = 1.1  # delta is n to the power of minus this
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
    delta: below 1 / num_clients; see `check_meaningful`.

  Raises:
    ValueError: for draws that nothing is claimed for, and without clipping.
  """
  if not isinstance(sampler, sampling.Poisson):
    raise ValueError(
      "expected a privacy.sampling.Poisson as the sampler of clients, got"
      f" {type(sampler).__name__}: draw clients with federated.cohorts.poisson"
    )
  checks.within("(0, inf)", l2_clip_norm=l2_clip_norm)
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


def signal_to_noise(privacy: claim_lib.Claim, num_parameters: int) -> float:
  """Returns how far clients can move the model, over how far noise moves it.

  With clip norm C, m clients expected in a round, noise multiplier s, T rounds
  and d parameters: the mean update of a round has a norm of at most about C,
  reached if all clients send the same. So all rounds together move the model by
  at most T C, reached if no round contradicts another. The noise of a round has
  standard deviation s C / m in each coordinate; that of T rounds adds up to a
  vector of norm sqrt(T d) s C / m. The ratio is sqrt(T / d) m / s.

  It is the best case: clients of different data disagree, and directions change
  from round to round.

  Args:
    privacy: settings.
    num_parameters: that are trained and sent.
  """
  noise = privacy.noise_multiplier * math.sqrt(num_parameters)
  if noise == 0:
    return math.inf
  clients = privacy.sampler.expected_batch_size
  return math.sqrt(privacy.steps) * clients / noise


def check_meaningful(privacy: claim_lib.Claim, num_parameters: int) -> None:
  """Refuses settings whose claim would be true and yet say nothing.

  The mathematics holds for any number of clients. But a claim is worth making
  if three things hold:

  1. delta <= min(1 / (2 n), 1e-3). Handing out one client's data whole, drawn
     at random, with probability n delta, is (0, delta)-DP: on average
     n delta clients may be laid bare. Half a client is the
     bound of this project's examples, too; with few clients it would still be
     a large chance for each, hence the second number, a convention.
  2. epsilon <= 10: again a convention, the end of the second of three tiers in
     Ponomareva et al. (2023).
  3. `signal_to_noise` >= 1: otherwise noise moves the model farther than the
     clients could even if they all agreed in all rounds.

  With few clients the second and the third exclude each other, since the noise
  is divided by the number of clients of a round: the shipped encoder in 100
  rounds of all of 9 clients, epsilon 8, delta 1e-3, has a ratio of 1/52. How
  many clients epsilon 8, delta n^-1.1 and 100 rounds take (`clients_needed`;
  1,024 is what the first asks for), if a round has all of them, or 1 in 10, or
  1 in 50:

    parameters                                  all   1 in 10   1 in 50
    16,384 (a projection of the encoder)      1,024     1,024     1,024
    951,040 (the shipped encoder)             1,024     1,024     2,362
    1,902,080 (one encoder for each side)     1,024     1,117     3,394
    60,000,000 (about T5 Small)               4,213     6,824    20,406

  Args:
    privacy: settings.
    num_parameters: that are trained and sent.

  Raises:
    ValueError: saying which of the three fails and what to do.

  References:
    Ponomareva et al. (2023), How to DP-fy ML, arXiv:2303.00654.
  """
  n = privacy.sampler.num_examples
  start = f"user-level privacy of {n:,} clients would not be meaningful: "
  end = "; claim privacy for the examples inside of each client, or "
  limit = min(1 / (2 * n), _MAX_DELTA)
  if privacy.delta > limit * (1 + 1e-9):
    raise ValueError(
      f"{start}delta={rounding.delta(privacy.delta)} lets {n * privacy.delta:.2g} of them"
      f" be laid bare, expected at most min(1/(2n), {_MAX_DELTA:g}) ="
      f" {limit:.3g}{end}take a smaller delta"
    )
  if privacy.epsilon > _MAX_EPSILON:
    raise ValueError(
      f"{start}epsilon={rounding.epsilon(privacy.epsilon)} at"
      f" delta={rounding.delta(privacy.delta)}, expected at most {_MAX_EPSILON:g}{end}take more noise and more clients"
    )
  signal = signal_to_noise(privacy, num_parameters)
  if signal < 1:
    drawn = privacy.sampler.expected_batch_size
    raise ValueError(
      f"{start}in {privacy.steps} rounds noise would move the"
      f" {num_parameters:,} parameters {1 / signal:.3g} times as far as clients"
      f" could that all agree{end}have about {math.ceil(drawn / signal):,} of"
      f" them in a round, not {drawn:,}, for this noise"
    )


def clients_needed(
  *,
  epsilon: float,
  rounds: int,
  share: float,
  num_parameters: int,
) -> int:
  """Returns about how many clients `check_meaningful` asks for.

  Args:
    epsilon: of the claim, at most 10.
    rounds: of the training.
    share: of the clients, expected in a round, in (0, 1].
    num_parameters: that are trained and sent.

  Returns:
    The number, to about 1%.
  """
  # n^-exponent <= 1/(2n) and <= 1e-3.
  least = max(2 ** (1 / (_EXPONENT - 1)), _MAX_DELTA ** (-1 / _EXPONENT))
  clients = math.ceil(least - 1e-6)
  while True:
    sampler = cohorts.poisson(
      num_clients=clients, clients_per_round=max(1, round(share * clients))
    )
    privacy = claim_lib.calibrated(
      epsilon=epsilon,
      sampler=sampler,
      steps=rounds,
      l2_clip_norm=1.0,
      delta=clients**-_EXPONENT,
      words=terms.CLIENT,
    )
    signal = signal_to_noise(privacy, num_parameters)
    if signal >= 1:
      return clients
    # At one noise the ratio grows as n does, and the noise grows slowly.
    clients = math.ceil(1.003 * clients / signal)
