"""rules: what is known of each primitive; importing this package fills the registry."""

from gshard.rules import banded as banded
from gshard.rules import callback as callback
from gshard.rules import concatenate_slices as concatenate_slices
from gshard.rules import contract as contract
from gshard.rules import convolution as convolution
from gshard.rules import create as create
from gshard.rules import custom_partitioning as custom_partitioning
from gshard.rules import dynamic as dynamic
from gshard.rules import elementwise as elementwise
from gshard.rules import indexing as indexing
from gshard.rules import joining as joining
from gshard.rules import kernel as kernel
from gshard.rules import linalg as linalg
from gshard.rules import manual as manual
from gshard.rules import manual_boundary as manual_boundary
from gshard.rules import merged_look_ups as merged_look_ups
from gshard.rules import prefixes as prefixes
from gshard.rules import ragged_dot as ragged_dot
from gshard.rules import reductions as reductions
from gshard.rules import shape as shape
from gshard.rules import slicing as slicing
from gshard.rules import sort as sort
from gshard.rules import sorted_search as sorted_search
from gshard.rules import table as table
from gshard.rules import window as window
