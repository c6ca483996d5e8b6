"""FLOPs that one device executes in one call of a compiled program: XLA's own count, with the rounds of loops.

``compiled.cost_analysis()["flops"]`` counts the body of a loop once, however often it runs. Here the text of the
program tells how often (``gshard.xla.hlo_parser``), and what the further rounds execute is added, counted as XLA
counts: two for each multiplication and addition of a product, one for each element of an elementwise operation.

    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda i, x: x @ x, x)).lower(jnp.ones((8, 8))).compile()
    executed(loop)                          # at least 10 * 2 * 8**3; cost_analysis() says little more than 2 * 8**3

A loop whose length only the data tell counts one round; of the branches of a conditional the costliest counts.
Transcendental functions are no FLOPs to XLA, nor here. Of what is fused into something that reads a slice of it XLA
counts all elements, although a fusion computes each where it is read: those that nothing reads are taken off.
"""

import math
import re

from gshard.xla.hlo_parser import read_module, trip_count

ELEMENTWISE = frozenset(
    """
    abs add and ceil clamp compare convert count-leading-zeros divide floor is-finite maximum minimum multiply
    negate not or popcnt reduce-precision remainder round-nearest-afz round-nearest-even select shift-left
    shift-right-arithmetic shift-right-logical sign subtract xor
    """.split()
)

MIXING = frozenset(
    """
    call convolution conditional custom-call dot fft fusion gather map reduce reduce-window scatter sort tuple while
    """.split()
)
CUTTING = frozenset(("dynamic-slice", "dynamic-update-slice", "pad"))


def executed(compiled):
    """FLOPs of one call on one device."""
    text = compiled.as_text()
    return float((compiled.cost_analysis() or {}).get("flops", 0.0)) + further_rounds(text) - unread(text)


def further_rounds(text):
    """What loops execute after their first rounds."""
    module = read_module(text)
    entry = module.computations[module.entry]
    return _counted(module, entry, every_round=True) - _counted(module, entry, every_round=False)


def unread(text):
    """What ``cost_analysis`` counts of elements that no fusion computes."""
    module = read_module(text)
    entry = module.computations[module.entry]
    return counted_once(text) - _counted(module, entry, every_round=False)


def counted_once(text):
    """All FLOPs with each loop's body once, as ``cost_analysis`` counts."""
    module = read_module(text)
    return _counted(module, module.computations[module.entry], every_round=False, every_element=True)


def elements_read(body):
    """How many elements of each instruction of a fusion are computed: those that something reads."""
    found = {body.root: _size(body.instructions[body.root].type)}
    for made in reversed(body.instructions.values()):
        wanted = found.get(made.name, 0.0)
        for position, operand in enumerate(made.operands):
            if operand not in body.instructions:
                continue
            whole = _size(body.instructions[operand].type)
            # Of the operands of what goes element by element, cuts or joins, no more than of its result.
            reads = wanted if made.opcode not in MIXING and not (made.opcode in CUTTING and position) else whole
            found[operand] = min(whole, found.get(operand, 0.0) + reads)
    return found


def of_instruction(module, computation, made):
    """FLOPs of one instruction, what it calls included, loops with all their rounds."""
    return _one(module, computation, made, every_round=True)


def products_of(module, computation, made):
    """The FLOPs among them of contractions and convolutions, and the dtype of the last of these."""
    if made.opcode in ("dot", "convolution"):
        return of_instruction(module, computation, made), computation.instructions[made.operands[0]].type.split("[")[0]
    total, dtype = 0.0, ""
    for inner in (module.computations[name] for name in made.called("calls") if made.opcode == "fusion"):
        for i in inner.instructions.values():
            more, of = products_of(module, inner, i)
            total, dtype = total + more, of or dtype
    return total, dtype


def _counted(module, computation, every_round, every_element=False):
    return sum(_one(module, computation, i, every_round, every_element) for i in computation.instructions.values())


def _fused(module, body, every_round):
    read = elements_read(body)
    return sum(
        _one(module, body, i, every_round, False) * read.get(i.name, 0.0) / max(_size(i.type), 1.0)
        for i in body.instructions.values()
    )


def _one(module, computation, made, every_round, every_element=False):
    def inside(attribute):
        called = [module.computations[name] for name in made.called(attribute)]
        return [_counted(module, c, every_round, every_element) for c in called]

    operands = [computation.instructions[o].type for o in made.operands if o in computation.instructions]
    match made.opcode:
        case "while":
            rounds = trip_count(module, computation, made) if every_round else 1
            once = sum(inside("condition")) + sum(inside("body"))
            return once * (1 if rounds is None else rounds)
        case "conditional":
            return max(
                inside("branch_computations") + inside("true_computation") + inside("false_computation"), default=0.0
            )
        case "fusion" if not every_element:
            return sum(_fused(module, module.computations[name], every_round) for name in made.called("calls"))
        case "fusion" | "call" | "async-start":
            return sum(inside("calls")) + sum(inside("to_apply"))
        case "dot":
            return 2 * _size(made.type) * _contracted(made, operands[0])
        case "convolution":
            return _convolution(made, operands)
        case "reduce":
            arrays = _arrays(made.type)
            return (_size(operands[0]) - math.prod(arrays[0])) * sum(inside("to_apply"))
        case "reduce-window":
            window = math.prod(_numbers(made.attributes, "size"))
            return math.prod(_arrays(made.type)[0]) * (window - 1) * sum(inside("to_apply"))
        case "scatter":
            updates = operands[len(operands) // 2 + 1 :]
            return sum(map(_size, updates)) * sum(inside("to_apply"))
        case "map":
            return _size(made.type) * sum(inside("to_apply"))
        case "sort":
            elements = _size(operands[0])
            return elements * math.ceil(math.log2(elements)) if elements > 1 else 0.0
        case "fft":
            lengths = re.search(r"\bfft_length=\{([\d,]+)\}", made.attributes)
            assert lengths
            logs = math.prod(int(n).bit_length() - 1 for n in lengths[1].split(","))
            return 8 * max(_size(operands[0]), _size(made.type)) * logs
        case opcode if opcode in ELEMENTWISE:
            return _size(made.type)
    return 0.0


def _arrays(text):
    """The shapes of a type."""
    found = re.findall(r"\b[a-z]+[a-z0-9]*\[([\d,<=]*)\]", text)
    return [[int(d.removeprefix("<=")) for d in dims.split(",") if d] for dims in found]


def elements_of(text):
    """The elements of all arrays of a type."""
    return _size(text)


def _size(text):
    return float(sum(math.prod(shape) for shape in _arrays(text)))


def _numbers(attributes, key):
    found = re.search(rf"\b{key}=([\dx]+)", attributes)
    return [int(n) for n in found[1].split("x")] if found else []


def _contracted(made, operand):
    found = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", made.attributes)
    shape = _arrays(operand)[0]
    return math.prod(shape[int(d)] for d in found[1].split(",") if d) if found else 1


def _convolution(made, operands):
    """As XLA counts it: a position of the window that falls on padding or between dilated elements is nothing."""
    labels = re.search(r"\bdim_labels=(\w+)_(\w+)->(\w+)", made.attributes)
    assert labels
    left, right, out = labels.groups()
    x, w = _arrays(operands[0])[0], _arrays(operands[1])[0]
    y = _arrays(made.type)[0]
    batch_groups = int((re.search(r"\bbatch_group_count=(\d+)", made.attributes) or ("", "1"))[1])
    spatial = sorted(c for c in left if c.isdigit())
    count = len(spatial)
    sizes = _numbers(made.attributes, "size") or [1] * count
    strides = _numbers(made.attributes, "stride") or [1] * count
    left_steps = _numbers(made.attributes, "lhs_dilate") or [1] * count
    right_steps = _numbers(made.attributes, "rhs_dilate") or [1] * count
    found = re.search(r"\bpad=([\d_x\-]+)", made.attributes)
    pads = [int(p.split("_")[0]) for p in found[1].split("x")] if found else [0] * count
    valid = 1
    for d, label in enumerate(spatial):
        n, length = x[left.index(label)], y[out.index(label)]
        last = (n - 1) * left_steps[d]
        at = (o * strides[d] + k * right_steps[d] - pads[d] for o in range(length) for k in range(sizes[d]))
        valid *= sum(0 <= i <= last and i % left_steps[d] == 0 for i in at)
    batch = x[left.index("b")] // batch_groups
    return 2.0 * w[right.index("i")] * y[out.index("f")] * batch * valid
