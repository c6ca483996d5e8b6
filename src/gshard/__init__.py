"""gshard: automatic sharding of JAX programs that explains itself.

Mark a few tensors of a program written for one device, and run it on all of them::

    split, replicate, shard     marks: how a tensor is sharded; shard_by_path: those of a pytree
    name, Layout                names of dimensions, and a table of what they mean: marks for all of a program
    jit                         partition and run on all devices; used like jax.jit
    instead_of_jit              a block in which what jax.jit, nnx.jit, eqx.filter_jit ... would compile is partitioned
    explain                     what each tensor got and why, and what the devices communicate
    search                      the fastest plan found for a machine, with no marks or some, and how near the best
    export                      the partitioned program as a file, which JAX runs without gshard
    prove                       whether a sharded program computes what a plain one does: exactly, without a tolerance

Besides::

    Mesh, Machine               the devices, and what they are
    attention                   dot-product attention, split by batch, heads or sequence (ring attention)
    put_rows, take_rows         rows that move to places of their own, as tokens do to experts (ragged all-to-all)
    kernel                      a fast function (Pallas, cuDNN, ...) that is partitioned as a plain one
    rule                        register a rule of an operator; rules: its parts (RuleMaker, Call, Shards, Rule)
    stages                      what jit does, verb by verb, the classes of what gshard returns, and kinds of errors
    testing                     check a rule; limits and baselines of what a jitted function sends, for your tests
    GShardError                 the base of all errors raised on purpose
"""

import importlib as _importlib
import sys as _sys
import types as _types
import typing as _typing

if _typing.TYPE_CHECKING:
    from gshard import rules as rules
    from gshard import stages as stages
    from gshard import testing as testing
    from gshard.api.attention_function import attention as attention
    from gshard.api.configure import configure as configure
    from gshard.api.explained import explain as explain
    from gshard.api.export import export as export
    from gshard.api.instead_of_jit import instead_of_jit as instead_of_jit
    from gshard.api.jit import jit as jit
    from gshard.api.kernel_function import kernel as kernel
    from gshard.api.marks import name as name
    from gshard.api.marks import pipeline as pipeline
    from gshard.api.marks import replicate as replicate
    from gshard.api.marks import shard as shard
    from gshard.api.marks import shard_by_path as shard_by_path
    from gshard.api.marks import split as split
    from gshard.api.prove import prove as prove
    from gshard.api.row_functions import put_rows as put_rows
    from gshard.api.row_functions import take_rows as take_rows
    from gshard.api.search import search as search
    from gshard.core.errors import ArgumentError as ArgumentError
    from gshard.core.errors import GShardError as GShardError
    from gshard.core.errors import MeshError as MeshError
    from gshard.core.errors import PlanError as PlanError
    from gshard.core.errors import ShardingError as ShardingError
    from gshard.core.errors import ShardingWarning as ShardingWarning
    from gshard.core.layout import Layout as Layout
    from gshard.core.mesh import Mesh as Mesh
    from gshard.device.machine import Machine as Machine
    from gshard.planning.saved_plan import SavedPlan as SavedPlan
    from gshard.rules import rule as rule

# The public names of each module. A name is imported when it is first read, so that ``import gshard`` takes no time.
_NAMES = {
    "api.attention_function": "attention",
    "api.configure": "configure",
    "api.explained": "explain",
    "api.export": "export",
    "api.instead_of_jit": "instead_of_jit",
    "api.jit": "jit",
    "api.kernel_function": "kernel",
    "api.marks": "name pipeline replicate shard shard_by_path split",
    "api.prove": "prove",
    "api.row_functions": "put_rows take_rows",
    "api.search": "search",
    "core.errors": "ArgumentError GShardError MeshError PlanError ShardingError ShardingWarning",
    "core.layout": "Layout",
    "core.mesh": "Mesh",
    "device.machine": "Machine",
    "planning.saved_plan": "SavedPlan",
    "rules": "rule",
}
_PACKAGES = ("rules", "stages", "testing")
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not _typing.TYPE_CHECKING:  # type checkers read the imports above
    __all__ = sorted([*_MODULES, *_PACKAGES])

    def __getattr__(name: str) -> _typing.Any:
        if name in _PACKAGES:
            return _importlib.import_module(f"gshard.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(_importlib.import_module(f"gshard.{_MODULES[name]}"), name))

    def __dir__() -> list[str]:
        """The public names, so that completion leaves out the internal packages."""
        return [*__all__, *(name for name in globals() if name.startswith("__") or name == "moe")]

    class _Package(_types.ModuleType):
        """The package. To import its folder ``search`` does not hide the function of this name."""

        def __setattr__(self, name: str, value: _typing.Any) -> None:
            if name != "search" or not isinstance(value, _types.ModuleType):
                super().__setattr__(name, value)

    _sys.modules[__name__].__class__ = _Package
