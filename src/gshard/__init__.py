"""gshard: automatic sharding of JAX programs that explains itself.

split, replicate, shard     mark a few tensors of a program written for one device
jit                         partition and run it on all devices, used like jax.jit
manual, auto_to_manual ...  parts of a program that you partition yourself
explain                     what each tensor got and why, and what the devices say to each other
Machine, Cost               what that takes on given devices: time, bytes, memory
Windowed                    which contractions run in steps instead of after a gather
rule, testing               teach it a new operator, and check what you taught
Mesh, Sharding, UnevenArray the nouns they speak of
GShardError                 the base of all errors raised on purpose
"""

from gshard import testing as testing
from gshard.analysis.cost import Cost as Cost
from gshard.analysis.explain import Explanation as Explanation
from gshard.analysis.machine import Machine as Machine
from gshard.analysis.overlap import Windowed as Windowed
from gshard.api.explained import explain as explain
from gshard.api.jit import jit as jit
from gshard.api.manual_parts import auto_to_manual as auto_to_manual
from gshard.api.manual_parts import manual as manual
from gshard.api.manual_parts import manual_to_auto as manual_to_auto
from gshard.api.manual_parts import part_index as part_index
from gshard.api.marks import replicate as replicate
from gshard.api.marks import shard as shard
from gshard.api.marks import split as split
from gshard.comm.shards import Shards as Shards
from gshard.core.errors import ArgumentError as ArgumentError
from gshard.core.errors import GShardError as GShardError
from gshard.core.errors import MeshError as MeshError
from gshard.core.errors import PlanError as PlanError
from gshard.core.errors import RuleError as RuleError
from gshard.core.errors import ShardingError as ShardingError
from gshard.core.errors import TraceError as TraceError
from gshard.core.mesh import Mesh as Mesh
from gshard.core.plan import Plan as Plan
from gshard.core.program import Program as Program
from gshard.core.rule import Rule as Rule
from gshard.core.rule import RuleMaker as RuleMaker
from gshard.core.sharding import Sharding as Sharding
from gshard.core.spmd import SpmdProgram as SpmdProgram
from gshard.core.uneven import UnevenArray as UnevenArray
from gshard.passes.compile import Executable as Executable
from gshard.rules.registry import Call as Call
from gshard.rules.teach import rule as rule
