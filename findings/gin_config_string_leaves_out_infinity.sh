#!/bin/sh
# gin-config==0.5.0
#
# A parameter bound to float("inf") stands in neither gin.config_str() nor
# gin.operative_config_str(), and neither does one bound to np.float64(0.1). A
# run from the written file has the default instead. A macro of 1e999 is
# written as inf, which gin cannot read.
#
# Why it surprises: the operative config is the record of what a run used, and
# floats are its simplest values. Values that gin cannot write as a literal
# are left out in silence; infinity has no literal, and NumPy 2 writes
# np.float64(0.1).
#
# Whom it hurts: a run without privacy (epsilon infinite) whose written config
# says a finite epsilon, by its default.
#
# Source: gin/config.py, _is_literally_representable and config_str.
#
# Seen: 3.0 written True, inf written False, np.float64(0.1) written False,
# macro EPSILON = inf SyntaxError
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet gin-config==0.5.0 numpy==2.4.6
cd "$work"
cat > program.py <<'END'
import gin
import numpy as np


@gin.configurable
def train(epsilon=8.0):
  return epsilon


def is_written(value):
  gin.clear_config()
  gin.bind_parameter("train.epsilon", value)
  train()
  return "train.epsilon" in gin.config_str() + gin.operative_config_str()


seen = [is_written(value) for value in (3.0, float("inf"), np.float64(0.1))]
print("3.0 written", seen[0], "inf written", seen[1], end=" ")
print("np.float64(0.1) written", seen[2])
gin.clear_config()
gin.parse_config("EPSILON = 1e999\ntrain.epsilon = %EPSILON")
written = gin.config_str()
gin.clear_config()
try:
  gin.parse_config(written)
  read = "as written"
except Exception as error:
  read = type(error).__name__
print("macro", *(line for line in written.splitlines() if "inf" in line), read)
if seen != [True, False, False] or read == "as written":
  raise SystemExit("changed: other values are written")
END
"$work/env/bin/python" program.py
