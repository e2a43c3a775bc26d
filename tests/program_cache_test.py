"""JAX's cache of compiled programs is written without a lock: what a tear does."""

import subprocess
import sys

_SCRIPT = """
import importlib.util, pathlib, sys, warnings
import jax
import jax.numpy as jnp

folder = pathlib.Path(sys.argv[1])
jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
x = jnp.arange(8.0)


def run():
  jax.clear_caches()
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    result = jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))(x)
  told = [one for one in told if "compilation cache" in str(one.message)]
  return float(result), len(told)


right, told = run()
assert told == 0 and run() == (right, 0)
entries = [(path, path.read_bytes()) for path in folder.glob("jit_*-cache")]
assert entries
for part in range(8):
  for path, whole in entries:  # another process writes it, or died in it
    path.write_bytes(whole[: len(whole) * part // 8])
  result, told = run()
  assert result == right and told, ("cut", part, result, told)
# zstandard writes no checksum of the content.
is_new = sys.version_info >= (3, 14)
has_checksum = not is_new and not importlib.util.find_spec("zstandard")
for part in range(24 * has_checksum):
  for path, whole in entries:
    at = len(whole) * part // 24
    changed = bytes([whole[at] ^ 1 << part % 8])
    path.write_bytes(whole[:at] + changed + whole[at + 1 :])
  result, told = run()
  assert result == right and told, ("flipped", part, result, told)
print(len(entries), "entries")
"""


def test_a_torn_or_damaged_program_is_compiled_again(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", _SCRIPT, str(tmp_path)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert int(done.stdout.split()[0]) > 0
