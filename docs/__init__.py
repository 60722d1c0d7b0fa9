"""The documentation's own tools: ``python -m docs.build`` and ``python -m docs.store``."""
