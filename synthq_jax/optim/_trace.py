"""Runs the trace of a loss and finds where it uses its parameters.

The loss of one example is a jaxpr. `Walk` evaluates it equation by equation
and follows each parameter through casts, reshapes, transposes, scalings, inner
functions, rematerialised parts and the bodies of scans. Where a parameter meets
data in a matrix product or a lookup, the walk adds a perturbation to the result
and records the other operand: the cotangent of the perturbation and the record
together are the parameter's gradient, kept apart as two small factors. Every
other use is reported as odd.

A parameter that is used once can instead be given a token: a scalar that is
added to nothing, and whose cotangent is the squared norm of the gradient. The
backward pass then makes the norm where it makes the factors, and keeps neither.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from synthq_jax.optim import _rules, _sites, _views

__all__ = ["Walk"]

_CALLS = frozenset(["jit", "pjit", "closed_call", "core_call"])
_REMAT = frozenset(["checkpoint", "remat", "remat2"])
_RESHAPES = frozenset(["reshape", "squeeze", "expand_dims", "broadcast_in_dim"])
_SAME = frozenset(["copy", "copy_p", "sharding_constraint", "name"])


@dataclasses.dataclass(frozen=True)
class _Tracked:
  """A value of the walk that is a view of one parameter."""

  view: _views.View
  value: jax.Array


class Walk:
  """One evaluation of a traced loss.

  Attributes:
    sites: the uses found so far, in order, but for those with the token.
    records: the other operand at each site: [groups, position, rows] of a
      product; of a lookup the ids [position], -1 where out of bounds.
    odd: for each parameter used in any other way, the first such primitive.
  """

  def __init__(
    self,
    perturbations: Sequence[jax.Array] | None = None,
    *,
    token: jax.Array | None = None,
    tokened: frozenset[int] = frozenset(),
  ):
    """Starts a walk.

    Args:
      perturbations: one for each site; None: the walk only finds the sites.
      token: float32 scalar.
      tokened: parameters that use it, each at no more than one site.
    """
    self.sites: list[_sites.Site] = []
    self.records: list[jax.Array] = []
    self.odd: dict[int, str] = {}
    self._perturbations = perturbations
    self._token = token
    self._tokened = tokened

  def run(
    self,
    closed: Any,
    arguments: Sequence[jax.Array],
    followed: Sequence[int],
  ) -> list[jax.Array]:
    """Evaluates a closed jaxpr.

    Args:
      closed: the traced function.
      arguments: its arguments, flat.
      followed: positions of the parameters to follow among the arguments.

    Returns:
      The outputs, flat.
    """
    views = {i: _views.whole(i, arguments[i].shape) for i in followed}
    return self._run(closed.jaxpr, closed.consts, arguments, views)

  def _run(
    self,
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[jax.Array],
    views: Mapping[int, _views.View],
  ) -> list[jax.Array]:
    """Evaluates a jaxpr some of whose arguments are views of parameters."""
    values = [
      _Tracked(views[index], value) if index in views else value
      for index, value in enumerate(arguments)
    ]
    outputs = self._evaluate(jaxpr, consts, values)
    return [self._plain(value, "output") for value in outputs]

  def _evaluate(
    self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]
  ) -> list[Any]:
    environment: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
      return atom.val if isinstance(atom, core.Literal) else environment[atom]

    environment.update(zip(jaxpr.constvars, consts, strict=True))
    environment.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
      outputs = self._step(equation, [read(atom) for atom in equation.invars])
      environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def _step(self, equation: Any, values: list[Any]) -> list[Any]:
    """Evaluates one equation."""
    tracked = [i for i, v in enumerate(values) if isinstance(v, _Tracked)]
    if not tracked:
      return _bind(equation, values)
    name = equation.primitive.name
    if name in _CALLS:
      return self._inline(equation, values)
    if name in _REMAT:
      return self._remat(equation, values)
    if name == "scan":
      return self._scan(equation, values)
    if len(tracked) == 1:
      (position,) = tracked
      view = _view_after(equation, values, position)
      if view is not None:
        return [_Tracked(view, _bind(equation, _arrays(values))[0])]
      arrays = _arrays(values)
      site = _sites.find(equation, values[position].view, arrays, position)
      if site is not None:
        return [self._use(equation, arrays, position, *site)]
    return _bind(equation, [self._plain(value, name) for value in values])

  def _inline(self, equation: Any, values: list[Any]) -> list[Any]:
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if isinstance(inner, core.ClosedJaxpr):
      return self._evaluate(inner.jaxpr, inner.consts, values)
    return self._evaluate(inner, (), values)

  def _plain(self, value: Any, name: str) -> Any:
    """Returns a value; one that is a parameter was used in an odd way."""
    if not isinstance(value, _Tracked):
      return value
    self.odd.setdefault(value.view.leaf, name)
    return value.value

  def _use(
    self,
    equation: Any,
    values: list[jax.Array],
    position: int,
    site: _sites.Dense | _sites.Lookup,
    record: _sites.Record,
  ) -> jax.Array:
    """Records one use of a parameter and perturbs its result."""
    if site.leaf in self._tokened:
      if self._token is None:
        return _bind(equation, values)[0]
      return _use_token(equation, values, position, site, record, self._token)
    self.sites.append(site)
    output = _bind(equation, values)[0]
    if self._perturbations is None:
      return output
    self.records.append(record(values[1 - position]))
    return output + self._perturbations[len(self.sites) - 1]

  # Parts with a body of their own. Inside, a parameter goes by its position
  # among the operands, because one parameter may be several of them.

  def _remat(self, equation: Any, values: list[Any]) -> list[Any]:
    """Walks a rematerialised part and rematerialises the walk."""
    jaxpr, arrays = equation.params["jaxpr"], _arrays(values)
    views = {i: value.view for i, value in _tracked(values)}
    local = {i: dataclasses.replace(v, leaf=i) for i, v in views.items()}
    tokened = frozenset(i for i, v in views.items() if v.leaf in self._tokened)
    found = self._find(jaxpr, (), arrays, local, tokened)
    self._note_odd(found, views)
    first = len(self.sites)
    self.sites += [
      dataclasses.replace(site, leaf=views[site.leaf].leaf)
      for site in found.sites
    ]
    if self._perturbations is None:
      return _bind(equation, arrays)

    def body(
      arrays: list[jax.Array], zeros: list[jax.Array], token: jax.Array | None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
      walk = Walk(zeros, token=token, tokened=tokened)
      return walk._run(jaxpr, (), arrays, local), walk.records

    remat = jax.checkpoint(
      body,
      prevent_cse=equation.params["prevent_cse"],
      policy=equation.params["policy"],
    )
    zeros = list(self._perturbations[first : len(self.sites)])
    outputs, records = remat(arrays, zeros, self._token)
    self.records += records
    return outputs

  def _scan(self, equation: Any, values: list[Any]) -> list[Any]:
    """Walks the body of a scan, with perturbations for each iteration."""
    inner, params = equation.params["jaxpr"], equation.params
    consts, carries = params["num_consts"], params["num_carry"]
    first_x = consts + carries
    values = [
      self._plain(value, "the carry of a scan")
      if consts <= i < first_x
      else value
      for i, value in enumerate(values)
    ]
    arrays = _arrays(values)
    views = {i: value.view for i, value in _tracked(values)}
    local = {
      i: dataclasses.replace(v, leaf=i, axes=v.axes[int(i >= first_x) :])
      for i, v in views.items()
    }
    tokened = frozenset(i for i, v in views.items() if v.leaf in self._tokened)
    slices = [jax.eval_shape(lambda x: x[0], x) for x in arrays[first_x:]]
    examples = [*arrays[:first_x], *slices]
    found = self._find(inner.jaxpr, inner.consts, examples, local, tokened)
    self._note_odd(found, views)
    first = len(self.sites)
    lifted = [
      _sites.Repeated(
        leaf=views[site.leaf].leaf,
        site=site,
        length=params["length"],
        own=views[site.leaf].axes[0] if site.leaf >= first_x else None,
      )
      for site in found.sites
    ]
    self.sites += lifted
    if self._perturbations is None:
      return _bind(equation, arrays)

    def body(carry: list[jax.Array], each: Any) -> tuple[Any, Any]:
      xs, zeros = each
      walk = Walk(zeros, token=self._token, tokened=tokened)
      inputs = [*arrays[:consts], *carry, *xs]
      outputs = walk._run(inner.jaxpr, inner.consts, inputs, local)
      return outputs[:carries], (outputs[carries:], walk.records)

    zeros = list(self._perturbations[first : len(self.sites)])
    carry, (ys, records) = jax.lax.scan(
      body,
      arrays[consts:first_x],
      (arrays[first_x:], zeros),
      length=params["length"],
      reverse=params["reverse"],
      unroll=params["unroll"],
    )
    pairs = zip(lifted, records, strict=True)
    self.records += [site.join(record) for site, record in pairs]
    return [*carry, *ys]

  def _find(
    self,
    jaxpr: Any,
    consts: Sequence[Any],
    examples: Sequence[Any],
    views: Mapping[int, _views.View],
    tokened: frozenset[int],
  ) -> "Walk":
    """Finds the sites of a body."""
    walk = Walk(tokened=tokened)
    jax.eval_shape(
      lambda *values: walk._run(jaxpr, consts, values, views), *examples
    )
    return walk

  def _note_odd(self, found: "Walk", views: Mapping[int, _views.View]) -> None:
    for index, name in found.odd.items():
      self.odd.setdefault(views[index].leaf, name)


def _arrays(values: Sequence[Any]) -> list[jax.Array]:
  return [v.value if isinstance(v, _Tracked) else v for v in values]


def _tracked(values: Sequence[Any]) -> list[tuple[int, _Tracked]]:
  return [(i, v) for i, v in enumerate(values) if isinstance(v, _Tracked)]


def _use_token(
  equation: Any,
  values: list[jax.Array],
  position: int,
  site: _sites.Dense | _sites.Lookup,
  record: _sites.Record,
  token: jax.Array,
) -> jax.Array:
  """Evaluates a use; the token's cotangent is its squared gradient norm."""

  def product(parameter: jax.Array, other: jax.Array) -> jax.Array:
    pair = (parameter, other) if position == 0 else (other, parameter)
    return _bind(equation, pair)[0]

  @jax.custom_vjp
  def use(parameter: jax.Array, other: jax.Array, token: jax.Array) -> Any:
    del token
    return product(parameter, other)

  def forward(
    parameter: jax.Array, other: jax.Array, token: jax.Array
  ) -> tuple[jax.Array, Any]:
    return use(parameter, other, token), (parameter, other)

  def backward(saved: Any, cotangent: jax.Array) -> tuple[Any, Any, jax.Array]:
    parameter, other = saved
    left, right = record(other)[None], site.columns(cotangent)[None]
    kind = _rules.Rows if site.is_lookup else _rules.Outer
    (squared,) = _rules.squared_norm(kind(left, right))
    if site.is_lookup:
      return None, None, squared
    _, pull = jax.vjp(lambda x: product(parameter, x), other)
    return None, *pull(cotangent), squared

  use.defvjp(forward, backward)
  return use(values[position], values[1 - position], token)


def _bind(equation: Any, values: Sequence[Any]) -> list[Any]:
  """Evaluates an equation whose inputs are all plain arrays."""
  parameters = equation.primitive.get_bind_params(equation.params)
  functions = ()
  if isinstance(parameters, tuple):  # JAX before 0.10
    functions, parameters = parameters
  result = equation.primitive.bind(*functions, *values, **parameters)
  return list(result) if equation.primitive.multiple_results else [result]


def _view_after(
  equation: Any, values: list[Any], position: int
) -> _views.View | None:
  """Returns the view that an equation makes of a view, None if it is none."""
  name, view = equation.primitive.name, values[position].view
  output = equation.outvars[0].aval
  if name in _SAME:
    return view
  if name == "convert_element_type":
    return view if jnp.issubdtype(output.dtype, jnp.floating) else None
  if name == "transpose":
    return view.transpose(equation.params["permutation"])
  if name in _RESHAPES:
    same_size = output.size == values[position].value.size
    reordered = equation.params.get("dimensions") and name == "reshape"
    return view.reshape(output.shape) if same_size and not reordered else None
  if name == "neg":
    return view.scaled(-1.0)
  if name == "mul" or (name == "div" and position == 0):
    factor = equation.invars[1 - position]
    if isinstance(factor, core.Literal) and jnp.ndim(factor.val) == 0:
      number = float(factor.val)
      return view.scaled(number if name == "mul" else 1.0 / number)
  return None
