"""The one place that holds the version of the package; setuptools reads it without an import."""

__version__ = "0.1.0"
