"""What the GShard paper measured of collectives on TPU v3 (arXiv:2006.16668), read off its figures.

The text gives ratios only: an AllToAll takes 9 times as long on 2,048 cores as on 16, and the dispatch and combine of
an MoE layer 3.75 times as long with 2,048 experts as with 128. The times here are the positions of the markers and bars
in an image of the figures; one pixel is 0.9 % of a time in figure 9, and 30 µs in figure 8. They give 8.3 times (8 MB),
9.6 times (32 MB) and 3.86 times.
"""

CORES = (16, 32, 64, 128, 256, 512, 1024, 2048)

# Figure 9: microseconds on so many cores, of a collective over all of them; MiB that each core holds.
MICROSECONDS: dict[tuple[str, int], tuple[int, ...]] = {
    ("all_reduce", 8): (285, 170, 234, 175, 274, 185, 210, 211),
    ("all_reduce", 32): (1133, 618, 921, 554, 950, 589, 529, 609),
    ("all_to_all", 8): (285, 296, 548, 732, 1224, 1298, 2409, 2361),
    ("all_to_all", 32): (1102, 1149, 2180, 2590, 4959, 5082, 10336, 10620),
}

# Figure 8: microseconds of two AllToAlls, by the number of experts, which is that of cores. A core holds 2,048 tokens:
# its feed-forward layer, 1,024 by 8,192, has a roofline of 1,105 µs at 61.5 TFLOP/s. It sends each token twice, as
# 1,024 numbers in bfloat16; twice as many bytes would not go through the links of 128 cores in the measured time.
DISPATCH_AND_COMBINE: dict[int, int] = {128: 1240, 512: 3020, 2048: 4780}
DISPATCHED_MIB = 8
