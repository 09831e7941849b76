"""``python -m tokenspeed.cli``: the same as the command ``tokenspeed``."""

from tokenspeed.cli.main import main

if __name__ == "__main__":
    main()
