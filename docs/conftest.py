"""The pages here are doctested; the programs beside them are run by ``tests/docs`` and by ``make docs``."""

collect_ignore_glob = ["*.py"]
