"""What XLA's own propagation (Shardy) makes of a program, without compiling it: the sharding of each result."""

import re

import jax

_PIPELINE = "builtin.module(sdy-propagation-pipeline)"


def available():
    """Whether this jaxlib lets its passes be run from Python; they are not part of its interface."""
    try:
        return results(lambda x: x + 1, [jax.ShapeDtypeStruct((4,), "float32")]) == [((),)]
    except Exception:
        return False


def results(function, arguments):
    """The axes of each dimension of each result; arguments are ``ShapeDtypeStruct`` with shardings."""
    from jaxlib.mlir.passmanager import PassManager

    module = jax.jit(function).lower(*arguments).compiler_ir()
    with module.context:
        PassManager.parse(_PIPELINE).run(module.operation)
    return read(str(module), [x.ndim for x in jax.tree.leaves(jax.eval_shape(function, *arguments))])


def read(text, ranks):
    """The shardings that the text of a module gives its results."""
    (line,) = re.findall(r"func\.func public @main\(.*", text)
    pieces = line.rsplit(" -> ", 1)[1].split("tensor<")[1:]
    found = []
    for piece, rank in zip(pieces, ranks, strict=True):
        dims = re.search(r"#sdy\.sharding<@\w+, \[(.*?)\]", piece)
        if dims is None:
            found.append(((),) * rank)
            continue
        braces = re.findall(r"\{([^{}]*)\}", dims[1])
        assert len(braces) == rank, piece
        found.append(tuple(tuple(re.findall(r'"(\w+)"', inside)) for inside in braces))
    return found
