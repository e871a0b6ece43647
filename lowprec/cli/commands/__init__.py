"""One module per command.

Each has a docstring (the help's text), ``EXAMPLES`` (its end), ``configure`` (adds the options to a parser) and
``run`` (takes the parsed options, returns the exit code).
"""
