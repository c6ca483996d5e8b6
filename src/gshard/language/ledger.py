"""Lists how gshard treats the parameters of JAX primitives that it has rules for or opens, and finds unknown ones.

All other primitives run with their parameters on whole arrays, or are opened by the function that lowers them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gshard.core.errors import TraceError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_context import AbstractToken, is_unspecified, settings_of
from gshard.core.planning_tables import tabulated
from gshard.core.program import Dropped
from gshard.language.traits import traits_of

# The rows of the ledger: primitives of JAX 0.10 to 0.12, their parameters, contexts and effects.

KEPT, IRRELEVANT, REPORTED, REFUSED, OPTIONS = "KEPT", "IRRELEVANT", "REPORTED", "REFUSED", "OPTIONS"

# gshard binds these primitives on every device with the parameters of the equation, with the sizes of one device's
# part. A sharding (``sharding``, ``out_sharding``) becomes a mark on the result. Continuation lines are indented.
BOUND = """
dynamic_update_slice optimization_barrier:
broadcast_in_dim cholesky cholesky_update cumprod householder_product lu_pivots_to_permutation ormqr reduce_and
    reduce_max reduce_min reduce_or reduce_window_max reduce_window_min reduce_window_sum reduce_xor rev
    select_and_gather_add select_and_scatter_add slice symmetric_product transpose tridiagonal_solve: out_dtype
convert_element_type: new_dtype sharding weak_type
bitcast_convert_type: new_dtype
broadcast_in_dim: broadcast_dimensions shape sharding
iota_2x32_shape random_split: shape
iota: dimension dtype shape sharding
empty: dtype out_sharding shape
reshape: dimensions new_sizes sharding
squeeze rev: dimensions
transpose: permutation
pad: padding_config
slice: limit_indices start_indices strides
dynamic_slice: slice_sizes
concatenate: dimension
split: axis sizes
stack unstack: axis
tile: reps
gather: dimension_numbers fill_value indices_are_sorted mode slice_sizes unique_indices
scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub: dimension_numbers indices_are_sorted mode
    unique_indices update_consts update_jaxpr
dot_general: dimension_numbers out_sharding precision preferred_element_type
ragged_dot_general: group_offset out_sharding precision preferred_element_type ragged_dot_dimension_numbers
conv_general_dilated: batch_group_count dimension_numbers feature_group_count lhs_dilation out_sharding padding
    precision preferred_element_type rhs_dilation window_strides
reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor: axes out_sharding
argmax argmin: axes index_dtype
reduce: computation dimensions jaxpr
cumsum cumprod cummax cummin cumlogsumexp: axis reverse
reduce_window: base_dilation consts jaxpr padding window_dilation window_dimensions window_strides
reduce_window_max reduce_window_min reduce_window_sum: base_dilation padding window_dilation window_dimensions
    window_strides
select_and_gather_add: base_dilation padding select_prim window_dilation window_dimensions window_strides
select_and_scatter_add: padding select_prim window_dimensions window_strides
sort: dimension is_stable num_keys
top_k: axis is_stable k operand
approx_top_k: aggregate_to_topk is_max_k k recall_target reduction_dimension reduction_input_size_override
fft: fft_lengths fft_type
cholesky: symmetrize_input
cholesky_update geqrf hessenberg householder_product lu:
eig: compute_left_eigenvectors compute_right_eigenvectors implementation
eigh: algorithm lower sort_eigenvalues subset_by_index
geqp3: use_magma
lu_pivots_to_permutation: permutation_size
ormqr: left transpose
qr: full_matrices pivoting use_magma
schur: compute_schur_vectors select_callable sort_eig_vals
svd: algorithm compute_uv full_matrices subset_by_index
symmetric_product: alpha beta symmetrize_output
triangular_solve: conjugate_a left_side lower transpose_a unit_diagonal
tridiagonal: lower
tridiagonal_solve: perturb_singular
random_seed random_wrap: impl
random_fold_in random_unwrap:
random_gamma: log_space
rng_bit_generator: algorithm dtype out_sharding shape
custom_partitioning: call decode_shardings in_tree infer_sharding_from_operands out_tree partition
    propagate_user_sharding sharding_rule static_args
pallas_call: backend compiler_params cost_estimate debug grid_mapping input_output_aliases interpret jaxpr mesh metadata
    name name_stack out_avals
debug_callback: callback effect partitioned
debug_print: fmt has_placeholders in_tree logging_record np_printoptions ordered partitioned static_args
platform_index: platforms
layout_constraint: layout
device_put: copy_semantics devices srcs
xla_metadata_value: xla_metadata_kvs
"""

# The parameters of elementwise operators, all kept: none of them holds a shape.
ELEMENTWISE = "accuracy dtype exponent_bits input_dtype mantissa_bits name out_dtype rounding_method unroll y"

_DERIVED = "The derivative has been taken when gshard sees the program."
_BATCHED = "Vmap has been applied when gshard sees the program."
_OPENED = "All calls are opened."
_ONE_LINE = "The program keeps named scopes, and each equation its line."

# Primitives that gshard opens, or runs on shards in another way: names, parameters, treatment, reason, hint.
LOST: tuple[tuple[str, ...], ...] = (
    ("jit pjit", "jaxpr in_shardings out_shardings", KEPT, ""),
    ("jit pjit", "name", IRRELEVANT, _ONE_LINE),
    ("jit pjit", "inline", IRRELEVANT, _OPENED),
    ("jit pjit", "keep_unused", IRRELEVANT, "An unused operand is no argument of an opened call."),
    ("jit pjit", "donated_invars", IRRELEVANT, "A jit inside of another donates nothing, under jax.jit too."),
    ("jit pjit", "ctx_mesh", IRRELEVANT, "Each sharding names its mesh."),
    ("jit pjit", "in_layouts out_layouts", KEPT, "tracing.builder refuses all but the default."),
    (
        "jit pjit",
        "compiler_options_kvs",
        REFUSED,
        "XLA compiles the whole program with one set of options.",
        "Give compiler_options to gshard.jit. jax.jit refuses them inside of another jit too.",
    ),
    ("core_call call closed_call eval_jaxpr", "jaxpr call_jaxpr", KEPT, ""),
    ("core_call call closed_call eval_jaxpr", "backend ctx inline_jax_late name", IRRELEVANT, _OPENED),
    ("gshard_call", "jaxpr", KEPT, ""),
    ("gshard_call", "over", IRRELEVANT, "The outer gshard.jit has a mesh."),
    ("gshard_call", "target", OPTIONS, "The outer gshard.jit partitions the whole program, with its own options."),
    ("remat remat2 checkpoint", "jaxpr prevent_cse differentiated", KEPT, ""),
    ("remat remat2 checkpoint", "policy", IRRELEVANT, _DERIVED),
    ("remat_opt", "fwd_jaxpr fun_jaxpr_thunk num_consts num_res", KEPT, ""),
    ("custom_jvp_call custom_vjp_call custom_jvp_call_jaxpr", "call_jaxpr fun_jaxpr", KEPT, ""),
    (
        "custom_jvp_call custom_vjp_call custom_jvp_call_jaxpr",
        "jvp_jaxpr_fun jvp_jaxpr_thunk bwd fwd_jaxpr_thunk num_consts out_trees symbolic_zeros",
        IRRELEVANT,
        _DERIVED,
    ),
    ("custom_lin", "bwd in_zeros num_res out_avals symbolic_zeros", IRRELEVANT, _DERIVED),
    (
        "call_exported",
        "exported",
        REFUSED,
        "Its program has a region for all devices: a shard_map, or a function that gshard partitioned.",
        "Call the function that was exported, or call the exported one outside of gshard.jit.",
    ),
    ("custom_vmap_call", "call", KEPT, ""),
    ("custom_vmap_call", "in_tree out_tree rule", IRRELEVANT, _BATCHED),
    ("linear_call", "callee", KEPT, ""),
    ("linear_call", "num_callee_consts num_res transpose transpose_thunk", IRRELEVANT, _DERIVED),
    ("custom_linear_solve", "const_lengths jaxprs", KEPT, ""),
    ("call_hi_primitive", "_prim", KEPT, ""),
    ("call_hi_primitive_linearized", "_prim has_sres nz_in_flat nz_out_flat residuals_tree", KEPT, ""),
    ("composite", "jaxpr call_jaxpr", KEPT, ""),
    ("composite", "name attributes", REPORTED, "It is compiled as the equations that it is made of."),
    ("composite", "version", IRRELEVANT, "It is about the name, which is reported."),
    ("compute_on", "jaxpr compute_type out_memory_spaces", KEPT, ""),
    ("compute_on", "compiler_options_json", REPORTED, "Each equation is annotated with the compute type alone."),
    ("xla_metadata_call", "jaxpr xla_metadata *", KEPT, ""),
    ("xla_metadata_call", "ad_metadata", IRRELEVANT, _DERIVED),
    ("scan", "jaxpr length num_carry num_consts reverse unroll ft_in ft_out", KEPT, ""),
    ("scan", "linear _split_transpose", IRRELEVANT, _DERIVED),
    ("while", "body_jaxpr body_nconsts cond_jaxpr cond_nconsts", KEPT, ""),
    ("cond", "branches branches_platforms", KEPT, ""),
    ("shard_map", "in_specs out_specs mesh jaxpr manual_axes newly_manual_axes", KEPT, ""),
    ("shard_map", "check_vma", IRRELEVANT, "JAX has checked the types of the region when gshard sees it."),
    ("sharding_constraint", "sharding", KEPT, ""),
    ("sharding_constraint", "unconstrained_dims context_mesh", IRRELEVANT, "The sharding says both."),
    ("sharding_constraint", "layout", REPORTED, "XLA chooses the order in memory."),
    ("reshard", "dst_sharding", KEPT, ""),
    ("reshard", "concrete_mesh", IRRELEVANT, "The sharding names the axes."),
    ("pure_callback io_callback", "callback ordered result_avals vmap_method", KEPT, ""),
    ("pure_callback io_callback", "sharding", KEPT, "The device that it names calls."),
)

# The settings in an equation's context.
SETTINGS: dict[str, tuple[str, str]] = {
    "compute_type": (KEPT, ""),
    "xla_metadata": (KEPT, ""),
    "threefry_partitionable": (KEPT, ""),
    "cur_abstract_mesh": (IRRELEVANT, "Each sharding names its mesh."),
    "remove_size_one_mesh_axis": (IRRELEVANT, "Axes of size one split nothing."),
    "no_collectives": (IRRELEVANT, "JAX has checked it when gshard sees the program."),
    "cur_layout_mode": (REPORTED, "XLA chooses the order in memory."),
    "configs": (IRRELEVANT, "JAX does not set it."),
}

# Effects that equations may have: effects of callbacks, references, collectives inside of shard_map, and kernels.
# gshard never merges or removes equations with effects, and never opens them through the function that JAX lowers them
# by.
EFFECTS = frozenset(
    """
    AccumEffect BufferCallbackEffect CommsEffect DebugEffect DelayEffect ErrorEffect FfiEffect GenericEffect IOEffect
    InternalMutableArrayEffect NamedAxisEffect NoDCEEffect OrderedDebugEffect OrderedIOEffect ReadEffect RefEffect
    SemaphoreEffect ShapeAssertionEffect SingleSideCollectiveEffect WriteEffect
    """.split()
)


# Parameters that state the sharding of a result. Tracing converts them to marks (``tracing.builder``).
RESULT_SHARDINGS = frozenset(("sharding", "out_sharding"))

_UNREAD = "This version of gshard does not read it."
_SHOWN = 80  # shown characters of a value


def says_something(value: Any) -> bool:
    """Whether the value of a parameter differs from the value without user input.

    >>> says_something((None, False)), says_something(0), says_something("fast")
    (False, True, True)
    """
    if isinstance(value, (tuple, list)):
        return any(map(says_something, value))
    if isinstance(value, Mapping):
        return bool(value)
    return value is not None and value is not False and not is_unspecified(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The treatment of a parameter."""

    way: str  # KEPT, IRRELEVANT, REPORTED, OPTIONS or REFUSED
    why: str = ""  # the reason, or a sentence that states what gshard does instead
    hint: str = ""  # the way out for the user, if the parameter is refused
    loses: Callable[[Any], bool] = says_something  # returns whether a value of the parameter is lost


def rows_of_text(text: str, row: Row) -> Iterator[tuple[str, dict[str, Row]]]:
    """The rows of a text with lines ``primitives: parameters``. An indented line continues the line before."""
    for line in filter(None, text.replace("\n ", " ").splitlines()):
        names, _, parameters = line.partition(":")
        for name in names.split():
            yield name, dict.fromkeys(parameters.split(), row)


_LOSES = {"exported": lambda exported: b"manual_computation" in exported.mlir_module_serialized}


def _ledger() -> dict[str, dict[str, Row]]:
    ledger: dict[str, dict[str, Row]] = {}
    for name, rows in rows_of_text(BOUND, Row(KEPT)):
        ledger.setdefault(name, {}).update(rows)
    for names, parameters, way, why, *hint in LOST:
        for name in names.split():
            row = Row(way, why, "".join(hint), _LOSES.get(parameters, says_something))
            ledger.setdefault(name, {}).update(dict.fromkeys(parameters.split(), row))
    return ledger


LEDGER: Mapping[str, Mapping[str, Row]] = _ledger()
_OF_ELEMENTWISE = dict.fromkeys(ELEMENTWISE.split(), Row(KEPT))
_ANY = "*"  # stands for all other parameters of a primitive


def row_of(primitive: str, parameter: str) -> Row | None:
    """The row of a parameter; None if it is not classified.

    >>> row_of("jit", "inline").way, row_of("composite", "name").way, row_of("jit", "new_in_jax_9")
    ('IRRELEVANT', 'REPORTED', None)
    """
    rows = rows_of(primitive) or {}
    return rows.get(parameter, rows.get(_ANY))


def rows_of(primitive: str) -> Mapping[str, Row] | None:
    """The rows of a primitive; None if it has none. Elementwise operators share theirs."""
    shared = _OF_ELEMENTWISE if traits_of(primitive).elementwise else None
    return LEDGER.get(primitive, shared)


def dropped(eqn: Any, source: Any) -> Iterator[Dropped]:
    """The parameters, settings and effects of an equation that gshard does not keep."""
    name = eqn.primitive.name
    params = eqn.params
    for parameter, row in _may_be_lost(name, tuple(params)):
        value = params[parameter]
        if not row.loses(value):
            continue
        if row.way == OPTIONS:
            for option, setting in value.options.items():
                text = getattr(setting, "name", None) or _text(setting)
                yield Dropped(f"{option} of an inner gshard.jit", text, user_line(source), row.why, (option, setting))
            continue
        if row.way == REFUSED:
            what = f"{parameter} of '{name}' cannot be kept: {row.why}"
            raise TraceError(what, user_line(source), f"it is {_text(value)}", row.hint)
        yield Dropped(f"{parameter} of {name}", _text(value), user_line(source), row.why)
    for setting in settings_of(eqn.ctx):
        way, why = SETTINGS.get(setting.name, (REPORTED, _UNREAD))
        if way == REPORTED:
            yield Dropped(f"{setting.name} around {name}", _text(setting.value), user_line(source), why)
    for effect in eqn.effects:
        if type(effect).__name__ not in EFFECTS and type(effect).__module__.startswith("jax"):
            yield Dropped(f"an effect of {name}", _text(effect), user_line(source), _UNREAD)


def check_arrays(eqn: Any, source: Any) -> None:
    """Checks that all results of an equation are arrays."""
    if eqn.primitive.name == "inspect_sharding":
        hint = "Remove the call: gshard.explain(f, ...) shows the sharding of each array, and why it has it."
        raise TraceError("jax.debug.inspect_array_sharding cannot see the plan.", user_line(source), hint=hint)
    no_array = next((v.aval for v in eqn.outvars if not hasattr(v.aval, "shape")), None)
    if isinstance(no_array, AbstractToken):
        hint = "Leave tokens out: jax.debug.callback(..., ordered=True) keeps callbacks in their order."
        raise TraceError(f"{eqn.primitive.name} makes a token, which is no array.", user_line(source), hint=hint)
    if no_array is not None:
        what = f"{eqn.primitive.name} makes a value of the type {no_array}, which is no array."
        raise TraceError(what, user_line(source), hint="Pass the arrays that it is made of.")


@tabulated(4096)
def _may_be_lost(name: str, parameters: tuple[str, ...]) -> tuple[tuple[str, Row], ...]:
    """The parameters of a primitive that may be lost; none for primitives without rows."""
    if rows_of(name) is None:
        return ()
    rows = ((p, row_of(name, p) or Row(REPORTED, _UNREAD)) for p in parameters)
    return tuple((p, row) for p, row in rows if row.way in (REPORTED, REFUSED, OPTIONS))


def _text(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
