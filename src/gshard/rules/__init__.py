"""The rules of JAX's primitives. The import of this package registers them, before those of users."""

import importlib
import pkgutil

from gshard.language.custom import rule as rule

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
