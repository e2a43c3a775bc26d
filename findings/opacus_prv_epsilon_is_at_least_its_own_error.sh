#!/bin/sh
# opacus==1.6.0, dp-accounting==0.6.0
#
# Opacus's PRV accountant answers 0.0100 for a plan that dp-accounting's
# privacy loss distributions put at 0.0003, and a negative epsilon for a plan
# and a delta that need none.
#
# Why it surprises: both are tight, and at usual epsilons they agree to a
# percent. Opacus adds its error allowance of 0.01 to every answer, so that no
# small epsilon can be seen.
#
# Whom it hurts: budgets for a pilot, for one more query or for a validation
# figure, where epsilon is hundredths.
#
# Source: opacus/accountants/prv.py, PRVAccountant.get_epsilon, eps_error.
#
# Seen: opacus 0.0100 dp-accounting 0.0003; usual 0.964 and 0.954; negative
# True
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 opacus==1.6.0 dp-accounting==0.6.0
cd "$work"
cat > program.py <<'END'
import dp_accounting
from dp_accounting import pld
from opacus.accountants import PRVAccountant


def both(noise, share, steps, delta):
  ours = PRVAccountant()
  ours.history = [(noise, share, steps)]
  theirs = pld.PLDAccountant()
  step = dp_accounting.GaussianDpEvent(noise)
  theirs.compose(dp_accounting.PoissonSampledDpEvent(share, step), steps)
  return float(ours.get_epsilon(delta=delta)), float(theirs.get_epsilon(delta))


small, usual = both(50.0, 0.001, 10, 1e-6), both(1.0, 0.01, 100, 1e-6)
none = both(1.0, 0.01, 1, 1e-2)
print(f"opacus {small[0]:.4f} dp-accounting {small[1]:.4f}")
print(f"usual {usual[0]:.3f} and {usual[1]:.3f}; negative {none[0] < 0}")
if not small[0] > 20 * small[1] or not none[0] < 0:
  raise SystemExit("changed: small epsilons are told apart")
END
"$work/env/bin/python" program.py
