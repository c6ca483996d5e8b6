"""Substitute: a module of JAX's own tests, loaded with another function in the place of ``jax.jit``.

Only what the test module itself imports is replaced (``jax.jit``, ``from jax import jit``, ``jax._src.api.jit``), at
import and later, inside its functions too. JAX's own calls of ``jax.jit`` and gshard's stay as they are.

    tests = load(Path("jax/tests/api_test.py"), "ours")
"""

import builtins
import functools
import inspect
import sys
import types

import jax

import gshard

PARTS = 8


def load(path, side):
    """Runs a module of JAX's tests with the ``jit`` of a side: "jax", "ours" on one device, "split" over eight."""
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    if side != "jax":
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": functools.partial(_import, _JIT[side])}
    sys.modules[path.stem] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def _import(jit, name, *rest):
    module = __import__(name, *rest)
    return Substituted(module, jit) if module.__name__ in HOLDERS else module


# Modules that have ``jit``, or hold one that has.
HOLDERS = {"jax", "jax._src", "jax._src.api"}


class Substituted:
    """A module seen through a window in which ``jit`` is another one; all else is read from and written to it."""

    def __init__(self, module, jit):
        vars(self).update(_module=module, _jit=jit)

    def __getattr__(self, name):
        found = getattr(self._module, name)
        if name == "jit" and callable(found):
            return self._jit
        if isinstance(found, types.ModuleType) and found.__name__ in HOLDERS:
            return Substituted(found, self._jit)
        return found

    def __setattr__(self, name, value):
        setattr(self._module, name, value)


def _ours(*f, **options):
    return gshard.jit(*f, mesh=1, **options)


def _split(*f, **options):
    if not f:
        return lambda f: _split(f, **options)
    return gshard.jit(_with_split_arguments(f[0]), *f[1:], mesh=PARTS, **options)


# Every argument is handed on as it is given, so that what gshard.jit does not know fails.
_JIT = {"ours": _ours, "split": _split}


def _with_split_arguments(f):
    """The same function, which marks each traced argument that has a dimension; what is no function stays as it is."""
    if not inspect.isfunction(f) or inspect.isgeneratorfunction(f):
        return f
    if "_split" not in vars(f):  # one wrapper for a function, or nothing that is cached by function is found again

        @functools.wraps(f)
        def marked(*args, **kwargs):
            return f(*jax.tree.map(_marked, args), **jax.tree.map(_marked, kwargs))

        vars(f)["_split"] = marked
    return vars(f)["_split"]


def _marked(x):
    if isinstance(x, jax.core.Tracer) and isinstance(jax.typeof(x), jax.core.ShapedArray) and x.ndim:
        return gshard.split(x, 0, PARTS)
    return x
