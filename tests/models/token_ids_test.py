import pytest

from synthq_jax.models import token_ids


@pytest.mark.parametrize(
  "name, value", [("eos", 0), ("pad", -1), ("unk", None), ("eos", True)]
)
def test_what_is_no_id_is_refused(name, value):
  with pytest.raises(ValueError, match=f"TokenIds.{name} must .* {name}="):
    token_ids.TokenIds(**{name: value})
