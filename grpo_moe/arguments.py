"""A command line whose errors are one line, fit to be shown; for recipes and for the command grpo-moe."""

from __future__ import annotations

import argparse
from typing import NoReturn

from grpo_moe.text import clean


class OneLineParser(argparse.ArgumentParser):
    """Without the usage before an error, which is a page long where there are many options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {clean(message, 500)}; see {self.prog} --help\n")
