"""The command line. Everything heavy is imported inside commands, so that --help answers at
once."""

from gradleak.cli.main import main

__all__ = ["main"]
