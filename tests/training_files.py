"""Files as users write them: a training step for one device with AdamW, in plain JAX and in frameworks."""

import importlib.util
import sys

_COMMON = '''"""A training step."""

import functools

import jax
import jax.numpy as jnp
import optax
{imports}

WIDTH, HIDDEN, BLOCKS, BATCH = 128, 512, 2, 16
optimizer = optax.adamw(1e-3)

'''
_DATA = """

def data():
    return jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
"""
_PLAIN = """
def net(params, x):
    for p in params:
        hidden = jax.nn.gelu(x @ p["up"] + p["bias"])
        x = x + hidden @ p["down"]
    return x


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, moments, x):
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((net(params, x) - jnp.sin(x)) ** 2))(params)
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def made():
    def block(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (WIDTH, HIDDEN)) / 16,
            "bias": jnp.zeros(HIDDEN),
            "down": jax.random.normal(down, (HIDDEN, WIDTH)) / 32,
        }

    params = [block(key) for key in jax.random.split(jax.random.key(0), BLOCKS)]
    return params, optimizer.init(params), data()


def again(step, args):
    params, moments, loss = step(*args)
    return (params, moments, args[2]), loss
"""
_LINEN = """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(BLOCKS):
            hidden = nn.gelu(nn.Dense(HIDDEN, name=f"up{i}")(x))
            x = x + nn.Dense(WIDTH, name=f"down{i}")(hidden)
        return x


def step(state, x):
    def loss_of(params):
        return jnp.mean((state.apply_fn(params, x) - jnp.sin(x)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


step = jax.jit(step, donate_argnums=0)


def made():
    net, x = Net(), data()
    return TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), x), tx=optimizer), x


def again(step, args):
    state, loss = step(*args)
    return (state, args[1]), loss
"""
_NNX = """
class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        hidden = nnx.gelu(self.up(x))
        return x + self.down(hidden)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="state")
def step(graphdef, state, x):
    model, adam = nnx.merge(graphdef, state)
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - jnp.sin(x)) ** 2))(model)
    adam.update(model, grads)
    return nnx.state((model, adam)), loss


def made():
    model = Net(nnx.Rngs(0))
    return *nnx.split((model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))), data()


def again(step, args):
    state, loss = step(*args)
    return (args[0], state, args[2]), loss
"""
_EQUINOX = """
class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, key=up)
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, key=down)

    def __call__(self, x):
        hidden = jax.nn.gelu(self.up(x))
        return x + self.down(hidden)


def net(blocks, x):
    for block in blocks:
        x = jax.vmap(block)(x)
    return x


@jax.jit
def step(blocks, moments, x):
    loss, grads = jax.value_and_grad(lambda blocks: jnp.mean((net(blocks, x) - jnp.sin(x)) ** 2))(blocks)
    updates, moments = optimizer.update(grads, moments, blocks)
    return eqx.apply_updates(blocks, updates), moments, loss


def made():
    blocks = [Block(key) for key in jax.random.split(jax.random.key(0), BLOCKS)]
    return blocks, optimizer.init(blocks), data()


def again(step, args):
    blocks, moments, loss = step(*args)
    return (blocks, moments, args[2]), loss
"""
TRAINING = {
    "plain": _COMMON.format(imports="") + _DATA + _PLAIN,
    "Linen": _COMMON.format(imports="from flax import linen as nn\nfrom flax.training.train_state import TrainState")
    + _DATA
    + _LINEN,
    "NNX": _COMMON.format(imports="from flax import nnx") + _DATA + _NNX,
    "Equinox": _COMMON.format(imports="import equinox as eqx") + _DATA + _EQUINOX,
}


def loaded(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
