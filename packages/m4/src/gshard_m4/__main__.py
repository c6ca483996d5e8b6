"""``python -m gshard_m4 demo``: the command ``gshard-m4`` without its script."""

from gshard_m4.command_line import run

if __name__ == "__main__":
    run()
