"""`python -m upr_protocol.spark NAME ...`: runs a recipe.

`python -m upr_protocol.spark --file NAME` prints the recipe's file, for `spark-submit`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Final

from upr_protocol.spark import commands
from upr_protocol.spark.recipes import command

_PROGRAM: Final = "python -m upr_protocol.spark"


def main(argv: Sequence[str]) -> int:
    """Runs the recipe that the command line names.

    Returns:
        The exit code.
    """
    recipes = [module.name for module in iter_modules(commands.__path__)]
    name, *arguments = argv or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(_usage(recipes))
        return 0
    if name == "--file" and len(arguments) == 1 and arguments[0] in recipes:
        sys.stdout.write(f"{Path(commands.__path__[0], arguments[0])}.py\n")
        return 0
    if name not in recipes:
        command.say(f"there is no recipe {' '.join(argv)}. There are {', '.join(recipes)}")
        return command.USAGE
    recipe = import_module(f"{commands.__name__}.{name}")
    parser = recipe.argument_parser()
    parser.prog = f"{_PROGRAM} {name}"
    return command.run(parser, recipe.work, arguments)


def _usage(recipes: Sequence[str]) -> str:
    lines = [
        f"usage: {_PROGRAM} NAME ...         run a recipe; NAME --help says more",
        f"       {_PROGRAM} --file NAME      print the recipe's file, for spark-submit",
        "",
        "recipes:",
    ]
    for name in recipes:
        document = import_module(f"{commands.__name__}.{name}").__doc__ or ""
        lines.append(f"  {name:14}{document.splitlines()[0]}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
