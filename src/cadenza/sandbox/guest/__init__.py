"""Code of the untrusted side: zygote, mounts, agent. Imports only the standard library and pytest.

The zygote loads this package by path under the name ``_cadenza_guest``, so that it needs nothing of the host
process: no environment, no ``sys.path``, no third-party imports beyond pytest.
"""
