"""Serving programs: what inference servers run for each token, as plain functions with shardings.

``CASES`` holds all by name; those of ``sampling/`` end in tokens. Shapes have the ratios of today's models, and few
layers. Numbers are drawn from the seed that a program is given, so that partitioned programs draw the same tokens.
"""

from serving_programs import attention, caches, sampling, weights

FAMILIES = sampling, caches, attention, weights
CASES = {case.name: case for family in FAMILIES for case in family.CASES.cases}
