"""What ``gshard.jit`` does, verb by verb, each from one noun to the next; and the classes of what gshard returns.

    f, args --trace--> Program --propagate--> Plan --partition--> SpmdProgram --compile--> Executable --> results

``propagate`` is (propagate marks <-> rewrite where split) --> choose --> collective matmuls; recomputation and
prefetching follow ``partition`` (``search.pipeline``).
"""

from gshard.api.configuration import Configuration as Configuration
from gshard.api.configurations import Configurations as Configurations
from gshard.api.jit import Jitted as Jitted
from gshard.api.kernel_function import KernelFunction as KernelFunction
from gshard.api.lowered import Compiled as Compiled
from gshard.api.lowered import Lowered as Lowered
from gshard.core.plan import Plan as Plan
from gshard.core.program import Program as Program
from gshard.core.sharding import Sharding as Sharding
from gshard.core.spmd import SpmdProgram as SpmdProgram
from gshard.device.cost import Cost as Cost
from gshard.emit.compile import Executable as Executable
from gshard.emit.compile import compile as compile
from gshard.emit.partition import partition as partition
from gshard.explanation.explain import Explanation as Explanation
from gshard.explanation.search_result import SearchResult as SearchResult
from gshard.naming.dimension_classes import Dimensions as Dimensions
from gshard.planning.propagate import propagate as propagate
from gshard.tracing.trace import trace as trace
from gshard.xla_programs.compiled_explanation import CompiledExplanation as CompiledExplanation
from gshard.xla_programs.exported_plan import ExportedPlan as ExportedPlan

__all__ = [
    "Compiled",
    "CompiledExplanation",
    "Configuration",
    "Configurations",
    "Cost",
    "Dimensions",
    "Executable",
    "Explanation",
    "ExportedPlan",
    "Jitted",
    "KernelFunction",
    "Lowered",
    "Plan",
    "Program",
    "SearchResult",
    "Sharding",
    "SpmdProgram",
    "compile",
    "partition",
    "propagate",
    "trace",
]
