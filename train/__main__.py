"""``python -m train [train] debug …`` and ``torchrun … -m train debug …``: as ``functitan train debug …``."""

import sys

from train.cli import COMMANDS, main

if __name__ == "__main__":
    args = sys.argv[1:]
    # Another command is taken by its name; everything else, such as a recipe, belongs to train.
    sys.exit(main(args if args and args[0] in COMMANDS else ["train", *args]))
