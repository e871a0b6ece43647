"""The version of lowprec, in the one place that the build, the package and the docs read."""

__version__ = "0.3.0"
