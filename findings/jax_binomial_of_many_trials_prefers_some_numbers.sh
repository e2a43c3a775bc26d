#!/bin/sh
# jax==0.10.2, numpy==2.4.6
#
# jax.random.binomial of 10,000,000 trials with probability 1/10,000 draws some
# numbers a fifth more often than their neighbours, whose true probabilities
# are equal to 3 in 1,000; the mean is right. At 2**30 trials the standard
# deviation is a fifth too large.
#
# Why it surprises: the numbers are near 1,000, far below what float32 can
# hold. But their logarithms of probability are differences of numbers near
# 10**8, in float32 (the default). With jax_enable_x64 the draws are right.
#
# Whom it hurts: numbers of records of Poisson batches, noise of a binomial
# mechanism (the ratio of two neighbouring numbers is the privacy loss), and
# simulations of either.
#
# Source: jax/_src/random/core.py, _btrs.
#
# Seen: most and least frequent of 992 to 1,008: jax 1.20, numpy 1.05; spread
#   at 2**30 trials: jax 1.23, numpy 1.00
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6
cd "$work"
cat > program.py <<'END'
import jax
import numpy as np

rng = np.random.default_rng(0)


def draw_jax(trials, probability, number):
  key = jax.random.key(0)
  return np.asarray(
    jax.random.binomial(key, float(trials), probability, (number,))
  )


def draw_numpy(trials, probability, number):
  return rng.binomial(trials, probability, number)


def preference(draw):
  drawn = draw(10_000_000, 1e-4, 2_000_000)
  counts = [(drawn == value).sum() for value in range(992, 1009)]
  return max(counts) / min(counts)


def spread(draw):
  drawn = draw(2**30, 0.25, 20_000).astype(np.float64)
  return drawn.std() / (2**30 * 0.25 * 0.75) ** 0.5


print(
  f"most and least frequent of 992 to 1,008: jax {preference(draw_jax):.2f},"
  f" numpy {preference(draw_numpy):.2f}; spread at 2**30 trials:"
  f" jax {spread(draw_jax):.2f}, numpy {spread(draw_numpy):.2f}"
)
if preference(draw_jax) < 1.15 or preference(draw_numpy) > 1.08:
  raise SystemExit("changed: neighbouring numbers are drawn equally often")
if not 1.15 < spread(draw_jax) < 1.35:
  raise SystemExit("changed: many trials have another spread")
END
"$work/env/bin/python" program.py
