"""gshard: automatic sharding that explains itself."""

from gshard.passes.annotate import replicate as replicate
from gshard.passes.annotate import shard as shard
from gshard.passes.annotate import split as split
from gshard.pipeline import jit as jit
