"""The rules of JAX's primitives. The import of this package registers them, before those of users."""

import importlib
import pkgutil

from gshard.comm.shards import Shards as Shards
from gshard.core.errors import RuleError as RuleError
from gshard.core.rule import Rule as Rule
from gshard.core.rule import RuleMaker as RuleMaker
from gshard.language.custom import rule as rule
from gshard.language.registry import Call as Call

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
