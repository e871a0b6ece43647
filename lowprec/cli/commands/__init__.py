"""One module per command.

Each has a docstring (the text of its help), ``EXAMPLES`` (the end of its help), ``configure`` (adds options to a
parser) and ``run`` (executes the parsed options and returns the exit code).
"""
