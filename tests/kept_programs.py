"""Programs that a folder of tests compiles several times: compiled once for all tests of a process."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="session")
def _folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module", autouse=True)
def kept_programs(_folder):
    """JAX's persistent cache, in a folder of this process.

    A command line that runs twice, and a marked model on one device, compile what was compiled before.
    """
    changed = {
        "jax_compilation_cache_dir": _folder,
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in changed}

    def use(options):
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX looks once whether there is a cache

    use(changed)
    yield
    use(before)
