"""Turns private query logs into retrieval systems that can be shared.

Import the packages one by one (`from synthq_jax import optim`): `import synthq_jax`
itself loads no TensorFlow, Flax or gin.
"""

__version__ = "0.1.0"
