"""What ``gshard.jit`` does, verb by verb, each from one noun to the next; and the classes of what gshard returns.

    f, args --trace--> Program --propagate--> Plan --partition--> SpmdProgram --compile--> Executable --> results

``propagate`` is (propagate marks <-> rewrite where split) --> choose --> collective matmuls; recomputation follows
``partition`` (``lowering.pipeline``).
"""

from gshard.api.configure import Configuration as Configuration
from gshard.api.configure import Configurations as Configurations
from gshard.api.jit import Jitted as Jitted
from gshard.api.kernel_function import KernelFunction as KernelFunction
from gshard.api.lowered import Compiled as Compiled
from gshard.api.lowered import Lowered as Lowered
from gshard.api.prove import Proof as Proof
from gshard.core.errors import TraceError as TraceError
from gshard.core.plan import Plan as Plan
from gshard.core.program import Program as Program
from gshard.core.sharding import Sharding as Sharding
from gshard.core.spmd import SpmdProgram as SpmdProgram
from gshard.device.cost import Cost as Cost
from gshard.device.machine import MachineError as MachineError
from gshard.emit.compile import Executable as Executable
from gshard.emit.compile import compile as compile
from gshard.emit.partition import partition as partition
from gshard.explanation.explain import Explanation as Explanation
from gshard.explanation.search_result import SearchResult as SearchResult
from gshard.planning.collective_matmuls import CollectiveMatmul as CollectiveMatmul
from gshard.planning.propagate import propagate as propagate
from gshard.remat.rematerialise import MemoryLimitError as MemoryLimitError
from gshard.tracing.trace import trace as trace

__all__ = [
    "CollectiveMatmul",
    "Compiled",
    "Configuration",
    "Configurations",
    "Cost",
    "Executable",
    "Explanation",
    "Jitted",
    "KernelFunction",
    "Lowered",
    "MachineError",
    "MemoryLimitError",
    "Plan",
    "Program",
    "Proof",
    "SearchResult",
    "Sharding",
    "SpmdProgram",
    "TraceError",
    "compile",
    "partition",
    "propagate",
    "trace",
]
