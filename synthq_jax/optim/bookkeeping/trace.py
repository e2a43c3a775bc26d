"""Evaluates the trace of a loss and finds where it uses its parameters.

The loss of one example is a jaxpr. `ParameterTracer` evaluates it equation by
equation and follows each parameter through casts, reshapes, transposes,
scalings, inner functions, rematerialised parts and the bodies of scans.
Concatenated parameters are multiplied one by one. Where a parameter meets data
in a matrix product or a lookup, the tracer adds a perturbation to the result
and records the other operand. The cotangent of the perturbation and the record
are the two small factors of the parameter's gradient. Every other use is
reported as odd.

A parameter that is used once can get a probe instead. Its use takes a token and
a float32 sink of the parameter's shape. The token's cotangent is the squared
norm of the gradient, the sink's is the gradient's weighted sum over examples.
The cotangent of one more result, the weight, selects the norm or the sum and
weights the sum. So the backward pass computes either where it has the factors,
keeps none of them, and runs the same program for the norm as for the sum.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from synthq_jax.optim.bookkeeping import devices, jaxprs, rules, use_sites

__all__ = ["NORMS", "NormProbe", "ParameterTracer"]

_CALLS = frozenset(["jit", "pjit", "closed_call", "core_call"])
_REMAT = frozenset(["checkpoint", "remat", "remat2"])
_RESHAPES = frozenset(["reshape", "squeeze", "expand_dims", "broadcast_in_dim"])
_SAME = frozenset(["copy", "copy_p", "sharding_constraint", "name"])
_UNMOVED = _SAME | {"convert_element_type", "mul", "div", "neg"}
"""Primitives of views that leave every entry at its position."""


NORMS = -1.0
"""Weight that makes a probe compute norms; other weights make it compute sums."""


@dataclasses.dataclass(frozen=True)
class NormProbe:
  """Inputs of the probes of parameters that are used once.

  Attributes:
    token: float32 scalar.
    sinks: for each parameter with a probe, float32 zeros in its shape.
  """

  token: jax.Array
  sinks: Mapping[int, jax.Array | None]


jax.tree_util.register_dataclass(NormProbe, ["token", "sinks"], [])


@dataclasses.dataclass(frozen=True)
class _Tracked:
  """A value that is a view of one parameter, with the same view of its sink."""

  view: use_sites.View
  value: jax.Array
  sink: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class _Joined:
  """Views of several parameters, concatenated along an axis."""

  parts: tuple[_Tracked, ...]
  axis: int
  value: jax.Array


class ParameterTracer:
  """Evaluates a traced loss once and records the uses of its parameters.

  Attributes:
    sites: uses so far, in order, without those that have a probe.
    records: the other operand at each site: [groups, position, rows] of a
      product; of a lookup the ids [position], -1 if out of bounds.
    weight: zero; its cotangent is the weight that all probes get.
    odd: for each parameter used in any other way, the first such primitive.
    joins: whether parameters are concatenated before their use.
    recomputed: parameters that are used in rematerialised parts.
  """

  def __init__(
    self,
    perturbations: Sequence[jax.Array] | None = None,
    *,
    probe: NormProbe | None = None,
    probed: frozenset[int] = frozenset(),
  ):
    """Prepares one evaluation.

    Args:
      perturbations: one for each site; None: the tracer only finds the sites.
      probe: inputs of the probes; None if the tracer only finds the sites.
      probed: parameters whose only use gets a probe.
    """
    self.sites: list[use_sites.Site] = []
    self.records: list[jax.Array] = []
    self.weight = jnp.zeros((), jnp.float32)
    self.odd: dict[int, str] = {}
    self.joins = False
    self.recomputed: set[int] = set()
    self._perturbations = perturbations
    self._probe = probe
    self._probed = probed

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
    views = {i: use_sites.make_view(i, arguments[i].shape) for i in followed}
    return self._run(closed.jaxpr, closed.consts, arguments, views)

  def _run(
    self,
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[jax.Array],
    views: Mapping[int, use_sites.View],
  ) -> list[jax.Array]:
    """Evaluates a jaxpr some of whose arguments are views of parameters."""
    sinks = {} if self._probe is None else self._probe.sinks
    values = [
      _Tracked(views[index], value, sinks.get(index))
      if index in views
      else value
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
    name = equation.primitive.name
    if name in _CALLS:
      tracked = any(isinstance(v, (_Tracked, _Joined)) for v in values)
      return (self._inline if tracked else _bind)(equation, values)
    if any(isinstance(value, _Joined) for value in values):
      return self._step_joined(equation, values)
    tracked = [i for i, v in enumerate(values) if isinstance(v, _Tracked)]
    if not tracked:
      return _bind(equation, values)
    if name in _REMAT:
      return self._remat(equation, values)
    if name == "scan":
      return self._scan(equation, values)
    if name == "concatenate" and len(tracked) == len(values) > 1:
      (value,) = _bind(equation, _get_arrays(values))
      self.joins = True
      return [_Joined(tuple(values), equation.params["dimension"], value)]
    if len(tracked) == 1:
      (position,) = tracked
      view = _derive_view(equation, values, position)
      if view is not None:
        return [_apply_view(equation, values, position, view)]
      arrays = _get_arrays(values)
      site = use_sites.find(equation, values[position].view, arrays, position)
      if site is not None:
        sink = values[position].sink
        return [self._use(equation, arrays, position, sink, *site)]
    return _bind(equation, [self._plain(value, name) for value in values])

  def _step_joined(self, equation: Any, values: list[Any]) -> list[Any]:
    """Evaluates an equation with joined parameters: a product part by part."""
    name = equation.primitive.name
    (position, *others) = [
      i for i, v in enumerate(values) if isinstance(v, _Joined)
    ]
    joined = values[position]
    if name == "convert_element_type":
      parts = [self._step(equation, [part])[0] for part in joined.parts]
      if all(isinstance(part, _Tracked) for part in parts):
        (value,) = _bind(equation, [joined.value])
        return [_Joined(tuple(parts), joined.axis, value)]
    axis = None
    if name == "dot_general" and not others:
      axis = _get_output_axis(equation, values, position)
    if axis is None:
      return self._step(
        equation,
        [self._plain(v, name) if isinstance(v, _Joined) else v for v in values],
      )
    first, outputs = len(self.records), []
    for part in joined.parts:
      operands = list(values)
      operands[position] = part
      small = jax.make_jaxpr(lambda *v: _bind(equation, v)[0])(
        *_get_arrays(operands)
      )
      outputs += self._step(small.jaxpr.eqns[0], operands)
    if len(self.records) == first + len(outputs):  # all of the same operand
      self.records[first:] = [self.records[first]] * len(outputs)
    return [jnp.concatenate(outputs, axis)]

  def _inline(self, equation: Any, values: list[Any]) -> list[Any]:
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if isinstance(inner, core.ClosedJaxpr):
      return self._evaluate(inner.jaxpr, inner.consts, values)
    return self._evaluate(inner, (), values)

  def _plain(self, value: Any, name: str) -> Any:
    """Returns the value; if it is a parameter, notes its use as odd."""
    if isinstance(value, _Joined):
      for part in value.parts:
        self._plain(part, name)
      return value.value
    if not isinstance(value, _Tracked):
      return value
    self.odd.setdefault(value.view.leaf, name)
    return value.value

  def _use(
    self,
    equation: Any,
    values: list[jax.Array],
    position: int,
    sink: jax.Array | None,
    site: use_sites.Dense | use_sites.Lookup,
    record: use_sites.Record,
  ) -> jax.Array:
    """Evaluates a use: with a probe, or with a record and a perturbed result."""
    if site.leaf in self._probed:
      if sink is None:
        return _bind(equation, values)[0]
      assert self._probe is not None  # or nothing is metered
      view = dataclasses.replace(
        use_sites.make_view(0, sink.shape), scale=site.scale
      )
      output, weight = _use_with_probe(
        equation, values, position, view, sink, self._probe.token
      )
      self.weight += weight
      return output
    self.sites.append(site)
    output = _bind(equation, values)[0]
    if self._perturbations is None:
      return output
    self.records.append(record(values[1 - position]))
    return output + self._perturbations[len(self.sites) - 1]

  # Inside of a body, a parameter is known by its position among the operands,
  # because one parameter may be several of them.

  def _remat(self, equation: Any, values: list[Any]) -> list[Any]:
    """Evaluates a rematerialised part, and rematerialises this evaluation."""
    jaxpr, arrays = equation.params["jaxpr"], _get_arrays(values)
    views = {i: value.view for i, value in _get_tracked(values)}
    local = {i: dataclasses.replace(v, leaf=i) for i, v in views.items()}
    probed = frozenset(i for i, v in views.items() if v.leaf in self._probed)
    inner = self._find_sites(jaxpr, (), arrays, local, probed)
    inner.recomputed |= set(views)
    self._merge_findings(inner, views)
    first = len(self.sites)
    self.sites += [
      dataclasses.replace(site, leaf=views[site.leaf].leaf)
      for site in inner.sites
    ]
    if self._perturbations is None:
      return _bind(equation, arrays)

    def body(
      arrays: list[jax.Array], zeros: list[jax.Array], probe: NormProbe | None
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
      tracer = ParameterTracer(zeros, probe=probe, probed=probed)
      return (
        tracer._run(jaxpr, (), arrays, local),
        tracer.records,
        tracer.weight,
      )

    remat = jax.checkpoint(
      body,
      prevent_cse=equation.params["prevent_cse"],
      policy=equation.params["policy"],
    )
    zeros = list(self._perturbations[first : len(self.sites)])
    outputs, records, weight = remat(
      arrays, zeros, self._get_inner_probe(values, probed)
    )
    self.records += records
    self.weight += weight
    return outputs

  def _scan(self, equation: Any, values: list[Any]) -> list[Any]:
    """Evaluates a scan, with perturbations for each iteration of its body."""
    inner, params = equation.params["jaxpr"], equation.params
    consts, carries = jaxprs.count_scan_inputs(equation)
    first_x = consts + carries
    values = [
      self._plain(value, "the carry of a scan")
      if consts <= i < first_x
      else value
      for i, value in enumerate(values)
    ]
    arrays = _get_arrays(values)
    views = {i: value.view for i, value in _get_tracked(values)}
    local = {
      i: dataclasses.replace(v, leaf=i, axes=v.axes[int(i >= first_x) :])
      for i, v in views.items()
    }
    probed = frozenset(i for i, v in views.items() if v.leaf in self._probed)
    slices = [jax.eval_shape(lambda x: x[0], x) for x in arrays[first_x:]]
    examples = [*arrays[:first_x], *slices]
    body_tracer = self._find_sites(
      inner.jaxpr, inner.consts, examples, local, probed
    )
    self._merge_findings(body_tracer, views)
    first = len(self.sites)
    lifted = [
      use_sites.Repeated(
        leaf=views[site.leaf].leaf,
        site=site,
        length=params["length"],
        own=views[site.leaf].axes[0] if site.leaf >= first_x else None,
      )
      for site in body_tracer.sites
    ]
    self.sites += lifted
    if self._perturbations is None:
      return _bind(equation, arrays)

    probe = self._get_inner_probe(values, probed)
    sinks = {} if probe is None else probe.sinks
    slice_sinks = {i: sink for i, sink in sinks.items() if i >= first_x}
    record_ids: list[int] = []  # position of each record in the distinct ones

    def body(carry: list[jax.Array], each: Any) -> tuple[Any, Any]:
      xs, zeros, slices = each
      own = None
      if probe is not None:
        own = NormProbe(probe.token, {**sinks, **slices})
      tracer = ParameterTracer(zeros, probe=own, probed=probed)
      inputs = [*arrays[:consts], *carry, *xs]
      outputs = tracer._run(inner.jaxpr, inner.consts, inputs, local)
      records = {id(record): record for record in tracer.records}
      record_ids[:] = [list(records).index(id(each)) for each in tracer.records]
      stacked = list(records.values()), tracer.weight
      return outputs[:carries], (outputs[carries:], *stacked)

    zeros = list(self._perturbations[first : len(self.sites)])
    carry, (ys, records, weights) = jax.lax.scan(
      body,
      arrays[consts:first_x],
      (arrays[first_x:], zeros, slice_sinks),
      length=params["length"],
      reverse=params["reverse"],
      unroll=params["unroll"],
    )
    pairs = zip(lifted, record_ids, strict=True)
    self.records += [site.join(records[index]) for site, index in pairs]
    self.weight += jnp.sum(weights)
    return [*carry, *ys]

  def _get_inner_probe(
    self, values: Sequence[Any], probed: frozenset[int]
  ) -> NormProbe | None:
    """Returns the probe inputs of a body whose operands are these values."""
    if self._probe is None:
      return None
    sinks = {i: v.sink for i, v in _get_tracked(values) if i in probed}
    return NormProbe(self._probe.token, sinks)

  def _find_sites(
    self,
    jaxpr: Any,
    consts: Sequence[Any],
    examples: Sequence[Any],
    views: Mapping[int, use_sites.View],
    probed: frozenset[int],
  ) -> "ParameterTracer":
    """Traces a body for its sites alone and returns the tracer."""
    tracer = ParameterTracer(probed=probed)
    jax.eval_shape(
      lambda *values: tracer._run(jaxpr, consts, values, views), *examples
    )
    return tracer

  def _merge_findings(
    self, inner: "ParameterTracer", views: Mapping[int, use_sites.View]
  ) -> None:
    self.joins |= inner.joins
    self.recomputed |= {views[index].leaf for index in inner.recomputed}
    for index, name in inner.odd.items():
      self.odd.setdefault(views[index].leaf, name)


def _get_arrays(values: Sequence[Any]) -> list[jax.Array]:
  return [v.value if isinstance(v, _Tracked) else v for v in values]


def _get_tracked(values: Sequence[Any]) -> list[tuple[int, _Tracked]]:
  return [(i, v) for i, v in enumerate(values) if isinstance(v, _Tracked)]


def _get_output_axis(
  equation: Any, values: Sequence[Any], position: int
) -> int | None:
  """Returns the axis of a product's result along which its parameters are joined.

  None if that axis is contracted, or is a batch axis of both operands.
  """
  contracted, grouped = equation.params["dimension_numbers"]
  axis = values[position].axis
  used = [*contracted[position], *grouped[position]]
  if axis in used:
    return None
  before = len(grouped[0]) + sum(1 for a in range(axis) if a not in used)
  if position == 1:
    before += jnp.ndim(values[0]) - len(contracted[0]) - len(grouped[0])
  return before


def _apply_view(
  equation: Any, values: list[Any], position: int, view: use_sites.View
) -> _Tracked:
  """Evaluates an equation that makes a view, for the parameter and its sink.

  The sink is moved as the parameter is, and neither cast nor scaled: a site has
  its view's scale, for norm and sum alike.
  """
  sink = values[position].sink
  if sink is not None and equation.primitive.name not in _UNMOVED:
    arrays = _get_arrays(values)
    arrays[position] = sink
    (sink,) = _bind(equation, arrays)
  return _Tracked(view, _bind(equation, _get_arrays(values))[0], sink)


def _use_with_probe(
  equation: Any,
  values: list[jax.Array],
  position: int,
  view: use_sites.View,
  sink: jax.Array,
  token: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Runs one operation on a parameter, with a probe of its gradient.

  Also returns a zero through which the backward pass receives the example's
  weight. With the weight `NORMS` the cotangent of the token is the squared norm
  of this use's gradient, and that of the sink is 0. With a clip weight the
  first is 0, and the second the gradient's weighted sum over all mapped
  examples. The view is that of the operand, with the scale of the parameter.
  """
  shape, axes = sink.shape, devices.get_axes(sink)
  described = use_sites.find(equation, view, values, position)
  assert described is not None  # `_use` is called for recognized uses alone
  site, record = described
  kind = rules.Rows if site.is_lookup else rules.Outer

  def product(parameter: jax.Array, other: jax.Array) -> jax.Array:
    pair = (parameter, other) if position == 0 else (other, parameter)
    return _bind(equation, pair)[0]

  def measure(
    left: jax.Array, right: jax.Array, weights: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    use, layout = kind(left, right), site.layout
    groups = math.prod(size for _, size in layout.groups)
    matrices = (groups, layout.num_rows, layout.num_columns)

    def compute_sum() -> jax.Array:
      total = rules.compute_weighted_sum([use], weights, matrices)
      return layout.restore(total, shape).astype(jnp.float32)

    zeros = devices.vary(
      [jnp.zeros(like, jnp.float32) for like in (weights.shape, shape)],
      devices.get_axes(weights),
    )
    return jax.lax.cond(
      weights[0] == NORMS,
      lambda: [rules.compute_squared_norm(use).astype(jnp.float32), zeros[1]],
      lambda: [zeros[0], compute_sum()],
    )

  @jax.custom_vjp
  def use(
    parameter: jax.Array, other: jax.Array, sink: jax.Array, token: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    del sink, token
    zero = jnp.zeros((), jnp.float32)
    return product(parameter, other), devices.vary(zero, axes)

  def forward(*inputs: jax.Array) -> tuple[Any, Any]:
    return use(*inputs), inputs[:2]

  def backward(saved: Any, cotangents: Any) -> tuple[Any, ...]:
    (parameter, other), (cotangent, weight) = saved, cotangents
    squared, summed = rules.reduce(measure, is_summed=(False, True))(
      record(other), site.columns(cotangent), weight
    )
    if site.is_lookup:
      return None, None, summed, squared
    pull = jax.linear_transpose(lambda x: product(parameter, x), other)
    return None, *pull(cotangent), summed, squared

  use.defvjp(forward, backward)
  return use(values[position], values[1 - position], sink, token)


def _bind(equation: Any, values: Sequence[Any]) -> list[Any]:
  """Evaluates an equation on plain arrays."""
  parameters = equation.primitive.get_bind_params(equation.params)
  functions = ()
  if isinstance(parameters, tuple):  # JAX before 0.10
    functions, parameters = parameters
  result = equation.primitive.bind(*functions, *values, **parameters)
  return list(result) if equation.primitive.multiple_results else [result]


def _derive_view(
  equation: Any, values: list[Any], position: int
) -> use_sites.View | None:
  """Returns the view that an equation makes of a view; None if it makes none."""
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
