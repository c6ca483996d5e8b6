"""Programs, each beside the same written for shards by hand; ``by_hand.py`` compares them."""
