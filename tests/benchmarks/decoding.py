"""Nucleus sampling beside transformers' generate: tokens a second on this CPU.

Both write 32 tokens for inputs of 384 with p = 0.8 and random weights of the
shape of T5 1.1 Small, in turn, in one process, on the same cores. The encoder,
and the projection of its output for the decoder, are timed apart. Then ours
writes 32, 64 and 128 tokens: were past keys computed again, a token of the
longest would take several times as long. Prints one JSON document. Bars: twice
transformers' tokens a second up to batch 8, as many at 64; a step at most 1.25
times as long at 128 tokens as at 32.

  python tests/benchmarks/decoding.py
  python tests/benchmarks/decoding.py --cores=1   # on a busy machine
"""

import importlib.metadata
import os
import statistics
import sys
import time
from typing import Any

import measuring

INPUT, WRITTEN, P = 384, 32, 0.8
LENGTHS = (32, 64, 128)
FLAT_BATCH = 8
BARS = {1: 2.0, 2: 2.0, 4: 2.0, 8: 2.0, 64: 1.0}
FLAT_LIMIT = 1.25


def documents(batch: int, vocab: int) -> Any:
  import numpy as np

  rng = np.random.default_rng(0)
  return rng.integers(2, vocab - 200, (batch, INPUT)).astype(np.int32)


class Ours:
  """The two compiled functions that `decoding.generate` runs on a batch."""

  def __init__(self, model: str):
    import jax

    from synthq_jax.models import t5, t5_config

    self.config = t5_config.get(model)
    self.params = jax.jit(lambda key: t5.init_params(self.config, key))(
      jax.random.key(0)
    )

  def prepare(self, batch: int, length: int = WRITTEN) -> tuple[Any, Any]:
    """Returns a function that encodes and one that writes."""
    import jax
    import numpy as np

    from synthq_jax.generation import decoding

    tokens = documents(batch, self.config.vocab_size)
    names = [str(number) for number in range(batch)]
    keys = decoding._make_document_keys(jax.random.key(1), names)
    banned = decoding._make_forbidden_mask(
      self.config.vocab_size, (self.config.token_ids.eos,)
    )
    read = jax.jit(
      lambda params, tokens: decoding._apply(
        params, self.config, "read", tokens
      )
    )

    def encode():
      return jax.block_until_ready(read(self.params, tokens))

    inputs = encode()
    decode = jax.jit(
      lambda *arguments: decoding.decode(
        *arguments,
        config=self.config,
        sampler=decoding.Nucleus(P),
        max_length=length,
      )
    )

    def write():
      written = decode(self.params, banned, inputs, keys, np.ones(batch, bool))
      if not (np.asarray(written) > self.config.token_ids.eos).all():
        raise AssertionError("a query ended early")

    write()  # compiles
    return encode, write


class Theirs:
  """transformers' T5 of the same shape, with its cache."""

  def __init__(self, ours: Ours, cores: int):
    import torch
    import transformers

    torch.set_num_threads(cores)
    shape = ours.config
    self.model = transformers.T5ForConditionalGeneration(
      transformers.T5Config(
        vocab_size=shape.vocab_size,
        d_model=shape.emb_dim,
        d_kv=shape.head_dim,
        d_ff=shape.mlp_dim,
        num_layers=shape.num_encoder_layers,
        num_decoder_layers=shape.num_decoder_layers,
        num_heads=shape.num_heads,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
      )
    ).eval()
    self.vocab_size = shape.vocab_size

  def prepare(self, batch: int) -> tuple[Any, Any]:
    """Returns a function that encodes and one that returns its own times."""
    import torch

    tokens = torch.tensor(documents(batch, self.vocab_size)).long()
    mask = torch.ones_like(tokens)

    def encode():
      with torch.inference_mode():
        return self.model.encoder(input_ids=tokens, attention_mask=mask)

    encoded = encode()

    def write() -> dict[str, float]:
      clock = _clock()
      with torch.inference_mode():
        written = self.model.generate(
          encoder_outputs=encoded,
          attention_mask=mask,
          do_sample=True,
          top_p=P,
          top_k=0,
          use_cache=True,
          min_new_tokens=WRITTEN,
          max_new_tokens=WRITTEN,
          stopping_criteria=[clock],
        )
      if written.shape != (batch, WRITTEN + 1):
        raise AssertionError("a query ended early")
      # The first step projects the encoder's output: it is left out.
      share = WRITTEN / (WRITTEN - 1)
      (wall, cpu), (last_wall, last_cpu) = clock.times[0], clock.times[-1]
      return {
        "wall_s": (last_wall - wall) * share,
        "cpu_s": (last_cpu - cpu) * share,
      }

    return encode, write


def _clock() -> Any:
  """Returns a stopping criterion that never stops and notes the time."""
  import torch
  import transformers

  class Clock(transformers.StoppingCriteria):
    def __init__(self):
      self.times = []

    def __call__(self, input_ids, scores, **kwargs):
      self.times.append((time.perf_counter(), time.process_time()))
      return torch.zeros(len(input_ids), dtype=torch.bool)

  return Clock()


def measure(
  ours: Ours, theirs: Theirs, batch: int, repeats: int
) -> dict[str, Any]:
  """Times one batch, one run of each after the other."""
  encode, write = ours.prepare(batch)
  their_encode, their_write = theirs.prepare(batch)
  their_write()
  runs: dict[str, list[dict[str, float]]] = {
    name: [] for name in ("encode", "write", "their_encode", "their_write")
  }
  for _ in range(repeats):
    runs["write"].append(measuring.timed(write))
    runs["their_write"].append(their_write())
  for _ in range(2):
    runs["encode"].append(measuring.timed(encode))
    runs["their_encode"].append(measuring.timed(their_encode))
  tokens = batch * WRITTEN
  pairs = zip(runs["write"], runs["their_write"], strict=True)
  ratios = [b["wall_s"] / a["wall_s"] for a, b in pairs]
  best = {
    name: min(one["wall_s"] for one in each) for name, each in runs.items()
  }
  return {
    "batch": batch,
    "synthq_jax": _summary(runs["write"], best["encode"], tokens),
    "transformers": _summary(runs["their_write"], best["their_encode"], tokens),
    "ratio": round(statistics.median(ratios), 2),
    "ratio_of_best": round(best["their_write"] / best["write"], 2),
    "ratio_of_cpu": round(
      min(one["cpu_s"] for one in runs["their_write"])
      / min(one["cpu_s"] for one in runs["write"]),
      2,
    ),
  }


def _summary(runs: list[dict[str, float]], encode_s: float, tokens: int) -> Any:
  walls = [one["wall_s"] for one in runs]
  return {
    "tokens_per_s": round(tokens / statistics.median(walls), 1),
    "tokens_per_s_best": round(tokens / min(walls), 1),
    "step_ms_best": round(1e3 * min(walls) / WRITTEN, 2),
    "step_cpu_ms_best": round(
      1e3 * min(one["cpu_s"] for one in runs) / WRITTEN, 2
    ),
    "encode_s_best": round(encode_s, 4),
    "runs_s": [round(wall, 4) for wall in walls],
  }


def flatness(ours: Ours, repeats: int) -> dict[str, Any]:
  """Times a step of ours while more and more tokens are written."""
  writes = {length: ours.prepare(FLAT_BATCH, length)[1] for length in LENGTHS}
  runs: dict[int, list[dict[str, float]]] = {length: [] for length in LENGTHS}
  for _ in range(repeats):
    for length, write in writes.items():
      runs[length].append(measuring.timed(write))

  def step_ms(length: int, field: str) -> float:
    return round(1e3 * min(r[field] for r in runs[length]) / length, 3)

  return {
    "batch": FLAT_BATCH,
    "step_ms_best": {n: step_ms(n, "wall_s") for n in LENGTHS},
    "step_cpu_ms_best": {n: step_ms(n, "cpu_s") for n in LENGTHS},
    "growth": round(step_ms(128, "cpu_s") / step_ms(32, "cpu_s"), 3),
  }


def main() -> int:
  parser = measuring.parser(__doc__)
  parser.add_argument("--model", default="t5_1_1_small")
  parser.add_argument(
    "--batches", type=int, nargs="*", default=(1, 2, 4, 8, 16, 64)
  )
  parser.add_argument("--repeats", type=int, default=9)
  parser.add_argument("--cores", type=int, default=2)
  options = parser.parse_args()
  measuring.keep_to(options.cores)
  before = os.getloadavg()[0]
  import jax

  ours = Ours(options.model)
  theirs = Theirs(ours, options.cores)
  found = []
  for batch in options.batches:
    repeats = options.repeats if batch <= 8 else max(3, options.repeats // 2)
    found.append(measure(ours, theirs, batch, repeats))
    measuring.say(found[-1])
  flat = flatness(ours, max(3, options.repeats // 2))
  passed = flat["growth"] <= FLAT_LIMIT and all(
    one["ratio"] >= BARS.get(one["batch"], 0) for one in found
  )
  result = {
    "versions": {
      name: importlib.metadata.version(name)
      for name in ("jax", "flax", "torch", "transformers")
    },
    "load": [round(before, 1), round(os.getloadavg()[0], 1)],
    "backend": jax.default_backend(),
    "model": options.model,
    "tokens": {"input": INPUT, "written": WRITTEN},
    "limits": {"ratio": BARS, "growth": FLAT_LIMIT},
    "batches": found,
    "flatness": flat,
  }
  return measuring.finish("decoding", result, passed=passed)


if __name__ == "__main__":
  sys.exit(main())
