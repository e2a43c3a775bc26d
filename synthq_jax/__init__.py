"""Private query logs into retrieval systems that can be shared.

The packages are imported one by one (`from synthq_jax import optim`), so that
`import synthq_jax` costs nothing and loads no TensorFlow, Flax or gin.
"""

__version__ = "0.1.0"
