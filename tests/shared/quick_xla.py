"""Flags of XLA that make a CPU compile five times as fast."""

import importlib.metadata

FLAGS = (
  "--xla_backend_optimization_level=0",
  "--xla_cpu_parallel_codegen_split_count=1",
)
_version = map(int, importlib.metadata.version("jaxlib").split(".")[:3])
if tuple(_version) < (0, 11, 1):  # later ones end the process: unknown flag
  FLAGS += ("--xla_cpu_use_fusion_emitters=false",)
