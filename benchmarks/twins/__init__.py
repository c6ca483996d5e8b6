"""Programs, each beside the same written for shards by hand; ``by_hand.py`` compares them."""

from twins import loops, merged, order, places, sums, transforms, windows

GROUPS = (
    sums.unfinished, sums.permitted, sums.looked_up, sums.fans,
    loops.own_rounds, loops.in_turn,
    windows.in_a_row, windows.one_more, windows.pooled, windows.convolutions,
    transforms.transforms, transforms.reshards,
    order.searches, order.sorts, order.running,
    places.known_places, places.moved, places.tables, places.made, places.run_time,
    merged.merged,
)  # fmt: skip
